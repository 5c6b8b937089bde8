"""The tensors of a checkpoint with their verdicts and maps, and what its viewer writes about them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from shardviz.errors import ShardvizError
from shardviz.picture.model.holders import Plane
from shardviz.picture.model.palette import rank_colour
from shardviz.picture.model.subjects.stored import numbered, stored
from shardviz.picture.text.checkpoint import in_order, total
from shardviz.picture.text.findings import findings_lines
from shardviz.picture.text.report import not_checked_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.text import bytes_text, counted, nearest, printable

from ..colors import rank_style, verdict_style
from .names import shortened
from .target import Known, Target, parse_target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.report import Report
    from shardviz.check.verdicts import Verdict
    from shardviz.checkpoint.records import Checkpoint, Saved
    from shardviz.picture.model.subjects.stored import Stored, StoredPart


@dataclass(frozen=True)
class StoredEntry:
    """One tensor in the tree. An optimizer's state is listed under its own modules, as the checkpoint has it.

    Attributes:
        tensor: The tensor.
        verdict: The worst that was found of it.
        findings: Indices into the report's findings.
    """

    tensor: Saved
    verdict: Verdict
    findings: tuple[int, ...] = ()
    is_state: ClassVar[bool] = False
    suffix: ClassVar[str] = ""
    role: ClassVar[str] = ""
    listed: ClassVar[bool] = True
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

    def verdict_of(self, name: str) -> Verdict:
        """Return the verdict on it."""
        return self.verdict


@dataclass(frozen=True)
class StoredDocument:
    """A checkpoint, and its report once it is checked.

    Attributes:
        checkpoint: The checkpoint.
        report: What the check found; None while it runs.
    """

    checkpoint: Checkpoint
    report: Report | None = None
    _drawn: dict[str, Stored] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each file."""
        return numbered(self.checkpoint)

    @cached_property
    def entries(self) -> tuple[StoredEntry, ...]:
        """The tensors in the order of their names."""
        findings = self._findings
        return tuple(
            StoredEntry(tensor, self._verdict(tensor.name), tuple(findings.get(tensor.name, ())))
            for tensor in in_order(self.checkpoint)
        )

    @cached_property
    def _findings(self) -> dict[str, list[int]]:
        indices: dict[str, list[int]] = {}
        for index, finding in enumerate(self.report.findings if self.report else ()):
            for name in finding.tensors:
                indices.setdefault(name, []).append(index)
        return indices

    def _verdict(self, name: str) -> Verdict:
        if self.report is None:
            return "pending"
        return self._worst.get(name, "unknown" if name in self._unchecked else "good")

    @cached_property
    def _worst(self) -> dict[str, Verdict]:
        verdicts: dict[str, Verdict] = {}
        for finding in reversed(self.report.findings if self.report else ()):
            verdicts |= dict.fromkeys(finding.tensors, finding.severity)
        return verdicts

    @cached_property
    def _unchecked(self) -> frozenset[str]:
        return frozenset(reason.tensor for reason in self.report.not_checked) if self.report else frozenset()

    def stored(self, entry: int) -> Stored:
        """Return a tensor with its parts, made once.

        Raises:
            DumpError: It cannot be drawn.
        """
        tensor = self.entries[entry].tensor
        if tensor.name not in self._drawn:
            self._drawn[tensor.name] = stored(tensor, self.numbers)
        return self._drawn[tensor.name]

    def checked(self, report: Report) -> StoredDocument:
        """Return it with its report; maps are kept."""
        return replace(self, report=report)


def first_plane(tensor: Saved) -> Plane | None:
    """Return the plane that a tensor is first drawn on: its last two dims that are split, or its last two; a line
    runs downwards.
    """
    shape = (1,) * (2 - len(tensor.shape)) + tensor.shape
    if len(tensor.shape) < 2:
        return Plane(1, 0, (0, 0)) if all(shape) else None
    missing = len(shape) - len(tensor.shape)
    split = [dim for dim in range(len(tensor.shape)) if len({chunk.offsets[dim] for chunk in tensor.chunks}) > 1]
    dims = sorted([*(dim + missing for dim in split), *(dim for dim in reversed(range(len(shape))))][:2])
    if len(set(dims)) < 2:
        dims = [len(shape) - 2, len(shape) - 1] if dims[0] >= len(shape) - 2 else [dims[0], len(shape) - 1]
    return Plane(dims[0], dims[1], (0,) * len(shape)) if all(shape) else None


