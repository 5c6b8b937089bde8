"""The run of a checkpoint, and its tensors: which file holds which part, and the values."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.findings import check_checkpoint
from shardviz.layout.region import Region
from shardviz.notebook.runs import ByRank, Run, Tensors, concise, read_only
from shardviz.notebook.verdicts import FindingOfRun, ReportOfRun
from shardviz.picture.display import SVG, Drawable
from shardviz.relate.casts import numbers_of
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from rich.text import Text

    from shardviz.checkpoint.records import Checkpoint, Chunk, StoredTensor
    from shardviz.explain.finding import Finding
    from shardviz.picture.text.terminal import Terminal

    Array = NDArray[Any]


class SavedRun(Run["SavedTensor"]):
    """A checkpoint as a run; only headers and metadata are read.

    Attributes:
        checkpoint: The checkpoint as shardviz reads it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint that was opened."""
        self.checkpoint, self.path, tensors = checkpoint, checkpoint.path, checkpoint.tensors
        self.tensors = Tensors(tensors, lambda name: SavedTensor(self, tensors[name]), "the checkpoint")

    @cached_property
    def _report(self) -> ReportOfRun:
        report = check_checkpoint(self.checkpoint)
        nothing = not self.tensors and not report.findings
        return ReportOfRun(self, report, why_not=f"{self.path} has no tensors" if nothing else "")

    def page(self) -> str:
        """Return the checkpoint as an HTML page: what `shardviz show -o page.html` writes."""
        from shardviz.picture.html.stored import stored_html

        return stored_html(self.checkpoint, self._report.judged)

    def report_page(self, finding: Finding | None = None) -> str:
        """Return its findings as an HTML page, or one of them alone."""
        from shardviz.picture.html.stored import stored_findings_html

        return stored_findings_html(self.checkpoint, self._report.judged, finding)

    def lines(self, terminal: Terminal) -> list[Text]:
        """Return a line for each tensor, as `shardviz show` prints them."""
        from shardviz.picture.text.checkpoint import tensors_lines

        return tensors_lines(self.checkpoint)

    def report_lines(self, terminal: Terminal, finding: Finding | None = None) -> list[Text]:
        """Return its report as text, or one of its findings."""
        from shardviz.picture.text.checkpoint import checkpoint_report_lines
        from shardviz.picture.text.report import findings_lines

        if finding is None:
            return checkpoint_report_lines(self.checkpoint, self._report.judged, terminal)
        return findings_lines([finding], terminal)

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return f"Checkpoint {self.path.resolve().name}: {counted(len(self.tensors), 'tensor')}, {self.checkpoint.kind}"


class SavedTensor(Drawable):
    """One tensor of a checkpoint, stored in chunks numbered from 0 in the checkpoint's order.

    What only ranks have, as `grad`, `held_layout`, `ids` and `reference`, only tensors of a dump have (`TensorOfRun`).

    Attributes:
        run: The checkpoint that it is of.
        name: Its name.
        shape: The global shape.
        dtype: The dtype, as torch names it without `torch.`.
        layout: Its shape in the notation: a checkpoint claims no layout.
        files: The files that it is in.
    """

    mesh = claimed = placements = None

    def __init__(self, run: SavedRun, saved: StoredTensor) -> None:
        """Take a tensor of a checkpoint; nothing of it is read."""
        self.run, self._saved = run, saved
        self.name, self.shape, self.dtype, self.files = saved.name, saved.shape, saved.dtype, saved.files
        self.layout = f"[{', '.join(map(str, saved.shape))}]"

    def __getattr__(self, name: str) -> Any:
        """Say of an attribute that a dump's tensor has why this one lacks it."""
        from shardviz.notebook.dumps import TensorOfRun

        if not name.startswith("_") and hasattr(TensorOfRun, name):
            raise AttributeError(
                f"a checkpoint's tensor has no .{name}: only tensors of a dump have it. A checkpoint has .held, "
                ".shards and .full()"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def held(self) -> Mapping[int, Region]:
        """The part of the tensor that each chunk is."""
        return self._chunks(lambda chunk: chunk.region, lambda chunk: str(chunk.region))

    @property
    def shards(self) -> Mapping[int, Array]:
        """Values of each chunk, mapped from its file on demand; bfloat16 as float32.

        Raises:
            DumpError: A file is missing, too short or damaged, when a chunk is asked for.
        """
        return self._chunks(
            lambda chunk: read_only(numbers_of(self._saved.chunk_bits(chunk), self.dtype)),
            lambda chunk: f"{self.dtype}{list(chunk.sizes)}",
        )

    def _chunks(self, read: Any, shown: Any) -> Mapping[int, Any]:
        chunks: tuple[Chunk, ...] = self._saved.chunks
        return ByRank(range(len(chunks)), lambda at: read(chunks[at]), lambda at: shown(chunks[at]))

    @concise
    def full(self) -> Array:
        """Return the whole tensor, assembled from its chunks.

        Raises:
            DumpError: Elements are stored nowhere, or twice, or cannot be read.
        """
        return read_only(numbers_of(self._saved.read(Region.whole(self.shape)), self.dtype))

    @property
    def findings(self) -> tuple[FindingOfRun, ...]:
        """What the check of the checkpoint found about it."""
        return self.run.check().of(self.name)

    def lines(self, terminal: Terminal) -> list[Text]:
        """Return which bytes of which file hold which part, as `shardviz show` prints it."""
        from shardviz.picture.text.checkpoint import tensor_lines

        return tensor_lines(self._saved)

    def markup(self) -> Mapping[str, str]:
        """Return which file holds which part, as `shardviz show -o FILE.svg` draws it."""
        return {SVG: self.svg()}

    def svg(self) -> str:
        """Return the picture as an SVG file.

        Raises:
            DumpError: Its chunks are too many to draw, or reach out of it.
        """
        from shardviz.picture.model.stored import checkpoint_subject, number_files
        from shardviz.picture.svg.stored import stored_svg

        return stored_svg(checkpoint_subject(self._saved, number_files(self.run.checkpoint)))

    @property
    def title(self) -> str:
        """What it is, in a line."""
        where = counted(len(self.files), "file")
        return f"Tensor {printable(self.name)}: {self.dtype}{self.layout} in {where}"
