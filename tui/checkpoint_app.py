"""The viewer of a checkpoint: its tensors, which file holds which part of one, its files with sizes, its findings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import on
from textual.containers import Horizontal, Vertical
from textual.reactive import var
from textual.screen import ModalScreen
from textual.widgets import Static

from shardviz.checkpoint.open import open_checkpoint
from shardviz.errors import ShardvizError
from shardviz.text import counted, printable

from .colors import verdict_style
from .keys import keys
from .model.messages import (
    CheckpointChecked,
    CheckpointOpened,
    PlaceChosen,
    PlaneTurned,
    ReadFailed,
    TensorChosen,
    TensorOpened,
    Zoomed,
)
from .model.names import shortened
from .model.selection import next_plane
from .model.stored import StoredDocument, about, drawn, file_line, findings_text, first_plane, named, title_text, where
from .model.target import Known, Target
from .viewer import Viewer, run
from .widgets.box import Box, ScrollBox
from .widgets.grid import Lines
from .widgets.listing import SEARCHING, TO_TREE, Listing, Searching
from .widgets.tensor_map import TensorMap
from .widgets.words import KeyBar

if TYPE_CHECKING:
    from pathlib import Path

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from shardviz.checkpoint.records import Checkpoint
    from shardviz.picture.model.holders import Plane
    from shardviz.picture.model.subjects.stored import Stored


class CheckpointApp(Viewer, Searching):
    """The viewer of a checkpoint.

    Args:
        checkpoint: The checkpoint, opened: nothing but its headers was read.
        tensor: The name of the tensor that it opens on.
    """

    HELP = """\
## The checkpoint

