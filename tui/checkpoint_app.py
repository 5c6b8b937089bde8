"""The viewer of a checkpoint: its tensors, which file holds which part of one, its files with sizes, its findings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text
from textual import on
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from shardviz.check.report import Report
from shardviz.checkpoint.open import open_checkpoint
from shardviz.checkpoint.records import Checkpoint
from shardviz.errors import ShardvizError
from shardviz.picture.text.checkpoint import total
from shardviz.picture.text.report import not_checked_lines
from shardviz.picture.text.terminal import UNICODE, Terminal
from shardviz.text import counted, printable

from .colors import verdict_style
from .keys import keys
from .model.names import fitted
from .model.selection import Selection, TensorOpened, carried_over, next_plane, of_entry
from .model.stored import StoredDocument, file_line, named, where
from .viewer import Viewer, run
from .widgets.finding_card import finding_body
from .widgets.frame import Box, KeyBar, ScrollBox, verdict_text
from .widgets.grid import Lines
from .widgets.listing import SEARCHING, TO_TREE, Listing, Searching
from .widgets.tensor_map import TensorMap

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import RenderableType
    from textual.app import ComposeResult

    from .model.selection import Target


MOST_NAME = 60


class CheckpointApp(Viewer[StoredDocument], Searching):
    """The viewer of a checkpoint.

    Args:
        checkpoint: The checkpoint, opened: nothing but its headers was read.
        tensor: The name of the tensor that it opens on.
    """

    HELP = """\
## The checkpoint

