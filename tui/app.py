"""The app: which views there are, the document and the selection that they share, and the worker that reads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import App
from textual.binding import Binding, BindingType
from textual.reactive import reactive

from .loading import load
from .messages import DocumentRead, Progressed, ReadFailed
from .screens.explore import ExploreView
from .screens.findings import FindingsView
from .screens.mesh import MeshView
from .screens.rank import RankView
from .selection import Selection, first_selection, of_finding

if TYPE_CHECKING:
    from pathlib import Path

    from .document import Document


class ShardvizApp(App[None]):
    """A dump as a place to walk through.

    Args:
        path: The dump's folder.
        other: A second dump to compare it with.
    """

    TITLE = "shardviz"
    CSS_PATH = "shardviz.tcss"
    MODES = {"explore": ExploreView, "mesh": MeshView, "rank": RankView, "findings": FindingsView}  # noqa: RUF012  Textual's
    DEFAULT_MODE = "explore"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "switch_mode('explore')", "Tensors", id="app.explore", tooltip="The tensors and their maps"),
        Binding("2", "switch_mode('mesh')", "Mesh", id="app.mesh", tooltip="All ranks at their places"),
        Binding("3", "switch_mode('rank')", "Rank", id="app.rank", tooltip="Everything that one rank holds"),
        Binding("4", "switch_mode('findings')", "Findings", id="app.findings", tooltip="Everything that is wrong"),
        Binding("c", "copy_fix", "Copy fix", id="app.copy_fix", tooltip="Copy the fix of the finding below"),
        Binding("n", "next_finding(1)", "Next finding", id="app.next", tooltip="Go to the next finding's place"),
        Binding("N", "next_finding(-1)", "Last finding", show=False, id="app.previous", tooltip="Go one finding back"),
        Binding("q", "quit", "Quit", id="app.quit", tooltip="Leave; the terminal is as it was"),
    ]

    document: reactive[Document | None] = reactive(None)
    selection: reactive[Selection] = reactive(Selection())
    note: reactive[str] = reactive("")

    def __init__(self, path: Path, other: Path | None = None) -> None:
        super().__init__()
        self.path = path
        self.other = other
        self._opened_on = self.selection

    def on_mount(self) -> None:
        """Start reading."""
        self.run_worker(partial(load, self.path, self.post_message), thread=True, exclusive=True, group="load")

    @on(Progressed)
    def _progressed(self, message: Progressed) -> None:
        self.note = f"reading rank {message.read:,} of {message.files:,}"

    @on(DocumentRead)
    def _document_read(self, message: DocumentRead) -> None:
        self.note = ""
        if self.selection == self._opened_on:
            self.set_reactive(ShardvizApp.selection, first_selection(message.document))
            self._opened_on = self.selection
        self.document = message.document

    @on(ReadFailed)
    def _read_failed(self, message: ReadFailed) -> None:
        self.exit(return_code=2, message=message.why)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what works now."""
        if action in ("copy_fix", "next_finding"):
            return bool(self.document and self.document.findings)
        return True

    def watch_document(self) -> None:
        """Offer the keys that a report makes useful."""
        self.refresh_bindings()

    def action_copy_fix(self) -> None:
        """Copy the finding's fix."""
        assert self.document is not None
        finding = self.document.findings[self.selection.finding]
        self.copy_to_clipboard(finding.fix or finding.summary)
        self.notify(finding.fix or finding.summary, title="Copied the fix", markup=False)

    def action_next_finding(self, step: int) -> None:
        """Go to another finding and its place."""
        assert self.document is not None
        count = len(self.document.findings)
        self.selection = of_finding(self.document, self.selection, (self.selection.finding + step) % count)


def view(path: Path, *, other: Path | None = None) -> None:
    """Open the TUI on a dump, beside another one where that is given.

    Raises:
        DumpError: The folder is no dump.
    """
    ShardvizApp(path, other).run()
