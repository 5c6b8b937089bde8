"""The base of all views: shows the shared state, changes it when something is chosen, and keeps its own focus."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.widget import Widget

from ...abstract import Abstract
from ...model.filters import after
from ...model.messages import PlaceChosen, PlaneTurned, RankChosen, SideChosen
from ...model.navigation.selection import next_plane
from ...widgets.box import Column, Entitled
from ...widgets.map.side_bar import SIDES

if TYPE_CHECKING:
    from textual.geometry import Region
    from typing_extensions import Self

    from ...model.document import Document
    from ...model.navigation.selection import Selection
    from ...model.state import State


class View(Column, metaclass=Abstract):
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
        self.styles.layer = self.NAME  # or they would share the height
        self._shown: tuple[Document | None, object] | None = None
        self._focused: Widget | None = None
        self._lit: Entitled | None = None
        self._ready_for: Document | None = None
        self.is_current = False

    @abstractmethod
    def show(self, document: Document | None, selection: Selection) -> None:
        """Show a document and the selection in it."""

    def chosen(self, selection: Selection) -> object:
        """Return what of a selection the view shows: it is shown again when that changes."""
        return selection

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        """Lay out again, but paint nothing: the parts of the view cover all of it."""
        return super().refresh(*regions, repaint=False, layout=layout, recompose=recompose)

    def on_mount(self) -> None:
        """Follow the shared state, and show it as it is."""
        self.watch(self.app, "document", self.follow, init=False)
        self.watch(self.app, "selection", self.follow, init=False)
        self.follow()

    def follow(self) -> None:
        """Show the shared state; a view that is not on screen waits until it is."""
        if self.is_current:
            self._catch_up()

    def _catch_up(self) -> None:
        document, chosen = self.state.document, self.chosen(self.state.selection)
        if self._shown is None or document is not self._shown[0] or chosen != self._shown[1]:
            self._shown = (document, chosen)
            self.show(document, self.state.selection)

    def put(self, *, on_screen: bool) -> None:
        """Put the view on the screen, or beside it: there it keeps its size, so that coming back needs no layout."""
        self.is_current = self.can_focus_children = on_screen
        self.styles.offset = (0 if on_screen else "100vw", 0)

    def make_ready(self) -> bool:
        """Do the work for its first frame ahead, in two turns; return whether there was anything to do."""
        document, shown = self.state.document, self._shown
        if self.is_current or self._ready_for is document:
            return False
        if shown is None or shown[0] is not document:
            self._catch_up()
        else:
            self._ready_for = document
            self.light(self.query_one(self.focus_first))
            for widget in self.walk_children(Widget):
                widget.render_lines(widget.size.region)
        return True

    def work_ahead(self) -> bool:
        """Do a part of what the next keys may need; return whether there was anything to do."""
        return False

    @property
    def focus_first(self) -> str:
        """Selects the widget that is focused at first, with what is shown now."""
        return self.FOCUS

    def light(self, focused: Widget | None) -> None:
        """Light the box around the focused widget; it stays lit while another view is shown."""
        around = focused.ancestors_with_self if focused is not None else []
        box = next((node for node in around if isinstance(node, Entitled)), None)
        if box is not self._lit:
            for changed, on in ((self._lit, False), (box, True)):
                if changed is not None:
                    changed.light(on=on)
            self._lit = box

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

    def enter(self) -> None:
        """Come on screen: show changes made meanwhile, and focus the widget that was focused here before."""
        self.follow()
        self.screen.set_focus(self._focused or self.query_one(self.focus_first))

    def leave(self) -> None:
        """Go off screen, and remember the focused widget."""
        focused = self.screen.focused
        self._focused = focused if focused is not None and self in focused.ancestors else None
