"""The tensors of a checkpoint with their verdicts and maps, and what its viewer writes about them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from shardviz.errors import ShardvizError
from shardviz.picture.model.palette import rank_color
from shardviz.picture.model.stored import checkpoint_subject, number_files
from shardviz.picture.text.checkpoint import in_order, total
from shardviz.text import bytes_text, nearest, printable

from ..colors import rank_style, verdict_style
from .document import Judged
from .names import LEAST_NAME, fitted
from .selection import Target, parse_target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardviz.check.report import Report
    from shardviz.check.verdicts import Verdict
    from shardviz.checkpoint.records import Checkpoint, StoredTensor
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.sides import Sides
    from shardviz.picture.model.stored import CheckpointSubject, StoredPart


@dataclass(frozen=True)
class StoredEntry:
    """One tensor in the tree. An optimizer's state is listed under its own modules, as the checkpoint has it.

    Attributes:
        findings: Indices into the report's findings.
    """

    tensor: StoredTensor
    verdict: Verdict
    findings: tuple[int, ...] = ()
    role: ClassVar[str] = "param"
    listed: ClassVar[bool] = True
    has_claim: ClassVar[bool] = True
    mesh: ClassVar[None] = None
    pending: ClassVar[str] = ""
    wrong: ClassVar[str] = ""
    axes: ClassVar[frozenset[str]] = frozenset()

    @property
    def title(self) -> str:
        """Its name, safe to print."""
        return printable(self.tensor.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name."""
        return (self.tensor.name,)

    @property
    def short_layout(self) -> str:
        """Its shape."""
        return f"[{', '.join(map(str, self.tensor.shape))}]"

    @property
    def layout(self) -> str:
        """Its dtype and shape."""
        return f"{printable(self.tensor.dtype)}{self.short_layout}"

    @property
    def facts(self) -> str:
        """Its bytes."""
        return bytes_text(self.tensor.num_bytes)

    def is_on(self, rank: int) -> bool:
        """Return that no rank has a part of it: files have."""
        return False

    def title_of(self, name: str) -> str:
        """Return its name, safe to print."""
        return self.title

    def verdict_of(self, name: str) -> Verdict:
        """Return the verdict on it."""
        return self.verdict


@dataclass(frozen=True)
class StoredDocument(Judged):
    """A checkpoint, and its report once it is checked.

    Attributes:
        report: What the check found; None while it runs.
    """

    checkpoint: Checkpoint
    report: Report | None = None
    mesh: ClassVar[Mesh | None] = None
    missing: ClassVar[frozenset[int]] = frozenset()

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each file."""
        return number_files(self.checkpoint)

    @cached_property
    def entries(self) -> tuple[StoredEntry, ...]:  # type: ignore[override]
        """The tensors in the order of their names."""
        unchecked = {reason.tensor for reason in self.report.not_checked} if self.report else set()
        entries = []
        for tensor in in_order(self.checkpoint):
            indices = self.findings_of.get(tensor.name, ())
            verdict: Verdict = "pending" if self.report is None else "unknown" if tensor.name in unchecked else "good"
            entries.append(
                StoredEntry(tensor, self.findings[indices[0]].severity if indices else verdict, tuple(indices))
            )
        return tuple(entries)

    @cached_property
    def stored(self) -> Callable[[int], CheckpointSubject]:
        """Returns a tensor with its parts, made once; raises a DumpError if it cannot be drawn."""
        return cache(lambda entry: checkpoint_subject(self.entries[entry].tensor, self.numbers))

    def sides(self, entry: int, name: str = "") -> Sides:
        """Return which file holds what of a tensor."""
        return self.stored(entry).sides

    @property
    def counts(self) -> str:
        """Its tensors, their bytes and its files."""
        return total(self.checkpoint)

    def find(self, text: str) -> str:
        """Return the tensor that a text names, by its name, the end of it or a part of it.

        Raises:
            ShardvizError: No tensor has it in its name.
        """
        target = parse_target(text, self)
        if isinstance(target, Target) and target.name and target.place is None:
            return target.name
        close, path = nearest(text, self.checkpoint.tensors), self.checkpoint.path
        hint = f"did you mean {printable(close)}?" if close else f"`shardviz show {path}` lists them"
        raise ShardvizError(f"{path} has no tensor {printable(text)}", hint)

    def describe(self, entry: int, place: Sequence[int], name: str = "") -> str:
        """Say which bytes of which file have an element."""
        return where(self.stored(entry), place).plain

    def who(self, entry: int, place: Sequence[int], name: str = "") -> list[str]:
        """Say which bytes of which file have an element."""
        return self.describe(entry, place).splitlines()


def parts_at(tensor: CheckpointSubject, place: Sequence[int]) -> list[StoredPart]:
    """Return the parts that have an element, given by its index in the shape of the holders or in its own."""
    index = place[len(place) - len(tensor.tensor.shape) :]
    return [
        part
        for part in tensor.parts
        if all(
            any(start <= at < stop for start, stop in ranges)
            for ranges, at in zip(part.region.dims, index, strict=True)
        )
    ]


WITH_BAR = 26
"""Columns behind a file's size from which on a bar stands before its name."""


def file_line(at: int, name: str, size: int | None, most: int, colors: str, width: int) -> Text:
    """Write a file's number in its color, its size, to scale if there is room for that, and its name."""
    line = Text.assemble((f"{at:>4} ", rank_style(rank_color(at), colors)), no_wrap=True)
    line.append(f"{bytes_text(size):>8}  ") if size is not None else line.append(" missing  ", verdict_style("error"))
    if size is not None and width - line.cell_len >= WITH_BAR:
        line.append(f"{'█' * max(round(8 * size / max(most, 1)), bool(size)):<8}  ", "dim")
    return line.append(fitted(printable(name), max(width - line.cell_len, LEAST_NAME)))


def where(tensor: CheckpointSubject, place: Sequence[int]) -> Text:
    """Write which bytes of which file have an element."""
    index = place[len(place) - len(tensor.tensor.shape) :]
    text = Text.assemble((f"[{', '.join(map(str, index))}]", "bold"))
    parts = [(part.file, part) for part in parts_at(tensor, place) if part.file is not None]
    if not parts:
        return text.append("  in no file", verdict_style("error"))
    for file, _ in parts[:2]:
        text.append(f"  file {file} ").append(printable(tensor.files[file]), "bold")
    twice = f"  in {len(parts)} parts" if len(parts) > 1 else ""
    spans = ", and ".join(str(part.bytes) for _, part in parts[:2])
    return text.append(f"\n{spans}: part {parts[0][1].region}", "dim").append(twice, verdict_style("warning"))
