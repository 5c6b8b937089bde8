"""The app: the state that the views share, the keys that work everywhere, and the workers that read dumps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.reactive import var
from textual.screen import ModalScreen

from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.dump.read import read_run
from shardviz.errors import ShardvizError

from .export import copy
from .keys import keys
from .loading import load, load_compared, load_difference
from .model.messages import DocumentRead, DumpsCompared, JobCompared, OtherRead, Progressed, ReadFailed, RunRead
from .model.selection import Link, Selection, about, at_target, carried_over, name_of, next_finding, opened_on
from .model.target import Known
from .screens.beside_view import BesideView
from .screens.explore_view import ExploreView
from .screens.main import KEYS, VIEWS, MainScreen
from .viewer import Viewer, run
from .widgets.title import Opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.binding import BindingType

    from shardviz.check.diff import Difference
    from shardviz.dump.records.files import RunRecord

    from .model.document import Document
    from .model.pairs import Compared
    from .model.target import Target


class ShardvizApp(Viewer):
    """The viewer of a dump.

    Args:
        path: The dump's folder.
        other: A second dump, or a checkpoint, to compare it with.
        tensor: The tensor that it opens on, as `shardviz show` finds it; by default that of the first finding.
        rank: The rank that it opens on.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *keys("app", [(KEYS[name], f"show_view('{name}')", view.TITLE, view.TOOLTIP) for name, view in VIEWS.items()]),
        *keys("app", [("N", "next_finding(-1)", "Previous finding", "Go to the previous finding")]),
        *keys(
            "app",
            [
                ("c", "copy_fix", "Copy fix", "Copy the fix of the finding below"),
                ("n", "next_finding(1)", "Next finding", "Go to the next finding"),
            ],
            show=True,
        ),
    ]

    document: var[Document | None] = var(None)
    other_document: var[Document | None] = var(None)
    difference: var[Difference | None] = var(None)
    compared: var[Compared | None] = var(None)
    selection: var[Selection] = var(Selection())
    note: var[str] = var("")
    run_record: var[RunRecord | None] = var(None)

    def __init__(
        self, path: Path, other: Path | None = None, *, tensor: str | None = None, rank: int | None = None
    ) -> None:
        self.path = path
        self.other = other
        self._second = "" if other is None else "beside" if is_checkpoint(other) else "compare"
        self._link = Link(tensor, rank)
        super().__init__()
        self.failure: ShardvizError | None = None
        first = self._second or ("rank" if rank is not None else "explore")
        self._main = MainScreen(self, self.view_names, first)
        self._opened_on = self.selection

    @property
    def view_names(self) -> list[str]:
        """The names of the views, in the order of their keys."""
        return [name for name in VIEWS if name not in ("compare", "beside") or name == self._second]

    def get_default_screen(self) -> MainScreen:
        """Return the screen that has the views."""
        return self._main

    @property
    def watched(self) -> list[Path]:
        """The folders of the dumps."""
        return [path for path in (self.path, self.other) if path is not None]

    def on_mount(self) -> None:
        """Show the name, start reading, and notice from now on when a file changes."""
        self._entitle()
        self.watch_files()
        self.call_after_refresh(self.read_again)

    def read_again(self) -> None:
        """Read and check the dumps in threads."""
        post = self.posting()
        self.run_worker(partial(load, self.path, post), thread=True, exclusive=True, group="load")
        if self.other is not None and self._second == "compare":
            reading = partial(load, self.other, post, OtherRead)
            self.run_worker(reading, thread=True, exclusive=True, group="load other")

    async def action_show_view(self, name: str) -> None:
        """Show another view."""
        await self._main.show_view(name)

    @on(RunRead)
    def _run_read(self, message: RunRead) -> None:
        """Show what the run is before any rank of it is read."""
        if message.path == self.path:
            self.run_record = message.run
            self._entitle()

    @on(Progressed)
    def _progressed(self, message: Progressed) -> None:
        if message.path == self.path:
            self.note = f"reading rank {message.read:,} of {message.files:,}"

    @on(DocumentRead)
    def _document_read(self, message: DocumentRead) -> None:
        """Show the document; a user who has not moved yet is taken to the first finding."""
        if not self.screen_stack or self.return_code is not None:
            return  # the app closed while the dump was being read
        if message.document.is_partial and self.document is not None:
            return  # it is read again: what was read before says more
        if self.document is None or self.selection == self._opened_on:
            try:
                selection = self._opened_on = opened_on(message.document, self._link)
            except ShardvizError as error:
                self._leave(error)
                return
        else:
            selection = carried_over(self.document, message.document, self.selection)
        if not message.document.is_partial:
            self.note = ""
        self.set_reactive(ShardvizApp.selection, selection)
        self.document = message.document

    @on(OtherRead)
    def _other_read(self, message: OtherRead) -> None:
        if not message.document.is_partial:
            self.other_document = message.document

    @on(ReadFailed)
    def _read_failed(self, message: ReadFailed) -> None:
        """Exit if there is nothing to show; otherwise keep the document, and note the failure."""
        if self.document is None:
            self._leave(message.why)
        else:
            self.note = message.why.message

    def _leave(self, why: ShardvizError) -> None:
        """Exit with an error that the terminal shows when the screen is gone."""
        self.failure = why
        self.exit()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only the actions that work now."""
        if action == "copy_fix":
            return bool(self.document and self.document.findings)
        if action == "next_finding":
            return self._has_next_finding
        if action in ("goto", "copy_name", "save_tensor", "reload") and self.document is None:
            return False
        if action == "show_view" and parameters not in [(name,) for name in self.view_names]:
            return False
        return not (action in ("show_view", "help", "goto") and isinstance(self.screen, ModalScreen))

    @property
    def _has_next_finding(self) -> bool:
        """Whether there is a finding to go to: another one, or the only one from a tensor that does not have it."""
        if self.document is None or not self.document.findings:
            return False
        only = self.document.by_finding.get(0)
        return len(self.document.findings) > 1 or (only is not None and only != self.selection.entry)

    def watch_selection(self, before: Selection, now: Selection) -> None:
        """Offer the way back to the only finding where another tensor is chosen."""
        if before.entry != now.entry and self.document is not None and len(self.document.findings) == 1:
            self.refresh_bindings()

    @property
    def chosen_name(self) -> str:
        """The name of the chosen tensor."""
        return name_of(self.document, self.selection) if self.document is not None else ""

    @property
    def known(self) -> Known:
        """The dump's tensors and ranks."""
        document = self.document
        if document is None:
            return Known((), lambda _: ())
        mesh = document.dump.files.mesh
        return Known(
            document.entries,
            lambda entry: document.entries[entry].tensor.shape,
            self.selection.entry,
            self.chosen_name,
            mesh,
        )

    def about(self, target: Target) -> str:
        """Say which rank, tensor or element it is, and who has the element."""
        return about(self.document, target) if self.document is not None else ""

    async def go(self, target: Target) -> None:
        """Go to a rank, a tensor or an element, in a view that shows it."""
        if self.document is None:
            return
        self.selection = at_target(self.document, self.selection, target)
        view = self._main.view_name
        if target.rank is not None and view not in ("mesh", "rank"):
            await self.action_show_view("rank")
        elif target.rank is None and view not in ("rank", "compare", "beside"):
            await self.action_show_view("explore")
        if target.rank is None and self._main.view_name == "explore":
            explore = self._main.query_one(ExploreView)
            explore.set_apart(target.name)
            if target.place is not None:
                explore.focus_map()

    def picture(self) -> str:
        """Draw the chosen tensor as `shardviz show` does."""
        from shardviz.picture.model.subjects.subject import of_tensor
        from shardviz.picture.svg.page import svg

        document = self.document
        if self.compared is not None and self._main.view_name == "beside":
            return self._main.query_one(BesideView).picture()
        if document is None or not document.entries or document.report is None:
            raise ShardvizError("the dump is not checked yet")
        tensor = document.entries[self.selection.entry].tensor
        return svg(of_tensor(document.dump, tensor, self.chosen_name, document.report))

    def watch_document(self) -> None:
        """Show the title, and offer the keys that need a report."""
        self._entitle()
        self.refresh_bindings()
        self._compare()

    def watch_note(self) -> None:
        """Show how far the dump has been read."""
        self._entitle()

    def watch_changed(self) -> None:
        """Show when files changed."""
        self._entitle()

    def _entitle(self) -> None:
        changed = f"changed {self.changed}" if self.changed else ""
        self._main.set_title(Opened(self.path, self.run_record, self.document, self.note or changed))

    def watch_other_document(self) -> None:
        """Compare the dumps, once both are read."""
        self._compare()

    def _compare(self) -> None:
        """Compare the dumps in a thread, once both are checked."""
        here, there = self.document, self.other_document
        if here is not None and here.report is not None and self.other is not None and self._second == "beside":
            comparing = partial(load_compared, here, self.other, self.post_message)
            self.run_worker(comparing, thread=True, exclusive=True, group="compare")
        if here is not None and there is not None and here.report is not None and there.report is not None:
            comparing = partial(load_difference, here, there, self.post_message)
            self.run_worker(comparing, thread=True, exclusive=True, group="compare")

    @on(DumpsCompared)
    def _compared(self, message: DumpsCompared) -> None:
        self.difference = message.difference

    @on(JobCompared)
    def _job_compared(self, message: JobCompared) -> None:
        self.compared = message.compared

    def action_copy_fix(self) -> None:
        """Copy the fix of the chosen finding."""
        assert self.document is not None
        finding = self.document.findings[self.selection.finding]
        copy(self, finding.fix or finding.summary)
        self.notify(finding.fix or finding.summary, title="Copied the fix", markup=False)

    def action_next_finding(self, step: int) -> None:
        """Go to another finding and its place on the map."""
        assert self.document is not None
        self.selection = next_finding(self.document, self.selection, step)


def view(
    path: Path,
    *,
    other: Path | None = None,
    tensor: str | None = None,
    rank: int | None = None,
    started: Callable[[ShardvizApp], object] | None = None,
) -> None:
    """Open the TUI on a dump, with a second one beside it if given, or on a tensor and a rank.

    Args:
        path: The dump.
        other: The second one.
        tensor: The tensor that it opens on.
        rank: The rank that it opens on.
        started: Called with the viewer just before it runs.

    Raises:
        ShardvizError: A folder is not a dump, or can no longer be read; it has no such tensor or rank.
        SystemExit: The viewer failed, and has printed why.
    """
    for folder in (path, other):
        if folder is not None:
            if folder is other and is_checkpoint(folder):
                open_checkpoint(folder)  # so that one that cannot be opened is said before there is a screen
                continue
            num_ranks = read_run(folder).num_ranks
            if rank is not None and not 0 <= rank < num_ranks:
                raise ShardvizError(f"{folder} has no rank {rank}", f"its ranks are 0 to {num_ranks - 1:,}")
    app = ShardvizApp(path, other, tensor=tensor, rank=rank)
    if started is not None:
        started(app)
    run(app)
    if app.failure is not None:
        raise app.failure
