"""The viewer of a checkpoint: its tensors, which file holds which part of one, its files with sizes, its findings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import on
from textual.reactive import var
from textual.widgets import Static

from shardviz.checkpoint.open import open_checkpoint
from shardviz.errors import ShardvizError
from shardviz.picture.model.palette import rank_colour
from shardviz.picture.text.checkpoint import total
from shardviz.picture.text.findings import findings_lines
from shardviz.picture.text.report import not_checked_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.text import bytes_text, counted, printable

from .colours import rank_style, verdict_style
from .keys import keys
from .model.messages import CheckpointChecked, PlaceChosen, PlaneTurned, TensorChosen, TensorOpened, Zoomed
from .model.names import shortened
from .model.selection import next_plane
from .model.stored import StoredDocument, first_plane, parts_at
from .viewer import Viewer
from .widgets.box import Box, Column, Row, ScrollBox
from .widgets.key_bar import KeyBar
from .widgets.lines import Lines
from .widgets.map.tensor_map import TensorMap
from .widgets.tensor_tree import TensorTree

if TYPE_CHECKING:
    from pathlib import Path

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from shardviz.check.finding import Report
    from shardviz.checkpoint.records import Checkpoint
    from shardviz.picture.model.holders import Plane
    from shardviz.picture.model.stored import Stored

MOST_NAME = 60


class CheckpointApp(Viewer):
    """The viewer of a checkpoint.

    Args:
        checkpoint: The checkpoint, opened: nothing but its headers was read.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *keys("checkpoint", [("x", "next_dims", "Dims", "Draw the next two dims of the tensor")], show=True),
        *keys("checkpoint", [("tab", "app.focus_next", "Next part", "Go to the next part of the screen")], show=True),
    ]

    document: var[StoredDocument | None] = var(None)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.set_reactive(CheckpointApp.document, StoredDocument(checkpoint))
        self._entry = 0
        self._plane: Plane | None = None

    @property
    def _document(self) -> StoredDocument:
        assert self.document is not None, "it is there from the start"
        return self.document

    def compose(self) -> ComposeResult:
        """Put the tree beside the map, the files and the findings below both."""
        with Row(id="top"):
            yield Static(id="stored-title")
        with Column(id="stored"):
            with Row(id="stored-main"):
                with Box(id="tree-box"):
                    yield TensorTree(id="tree")
                with Box(id="map-panel"):
                    yield TensorMap(id="map")
                    yield Static(id="stored-at")
            with Row(id="stored-below"):
                with Box(id="files-box"):
                    yield Lines(id="files")
                with ScrollBox(id="findings-box"):
                    yield Static(id="stored-findings")
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Show the tensors and files, and check in a thread."""
        checkpoint = self._document.checkpoint
        self.query_one("#stored-title", Static).update(_title(checkpoint))
        self.query_one("#tree-box", Box).entitle("Tensors")
        self.query_one("#findings-box", ScrollBox).entitle("Findings")
        self.query_one("#stored-findings", Static).update(Text("checking", "dim"))
        self._show_files()
        self._show_entries()
        self.query_one(TensorTree).focus()
        self.run_worker(partial(_check, checkpoint, self.post_message), thread=True)

    def _show_entries(self) -> None:
        entries = self._document.entries
        self.query_one(TensorTree).fill(entries, range(len(entries)))
        if entries:
            self._show(self._entry)

    def _show_files(self) -> None:
        sizes = self._document.checkpoint.file_sizes
        names = [*self._document.numbers]
        most = max((size or 0 for size in sizes.values()), default=0)
        self.query_one("#files-box", Box).entitle(f"Files: {len(names):,}")
        lines = self.query_one("#files", Lines)

        def line(at: int) -> Text:
            return _file_line(at, names[at], sizes[names[at]], most, lines.behind)

        lines.show(len(names), line)

    def _show(self, entry: int) -> None:
        """Show a tensor's map."""
        document = self._document
        if entry != self._entry or self._plane is None:
            self._plane = first_plane(document.entries[entry].tensor)
        self._entry = entry
        found = document.entries[entry]
        one, why = _stored(document, entry)
        title = f"{shortened(found.title)}  {printable(found.tensor.dtype)}{found.short_layout}"
        self.query_one("#map-panel", Box).entitle(title)
        self.query_one(TensorMap).show(one.sides if one else None, "claimed", self._plane)
        self._say_where(one, why)

    def _say_where(self, one: Stored | None, why: str = "") -> None:
        """Write which file has the element under the cursor."""
        if one is None:
            text = Text(f"? not drawn: {printable(why)}", verdict_style("unknown"))
        elif self._plane is None:
            text = Text("nothing to draw: the tensor has no elements", "dim")
        else:
            text = _where(one, self._plane.at)
        text.no_wrap, text.overflow = True, "ellipsis"
        self.query_one("#stored-at", Static).update(text)

    @on(TensorChosen)
    def _tensor_chosen(self, message: TensorChosen) -> None:
        if message.entry != self._entry:
            self._show(message.entry)

    @on(TensorOpened)
    def _tensor_opened(self) -> None:
        self.query_one(TensorMap).focus()

    @on(PlaceChosen)
    def _place_chosen(self, message: PlaceChosen) -> None:
        from dataclasses import replace

        if self._plane is not None:
            self._plane = replace(self._plane, at=message.place)
            self._say_where(*_stored(self._document, self._entry))

    @on(PlaneTurned)
    @on(Zoomed)
    def _ignored(self) -> None:
        """A map says so; nothing else is drawn at its scale."""

    @on(CheckpointChecked)
    def _checked(self, message: CheckpointChecked) -> None:
        """Show the verdicts, and the findings."""
        self.document = self._document.checked(message.report)
        self._show_entries()
        self.query_one(TensorTree).choose(self._entry)
        self.query_one("#findings-box", ScrollBox).entitle(
            counted(len(message.report.findings), "finding").capitalize()
        )
        width = max(self.query_one("#findings-box").size.width - 4, 20)
        self.query_one("#stored-findings", Static).update(_findings(message.report, width))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims are chosen where there are more than two."""
        return action != "next_dims" or (self._plane is not None and len(self._plane.at) > 2)

    def action_next_dims(self) -> None:
        """Draw the next two dims."""
        if self._plane is not None:
            self._plane = next_plane(self._plane)
            self._show(self._entry)

    @property
    def watched(self) -> list[Path]:
        """The checkpoint's folder or file."""
        return [self._document.checkpoint.path]

    @property
    def chosen_name(self) -> str:
        """The name of the chosen tensor."""
        entries = self._document.entries
        return entries[self._entry].tensor.name if entries else ""

    def picture(self) -> str:
        """Draw which file holds which part of the chosen tensor, as `shardviz show` does."""
        from shardviz.picture.svg.stored import stored_svg

        if not self._document.entries:
            raise ShardvizError("the checkpoint has no tensors")
        return stored_svg(self._document.stored(self._entry))