def parts_at(tensor: Stored, place: tuple[int, ...]) -> list[StoredPart]:
    """Return the parts that have an element, given by its index in the shape of the holders."""
    index = place[len(place) - len(tensor.tensor.shape) :]
    return [part for part in tensor.parts if _has(part, index)]


def _has(part: StoredPart, index: tuple[int, ...]) -> bool:
    dims = zip(part.region.dims, index, strict=True)
    return all(any(start <= at < stop for start, stop in ranges) for ranges, at in dims)


def drawn(document: StoredDocument, entry: int) -> tuple[Stored | None, str]:
    """Return a tensor's parts, or why they cannot be drawn."""
    try:
        return document.stored(entry), ""
    except ShardvizError as error:
        return None, error.message


def named(checkpoint: Checkpoint, text: str) -> str:
    """Return the tensor that a text names, by its name, the end of it or a part of it.

    Raises:
        ShardvizError: No tensor has it in its name.
    """
    entries = StoredDocument(checkpoint).entries
    target = parse_target(text, Known(entries, lambda entry: entries[entry].tensor.shape))
    if isinstance(target, Target) and target.name and target.place is None:
        return target.name
    close = nearest(text, checkpoint.tensors)
    hint = f"did you mean {printable(close)}?" if close else f"`shardviz show {checkpoint.path}` lists them"
    raise ShardvizError(f"{checkpoint.path} has no tensor {printable(text)}", hint)


MOST_NAME = 60


def title_text(checkpoint: Checkpoint, note: str = "") -> Text:
    """Write the checkpoint's name and its sum, with a note."""
    name = shortened(printable(checkpoint.path.name), MOST_NAME)
    behind = f"  {note} · {total(checkpoint)}" if note else f"  {total(checkpoint)}"
    return Text.assemble((name, "bold"), (behind, "dim"), no_wrap=True, overflow="ellipsis")


def file_line(at: int, name: str, size: int | None, most: int, colours: str) -> Text:
    """Write a file's number in its colour, its size to scale, and its name."""
    line = Text.assemble((f"{at:>4} ", rank_style(rank_colour(at), colours)), no_wrap=True)
    if size is None:
        return line.append(f"{'missing':>10}  ", verdict_style("error")).append(printable(name))
    bar = "█" * max(round(8 * size / max(most, 1)), bool(size))
    return line.append(f"{bytes_text(size):>10}  ").append(f"{bar:<8}  ", "dim").append(printable(name))


def where(tensor: Stored, place: tuple[int, ...]) -> Text:
    """Write which bytes of which file have an element."""
    index = place[len(place) - len(tensor.tensor.shape) :]
    text = Text.assemble((f"[{', '.join(map(str, index))}]", "bold"))
    parts = [part for part in parts_at(tensor, place) if part.file is not None]
    if not parts:
        return text.append("  in no file", verdict_style("error"))
    for part in parts[:2]:
        assert part.file is not None, "it was just looked at"
        text.append(f"  file {part.file} ").append(printable(tensor.files[part.file]), "bold")
    twice = f"  in {len(parts)} parts" if len(parts) > 1 else ""
    spans = ", and ".join(str(part.bytes) for part in parts[:2])
    return text.append(f"\n{spans}: part {parts[0].region}", "dim").append(twice, verdict_style("warning"))


def about(document: StoredDocument, target: Target) -> str:
    """Say which tensor or element a target is, and which file has the element."""
    if target.entry is None:
        return ""
    entry = document.entries[target.entry]
    title = f"{shortened(entry.title)}  {entry.layout}"
    others = f"\nand {counted(target.others, 'more tensor')} with this in the name" if target.others else ""
    if target.place is None:
        return title + others
    tensor, why = drawn(document, target.entry)
    if tensor is None:
        return f"{title}\n? {printable(why)}"
    missing = max(2 - len(target.place), 0)
    return f"{title}\n{where(tensor, (*(0,) * missing, *target.place)).plain}"


def findings_text(report: Report, width: int) -> Text:
    """Write what is wrong, or that nothing is."""
    terminal = Terminal(width=width)
    lines = [*findings_lines(report.findings, terminal), *not_checked_lines(report, terminal)]
    if not lines:
        return Text(f"✓ the files have all of {counted(report.num_tensors, 'tensor')}", verdict_style("good"))
    return Text("\n").join(lines)
