"""Texts of the viewer of a checkpoint: its title, the line of a file, where an element lies, its findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from shardviz.picture.model.palette import rank_colour
from shardviz.picture.text.checkpoint import total
from shardviz.picture.text.findings import findings_lines
from shardviz.picture.text.report import not_checked_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.text import bytes_text, counted, printable

from ..colours import rank_style, verdict_style
from ..model.names import shortened
from ..model.stored import drawn, parts_at

if TYPE_CHECKING:
    from shardviz.check.report import Report
    from shardviz.checkpoint.records import Checkpoint
    from shardviz.picture.model.subjects.stored import Stored

    from ..model.navigation.target import Target
    from ..model.stored import StoredDocument

MOST_NAME = 60


def title_text(checkpoint: Checkpoint, note: str = "") -> Text:
    """Write the checkpoint's name and its sum, with a note."""
    name = shortened(printable(checkpoint.path.name), MOST_NAME)
    said = f"  {note} · {total(checkpoint)}" if note else f"  {total(checkpoint)}"
    return Text.assemble((name, "bold"), (said, "dim"), no_wrap=True, overflow="ellipsis")


def file_line(at: int, name: str, size: int | None, most: int, colours: str) -> Text:
    """Write a file's number in its colour, its size to scale, and its name."""
    line = Text.assemble((f"{at:>4} ", rank_style(rank_colour(at), colours)), no_wrap=True)
    if size is None:
        return line.append(f"{'missing':>10}  ", verdict_style("error")).append(printable(name))
    bar = "█" * max(round(8 * size / max(most, 1)), bool(size))
    return line.append(f"{bytes_text(size):>10}  ").append(f"{bar:<8}  ", "dim").append(printable(name))


def where(one: Stored, place: tuple[int, ...]) -> Text:
    """Write which bytes of which file have an element."""
    index = place[len(place) - len(one.tensor.shape) :]
    text = Text.assemble((f"[{', '.join(map(str, index))}]", "bold"))
    parts = [part for part in parts_at(one, place) if part.file is not None]
    if not parts:
        return text.append("  in no file", verdict_style("error"))
    for part in parts[:2]:
        assert part.file is not None, "it was just looked at"
        text.append(f"  file {part.file} ").append(printable(one.files[part.file]), "bold")
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
    one, why = drawn(document, target.entry)
    if one is None:
        return f"{title}\n? {printable(why)}"
    missing = max(2 - len(target.place), 0)
    return f"{title}\n{where(one, (*(0,) * missing, *target.place)).plain}"


def findings_text(report: Report, width: int) -> Text:
    """Write what is wrong, or that nothing is."""
    terminal = Terminal(width=width)
    lines = [*findings_lines(report.findings, terminal), *not_checked_lines(report, terminal)]
    if not lines:
        return Text(f"✓ the files have all of {counted(report.num_tensors, 'tensor')}", verdict_style("good"))
    return Text("\n").join(lines)