Its tensors on the left; the map of the chosen one shows which part of it is in which file. The files are numbered, and
listed below with their sizes. Beside them is what is wrong.
"""

    BINDINGS: ClassVar[list[BindingType]] = [
        *keys(
            "checkpoint",
            [("x", "next_dims", "Next dims", "Draw the next two dims"), *SEARCHING],
            show=True,
        ),
        *keys("checkpoint", [TO_TREE]),
    ]

    document: var[StoredDocument | None] = var(None)

    def __init__(self, checkpoint: Checkpoint, tensor: str = "") -> None:
        super().__init__()
        self.set_reactive(CheckpointApp.document, StoredDocument(checkpoint))
        names = [entry.tensor.name for entry in self._document.entries]
        self._entry = names.index(tensor) if tensor in names else 0
        self._plane: Plane | None = None
        self._note = ""

    @property
    def _document(self) -> StoredDocument:
        assert self.document is not None, "it is there from the start"
        return self.document

    def compose(self) -> ComposeResult:
        """Put the tree beside the map, the files and the findings below both."""
        with Horizontal(id="top"):
            yield Static(id="stored-title")
        with Vertical(id="stored"):
            with Horizontal(id="stored-main"):
                yield Listing(id="tree-box")
                with Box(id="map-panel"):
                    yield TensorMap(id="map")
                    yield Static(id="stored-at")
            with Horizontal(id="stored-below"):
                with Box(id="files-box"):
                    yield FileLines(id="files")
                with ScrollBox(id="findings-box"):
                    yield Static(id="stored-findings")
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Show the tensors and files, check in a thread, and notice from now on when a file changes."""
        self.watch_files()
        self._show_all()
        self.query_one("#tree").focus()
        self._check()

    def _check(self) -> None:
        self.query_one("#findings-box", ScrollBox).set_titles("Findings")
        self.query_one("#stored-findings", Static).update(Text("… checking", "dim"))
        self.run_worker(partial(_check, self._document.checkpoint, self.posting()), thread=True, group="load")

    def _show_all(self) -> None:
        self.watch_changed()
        self._show_files()
        self._show(self._entry)

    def watch_changed(self) -> None:
        """Show when files changed."""
        changed = f"changed {self.changed}" if self.changed else ""
        title = title_text(self._document.checkpoint, self._note or changed)
        self.query_one("#stored-title", Static).update(title)

    def _show_files(self) -> None:
        sizes, lines = self._document.checkpoint.file_sizes, self.query_one("#files", Lines)
        names = [*self._document.numbers]
        most = max((size or 0 for size in sizes.values()), default=0)
        lines.show(len(names), lambda at: file_line(at, names[at], sizes[names[at]], most, lines.palette))
        self.query_one("#files-box", Box).set_titles(f"Files: {len(names):,}")

    def _show(self, entry: int) -> None:
        """Show a tensor in the tree and on the map."""
        document = self._document
        self.query_one(Listing).show(document.entries, entry)
        if not document.entries:
            return
        if entry != self._entry or self._plane is None:
            self._plane = first_plane(document.entries[entry].tensor)
        self._entry = entry
        shown_entry = document.entries[entry]
        stored, why = drawn(document, entry)
        title = f"{shortened(shown_entry.title)}  {shown_entry.layout}"
        self.query_one("#map-panel", Box).set_titles(title)
        tensor_map = self.query_one("#map", TensorMap)
        tensor_map.show(stored.sides if stored else None, "claimed", self._plane)
        tensor_map.describe = (lambda place: where(stored, place).plain) if stored else None
        self._say_where(stored, why)

    def _say_where(self, stored: Stored | None, why: str = "") -> None:
        """Write which file has the element under the cursor."""
        if stored is None:
            text = Text(f"? not drawn: {printable(why)}", verdict_style("unknown"))
        elif self._plane is None:
            text = Text("nothing to draw: the tensor has no elements", "dim")
        else:
            text = where(stored, self._plane.at)
        text.no_wrap, text.overflow = True, "ellipsis"
        self.query_one("#stored-at", Static).update(text)

    @on(TensorChosen)
    def _tensor_chosen(self, message: TensorChosen) -> None:
        if message.entry != self._entry:
            self._show(message.entry)

    @on(TensorOpened)
    def _tensor_opened(self) -> None:
        self.query_one("#map").focus()

    @on(PlaceChosen)
    def _place_chosen(self, message: PlaceChosen) -> None:
        if self._plane is not None:
            self._plane = replace(self._plane, at=message.place)
            self._say_where(*drawn(self._document, self._entry))

    @on(PlaneTurned)
    @on(Zoomed)
    def _ignored(self) -> None:
        """A map says so; nothing else is drawn at its scale."""

    @on(CheckpointChecked)
    def _checked(self, message: CheckpointChecked) -> None:
        """Show the verdicts, and the findings."""
        self.document = self._document.checked(message.report)
        self._show(self._entry)
        box = self.query_one("#findings-box", ScrollBox)
        box.set_titles(counted(len(message.report.findings), "finding").capitalize())
        width = max(box.size.width - 4, 20)
        self.query_one("#stored-findings", Static).update(findings_text(message.report, width))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims are chosen where there are more than two; nothing is asked twice."""
        if action in ("help", "goto") and isinstance(self.screen, ModalScreen):
            return False
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

    def read_again(self) -> None:
        """Open the checkpoint again in a thread."""
        opening = partial(_open, self._document.checkpoint.path, self.posting())
        self.run_worker(opening, thread=True, exclusive=True, group="load")

    @on(CheckpointOpened)
    def _opened(self, message: CheckpointOpened) -> None:
        """Show what is on disk now, with the cursor on the same tensor if it is there still."""
        before, self._note = self.chosen_name, ""
        self.document = StoredDocument(message.checkpoint)
        names = [entry.tensor.name for entry in self._document.entries]
        self._entry, self._plane = names.index(before) if before in names else 0, None
        self._show_all()
        self._check()

    @on(ReadFailed)
    def _read_failed(self, message: ReadFailed) -> None:
        """Keep what is shown, and note why it could not be read again."""
        self._note = printable(message.why.message)
        self.watch_changed()

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

    @property
    def known(self) -> Known:
        """The checkpoint's tensors; it has no ranks."""
        entries = self._document.entries
        return Known(entries, lambda entry: entries[entry].tensor.shape, self._entry, self.chosen_name)

    def about(self, target: Target) -> str:
        """Say which tensor or element it is, and which file has the element."""
        return about(self._document, target)

    async def go(self, target: Target) -> None:
        """Go to a tensor or an element."""
        if target.entry is None:
            return
        self.query_one(Listing).set_apart(target.name)
        self._show(target.entry)
        if target.place is not None and self._plane is not None:
            missing = len(self._plane.at) - len(target.place)
            tensor_map = self.query_one("#map", TensorMap)
            tensor_map.focus()
            tensor_map.go((*(0,) * missing, *target.place))


class FileLines(Lines):
    """The list of the files."""

    HELP = """\
## The files

The number by which a file is drawn on the map, its size, that size beside the largest file's, and its name.
"""


def _check(checkpoint: Checkpoint, post: Any) -> None:
    from shardviz.checkpoint.findings import check_checkpoint

    post(CheckpointChecked(check_checkpoint(checkpoint)))


def _open(path: Path, post: Any) -> None:
    try:
        post(CheckpointOpened(open_checkpoint(path)))
    except ShardvizError as error:
        post(ReadFailed(error))


def view_checkpoint(path: Path, *, tensor: str | None = None) -> None:
    """Open the TUI on a checkpoint, on one of its tensors if given.

    Raises:
        ShardvizError: It is not one, or is damaged, or has no such tensor.
        SystemExit: The viewer failed, and has printed why.
    """
    checkpoint = open_checkpoint(path)
    run(CheckpointApp(checkpoint, named(checkpoint, tensor) if tensor is not None else ""))
