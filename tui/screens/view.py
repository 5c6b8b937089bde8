"""The base of all views: shows the shared state, changes it when something is chosen, and keeps its own focus."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from textual import on
from textual.containers import Vertical
from textual.widget import Widget

from ..model.filters import after
from ..model.messages import PlaceChosen, PlaneTurned, RankChosen, SideChosen
from ..model.selection import next_plane
from ..widgets.map_panel import SIDES

if TYPE_CHECKING:
    from textual.geometry import Size

    from shardviz.check.diff import Difference

    from ..model.document import Document
    from ..model.pairs import Compared
    from ..model.selection import Selection


class State(Protocol):
    """The dumps that are shown, and the choices made in them. A view sets `selection`, and all views follow.

    Attributes:
        document: The dump; None until it is read.
        other_document: The dump to compare it with; None without one, and until it is read.
        difference: How the two differ; None until they are compared.
        compared: The dump beside a checkpoint; None without one, and until they are compared.
        selection: What is chosen.
    """

    document: Document | None
    other_document: Document | None
    difference: Difference | None
    compared: Compared | None
    selection: Selection

    async def action_show_view(self, name: str) -> None:
        """Show another view."""


class View(Vertical):
    """A view of the dump. Subclasses define `compose` and `show`.

    `NAME` is its id, `TITLE` and `TOOLTIP` are shown in the tabs, `FOCUS` selects the widget that is focused at first.
    """

    NAME: ClassVar[str]
    TITLE: ClassVar[str]
    TOOLTIP: ClassVar[str]
    FOCUS: ClassVar[str]

    def __init__(self, state: State) -> None:
        super().__init__(id=self.NAME)
        self.state = state
        self._shown: tuple[Document | None, object] | None = None
        self._focused: Widget | None = None

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show a document and the selection in it."""
        raise NotImplementedError

    def chosen(self, selection: Selection) -> object:
        """Return what of a selection the view shows: it is shown again when that changes."""
        return selection

    def on_mount(self) -> None:
        """Follow the shared state."""
        self.watch(self.app, "document", self.follow, init=False)
        self.watch(self.app, "selection", self.follow, init=False)

    def follow(self) -> None:
        """Show the shared state, if it changed; a view that is not on screen waits until it is."""
        document, chosen = self.state.document, self.chosen(self.state.selection)
        is_new = self._shown is None or document is not self._shown[0] or chosen != self._shown[1]
        if self.display and is_new:
            self._shown = (document, chosen)
            self.show(document, self.state.selection)

    @property
    def room(self) -> Size:
        """The lines and columns that a view has, on screen or not."""
        return self.parent.size if isinstance(self.parent, Widget) else self.size

    def show_again(self) -> None:
        """Show the shared state after something else changed that the view depends on."""
        self._shown = None
        self.follow()

    @property
    def focus_first(self) -> str:
        """Selects the widget that is focused at first, with what is shown now."""
        return self.FOCUS

    def enter(self) -> None:
        """Come on screen: show changes made meanwhile, and focus the widget that was focused here before."""
        self.follow()
        self.screen.set_focus(self._focused or self.query_one(self.focus_first))

    def leave(self) -> None:
        """Remember the focused widget before another view is shown."""
        focused = self.screen.focused
        self._focused = focused if focused is not None and self in focused.ancestors else None

    @on(PlaceChosen)
    def _place_chosen(self, message: PlaceChosen) -> None:
        selection = self.state.selection
        if selection.plane is not None:
            self.state.selection = replace(selection, plane=replace(selection.plane, at=message.place))

    @on(RankChosen)
    def _rank_chosen(self, message: RankChosen) -> None:
        self.state.selection = replace(self.state.selection, rank=message.rank)

    @on(SideChosen)
    def _side_chosen(self, message: SideChosen) -> None:
        self.state.selection = replace(self.state.selection, side=message.side)

    @on(PlaneTurned)
    def _plane_turned(self) -> None:
        selection = self.state.selection
        if selection.plane is not None:
            self.state.selection = replace(selection, plane=next_plane(selection.plane))

    def action_next_side(self) -> None:
        """Go from claimed to held to difference; the views that show a side bind a key to it."""
        self.state.selection = replace(self.state.selection, side=after(SIDES, self.state.selection.side))