def _check(checkpoint: Checkpoint, post: Any) -> None:
    from shardviz.checkpoint.findings import check_checkpoint

    post(CheckpointChecked(check_checkpoint(checkpoint)))


def _stored(document: StoredDocument, entry: int) -> tuple[Stored | None, str]:
    """Return a tensor's parts, or why they cannot be drawn."""
    try:
        return document.stored(entry), ""
    except ShardvizError as error:
        return None, error.message


def _title(checkpoint: Checkpoint) -> Text:
    name = shortened(printable(checkpoint.path.name), MOST_NAME)
    return Text.assemble((name, "bold"), (f"  {total(checkpoint)}", "dim"), no_wrap=True, overflow="ellipsis")


def _file_line(at: int, name: str, size: int | None, most: int, behind: str) -> Text:
    """Write a file's number in its colour, its size to scale, and its name."""
    line = Text.assemble((f"{at:>4} ", rank_style(rank_colour(at), behind)), no_wrap=True)
    if size is None:
        return line.append(f"{'missing':>10}  ", verdict_style("error")).append(printable(name))
    bar = "█" * max(round(8 * size / max(most, 1)), bool(size))
    return line.append(f"{bytes_text(size):>10}  ").append(f"{bar:<8}  ", "dim").append(printable(name))


def _where(one: Stored, place: tuple[int, ...]) -> Text:
    """Write which bytes of which file have an element."""
    index = place[len(place) - len(one.tensor.shape) :]
    text = Text.assemble((f"[{', '.join(map(str, index))}]", "bold"))
    parts = [part for part in parts_at(one, place) if part.file is not None]
    if not parts:
        return text.append("  in no file", verdict_style("error"))
    for part in parts[:2]:
        assert part.file is not None, "it was just looked at"
        text.append(f"  file {part.file} ").append(printable(one.files[part.file]), "bold")
        text.append(f"  {part.bytes}", "dim")
    twice = f"  in {len(parts)} parts" if len(parts) > 1 else ""
    return text.append(f"\npart {parts[0].region}", "dim").append(twice, verdict_style("warning"))


def _findings(report: Report, width: int) -> Text:
    terminal = Terminal(width=width)
    lines = [*findings_lines(report.findings, terminal), *not_checked_lines(report, terminal)]
    if not lines:
        return Text(f"✓ the files have all of {counted(report.num_tensors, 'tensor')}", verdict_style("good"))
    return Text("\n").join(lines)


def view_checkpoint(path: Path) -> None:
    """Open the TUI on a checkpoint.

    Raises:
        DumpError: It is not one, or is damaged.
        SystemExit: The viewer failed, and has printed why.
    """
    app = CheckpointApp(open_checkpoint(path))
    app.run()
    if app.return_code:
        raise SystemExit(app.return_code)
