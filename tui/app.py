"""The viewer of a dump: the state that the views share, the keys that work everywhere, and what reads dumps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.containers import Horizontal
from textual.reactive import var
from textual.widgets import ContentSwitcher

from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.dump.read import read_run
from shardviz.dump.records.files import RunRecord
from shardviz.errors import ShardvizError

from .keys import keys
from .loading import load, load_compared, load_difference
from .model.document import Document
from .model.pairs import Comparison
from .model.selection import carried_over, next_finding, opened_on
from .screens.compare_view import CompareView
from .screens.explore_view import ExploreView, FindingsView
from .screens.memory_view import MemoryView
from .screens.rank_view import MeshView, RankView
from .screens.step_view import StepView
from .screens.view import View
from .viewer import Viewer, run
from .widgets.frame import KeyBar, Title, ViewTabs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.app import ComposeResult

    from .model.selection import Selection, Target


VIEWS: dict[str, type[View]] = {
    kind.NAME: kind for kind in (ExploreView, MeshView, RankView, FindingsView, StepView, MemoryView, CompareView)
}
KEYS = {name: str(number) for number, name in enumerate(VIEWS, start=1)}


class ShardvizApp(Viewer[Document]):
    """The viewer of a dump.

    Args:
        path: The dump's folder.
        other: A second dump, or a checkpoint, to compare it with.
        tensor: The tensor that it opens on, as `shardviz show` finds it; by default that of the first finding.
        rank: The rank that it opens on.
    """

    BINDINGS = keys(
        "app",
        [
            ("c", "copy_fix", "Copy fix", "Copy the fix of the finding below"),
            ("n", "next_finding(1)", "Next finding", "Go to the next finding"),
        ],
        hidden=[
            *[(KEYS[name], f"show_view('{name}')", view.TITLE, view.TOOLTIP) for name, view in VIEWS.items()],
            ("N", "next_finding(-1)", "Previous finding", "Go to the previous finding"),
        ],
    )

    compared: var[Comparison | None] = var(None)
    run_record: var[RunRecord | None] = var(None)

    def __init__(
        self, path: Path, other: Path | None = None, *, tensor: str | None = None, rank: int | None = None
    ) -> None:
        self.path = path
        self.other = other
        self.other_document: Document | None = None
        self._tensor, self._rank = tensor, rank
        super().__init__(*(path for path in (path, other) if path is not None))
        self.failure: ShardvizError | None = None
        self.view_names = [name for name in VIEWS if name != "compare" or other is not None]
        self.view_name = "compare" if other is not None else "rank" if rank is not None else "explore"
        self._opened_on = self.selection

    def compose(self) -> ComposeResult:
        """Put the title and the tabs above the views, of which one is shown, and the keys below."""
        with Horizontal(id="top"):
            yield Title(id="title")
            yield ViewTabs(id="tabs")
        yield ContentSwitcher(*(VIEWS[name](self) for name in self.view_names), id="views", initial=self.view_name)
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        """Show the first view, and start reading."""
        self._enter()
        self.call_after_refresh(self.read_again)

    def read_again(self) -> None:
        """Read and check the dumps in threads."""
        show = self.showing()
        self._work("load", load, self.path, partial(show, self._show_read))
        if self.other is not None and not is_checkpoint(self.other):
            self._work("load other", load, self.other, partial(show, self._show_other))

    def _work(self, group: str, work: Callable[..., object], *args: object) -> None:
        """Do something in a thread, instead of what the group did before."""
        self.run_worker(partial(work, *args), thread=True, exclusive=True, group=group)

    def action_show_view(self, name: str) -> None:
        """Show another view."""
        with self.batch_update():
            self._view.leave()
            self.view_name = self.query_one(ContentSwitcher).current = name
            self._enter()

    @property
    def _view(self) -> View:
        """The view that is shown."""
        return self.query_one(f"#{self.view_name}", View)

    def _enter(self) -> None:
        self._view.enter()
        self.on_resize()

    def on_resize(self) -> None:
        """Write the tabs in the room that there is."""
        tabs = [(name, KEYS[name], VIEWS[name].TITLE, VIEWS[name].TOOLTIP) for name in self.view_names]
        for line in self.query(ViewTabs):
            line.show(tabs, self.view_name)

    def _show_read(self, item: object) -> None:
        """Show what a thread has read: what the run is comes before any rank of it."""
        if isinstance(item, Document):
            self._show_document(item)
        elif isinstance(item, RunRecord):
            self.run_record = item
        elif isinstance(item, str):
            self.note = item
        elif isinstance(item, ShardvizError):
            self._show_failure(item)

    def _show_other(self, item: object) -> None:
        """Compare with the second dump once it is read, and show what differs once they are compared."""
        if isinstance(item, Document) and not item.is_partial:
            self.other_document = item
            self._compare()
        elif isinstance(item, Comparison):
            self.compared = item
        elif isinstance(item, ShardvizError):
            self._show_failure(item)

    def _show_failure(self, why: ShardvizError) -> None:
        """Exit if there is nothing to show; otherwise keep what there is, and note the failure."""
        if self.document is None:
            self._leave(why)
        else:
            self.note = why.message

    def _show_document(self, document: Document) -> None:
        """Show the document; a user who has not moved yet is taken to the first finding."""
        if document.is_partial and self.document is not None:
            return  # it is read again: what was read before says more
        if self.document is None or self.selection == self._opened_on:
            try:
                selection = self._opened_on = opened_on(document, self._tensor, self._rank)
            except ShardvizError as error:
                self._leave(error)
                return
        else:
            selection = carried_over(self.document, document, self.selection)
        if not document.is_partial:
            self.note = ""
        self.set_reactive(ShardvizApp.selection, selection)
        self.document = document

    def _leave(self, why: ShardvizError) -> None:
        """Exit with an error that the terminal shows when the screen is gone."""
        self.failure = why
        self.exit()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only the actions that work now."""
        if action == "copy_fix":
            chosen, is_listed = self.selection, self.view_name == "findings"
            return self.document is not None and bool(
                self.document.findings if is_listed else self.document.is_about(chosen.finding, chosen.entry)
            )
        if action == "next_finding":
            return self._has_next_finding
        if action == "show_view" and parameters not in [(name,) for name in self.view_names]:
            return False
        return super().check_action(action, parameters)

    @property
    def _has_next_finding(self) -> bool:
        """Whether there is a finding to go to: another one, or the only one from a tensor that does not have it."""
        if self.document is None or not self.document.findings:
            return False
        only = self.document.by_finding.get(0)
        return len(self.document.findings) > 1 or (only is not None and only != self.selection.entry)

    def watch_selection(self, before: Selection, now: Selection) -> None:
        """Offer the way to a finding from a tensor that does not have it, and its fix on one that does."""
        if before.entry != now.entry and self.document is not None and self.document.findings:
            self.refresh_bindings()

    def go(self, target: Target) -> None:
        """Go to a rank, a tensor or an element, in a view that shows it."""
        super().go(target)
        if target.rank is not None and self.view_name not in ("mesh", "rank"):
            self.action_show_view("rank")
        elif target.rank is None and self.view_name not in ("rank", "compare"):
            self.action_show_view("explore")
        if target.rank is None and self.view_name == "explore":
            self.query_one(ExploreView).show_target(target)

    def picture(self) -> str:
        """Draw the chosen tensor as `shardviz show` does."""
        from shardviz.picture.model.subjects.subject import of_tensor
        from shardviz.picture.svg.page import svg

        document = self.document
        if self.view_name == "compare" and (drawn := self.query_one(CompareView).picture()):
            return drawn
        if document is None or not document.entries or document.report is None:
            raise ShardvizError("the dump is not checked yet")
        tensor = document.entries[self.selection.entry].tensor
        return svg(of_tensor(document.dump, tensor, self.chosen_name, document.report))

    def watch_document(self) -> None:
        """Offer the keys that need a report, and compare."""
        self.refresh_bindings()
        self._compare()

    def _compare(self) -> None:
        """Compare the dump with the other in a thread, once both are checked, or with a checkpoint."""
        here, there, other = self.document, self.other_document, self.other
        if here is None or here.report is None or other is None:
            return
        show = partial(self.call_later, self._show_other)
        if there is not None and there.report is not None:
            self._work("compare", load_difference, here, there, show)
        elif is_checkpoint(other):
            self._work("compare", load_compared, here, other, show)

    def action_copy_fix(self) -> None:
        """Copy the fix of the chosen finding."""
        assert self.document is not None
        finding = self.document.findings[self.selection.finding]
        self.copy(finding.fix or finding.summary, "Copied the fix")

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