Its tensors on the left; the map of the chosen one shows which part of it is in which file. The files are numbered, and
listed below with their sizes, each beside the largest one's. Beside them is what is wrong.
"""

    BINDINGS = keys(
        "checkpoint", [("x", "next_dims", "Next dims", "Draw the next two dims"), *SEARCHING], hidden=[TO_TREE]
    )

    def __init__(self, checkpoint: Checkpoint, tensor: str = "") -> None:
        super().__init__(checkpoint.path)
        self.set_reactive(CheckpointApp.document, StoredDocument(checkpoint))  # type: ignore[misc]
        entries = self._document.entries
        if entries:
            entry = next((at for at, known in enumerate(entries) if tensor in known.names), 0)
            self.set_reactive(CheckpointApp.selection, of_entry(self._document, Selection(), entry, tensor))

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
                    yield Lines(id="files")
                with ScrollBox(id="findings-box"):
                    yield Static(id="stored-findings")
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Show the tensors and files, and check them."""
        self.query_one("#tree").focus()
        self._show_opened(self._document.checkpoint)
        self._read(None)

    def _show_opened(self, checkpoint: Checkpoint) -> None:
        """Show what is on disk now, with the cursor on the same tensor if it is there still."""
        before, self.note = self._document, ""
        self.set_reactive(CheckpointApp.selection, carried_over(before, StoredDocument(checkpoint), self.selection))
        self.document = StoredDocument(checkpoint)
        sizes, lines = checkpoint.file_sizes, self.query_one("#files", Lines)
        names = [*self._document.numbers]
        most = max((size or 0 for size in sizes.values()), default=0)
        lines.show(
            len(names),
            lambda at: file_line(at, names[at], sizes[names[at]], most, lines.palette, lines.text_width),
        )
        self.query_one("#files-box", Box).set_titles(f"Files: {len(names):,}")
        self.query_one("#findings-box", ScrollBox).set_titles("Findings")
        self.query_one("#stored-findings", Static).update(Text("… checking", "dim"))
        self._entitle()

    def read_again(self) -> None:
        """Open the checkpoint again, and check it."""
        self._read(self._document.checkpoint.path)

    def _read(self, path: Path | None) -> None:
        """Check the checkpoint in a thread, opened again from a path."""
        reading = partial(_read, self._document.checkpoint, path, partial(self.showing(), self._show_read))
        self.run_worker(reading, thread=True, exclusive=True, group="load")

    def _show_read(self, item: object) -> None:
        """Show what a thread has read, or why it could not be read again."""
        if isinstance(item, Checkpoint):
            self._show_opened(item)
        elif isinstance(item, Report):
            self.document = replace(self._document, report=item)
            box = self.query_one("#findings-box", ScrollBox)
            box.set_titles(counted(len(item.findings), "finding").capitalize())
            width = max(box.size.width - 4, 20)
            self.query_one("#stored-findings", Static).update(findings_text(item, width))
            self._entitle()
        elif isinstance(item, ShardvizError):
            self.note = printable(item.message)

    def _entitle(self) -> None:
        """Write the name, the verdict, when it changed, and the sum; or why it cannot be read."""
        checkpoint, note = self._document.checkpoint, f" · changed {self.changed}" if self.changed else ""
        verdict = Text.assemble(verdict_text(self._document), (f"{note} · {total(checkpoint)}", "dim"))
        title = Text.assemble((fitted(printable(checkpoint.path.name), MOST_NAME), "bold"), "  ", no_wrap=True)
        title.append_text(Text(self.note, verdict_style("warning")) if self.note else verdict)
        for static in self.query("#stored-title").results(Static):
            static.update(title)

    watch_note = watch_changed = _entitle

    def watch_document(self) -> None:
        """Show the chosen tensor in the tree and on the map."""
        document, entry = self._document, self.selection.entry
        if not self.query(Listing):
            return  # nothing is composed yet
        self.query_one(Listing).show(document.entries, entry)
        if not document.entries:
            return
        tensor_map, plane = self.query_one("#map", TensorMap), self.selection.plane
        title = f"{fitted(document.entries[entry].title)}  {document.entries[entry].layout}"
        self.query_one("#map-panel", Box).set_titles(title)
        text = Text("nothing to draw: the tensor has no elements", "dim")
        try:
            stored = document.stored(entry)
        except ShardvizError as error:
            tensor_map.show(None, "claimed", plane)
            text = Text(f"? not drawn: {printable(error.message)}", verdict_style("unknown"))
        else:
            tensor_map.show(stored.sides, "claimed", plane)
            tensor_map.describe = lambda place: where(stored, place).plain
            text = where(stored, plane.at) if plane is not None else text
        text.no_wrap, text.overflow = True, "ellipsis"
        self.query_one("#stored-at", Static).update(text)

    watch_selection = watch_document

    @on(TensorOpened)
    def _tensor_opened(self) -> None:
        self.query_one("#map").focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims are chosen where there are more than two."""
        plane = self.selection.plane
        if action == "next_dims":
            return plane is not None and len(plane.at) > 2
        return super().check_action(action, parameters)

    def action_next_dims(self) -> None:
        """Draw the next two dims."""
        if (plane := self.selection.plane) is not None:
            self.selection = replace(self.selection, plane=next_plane(plane))

    def picture(self) -> str:
        """Draw which file holds which part of the chosen tensor, as `shardviz show` does."""
        from shardviz.picture.svg.stored import stored_svg

        if not self._document.entries:
            raise ShardvizError("the checkpoint has no tensors")
        return stored_svg(self._document.stored(self.selection.entry))

    def go(self, target: Target) -> None:
        """Go to a tensor or an element."""
        super().go(target)
        self.query_one(Listing).set_apart(target.name)
        if target.place is not None:
            self.query_one("#map").focus()


def findings_text(report: Report, width: int) -> RenderableType:
    """Write what is wrong, the fix of each finding right below its sentence, or that nothing is."""
    parts: list[RenderableType] = []
    for finding in report.findings:
        kind = (f"{UNICODE.of(finding.severity)} {finding.kind}", verdict_style(finding.severity))
        parts += [Text("")] * bool(parts)
        parts += [Text.assemble(kind, (f"  {printable(finding.title)}", "bold"))]
        parts += [finding_body(finding, width=width)]
    parts += not_checked_lines(report, Terminal(width=width))
    if not parts:
        return Text(f"✓ the files have all of {counted(report.num_tensors, 'tensor')}", verdict_style("good"))
    return Group(*parts)


def _read(checkpoint: Checkpoint, path: Path | None, show: Callable[[object], object]) -> None:
    from shardviz.checkpoint.findings import check_checkpoint

    try:
        if path is not None:
            checkpoint = open_checkpoint(path)
            show(checkpoint)
    except ShardvizError as error:
        show(error)
    else:
        show(check_checkpoint(checkpoint))


def view_checkpoint(path: Path, *, tensor: str | None = None) -> None:
    """Open the TUI on a checkpoint, on one of its tensors if given.

    Raises:
        ShardvizError: It is not one, or is damaged, or has no such tensor.
        SystemExit: The viewer failed, and has printed why.
    """
    checkpoint = open_checkpoint(path)
    run(CheckpointApp(checkpoint, named(checkpoint, tensor) if tensor is not None else ""))
