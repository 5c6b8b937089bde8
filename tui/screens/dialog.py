"""The base of dialogs: what is behind one is dimmed, at the cost of a paint and not of three."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.screen import ModalScreen, ScreenResultType
from textual.strip import Strip

from ..widgets.grids.unframed import Unframed
from .arranging import PaintedInFront
from .frames import PaintedOnce

if TYPE_CHECKING:
    from textual.await_remove import AwaitRemove
    from textual.geometry import Region
    from typing_extensions import Self


class Dialog(PaintedOnce[ScreenResultType], ModalScreen[ScreenResultType]):
    """A dialog above another screen.

    Textual dims each stretch of the screen behind it anew, and all of it again for each layout. Here each style is
    dimmed once, and what is behind is looked at only where lines of it are painted.
    """

    HORIZONTAL_BREAKPOINTS = []  # noqa: RUF012  Textual's own form
    VERTICAL_BREAKPOINTS = []  # noqa: RUF012

    _behind: list[Strip] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._compositor = PaintedInFront()
        self._styles_cache = Unframed()

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        """Paint again what is behind where it says that it has changed: it names the regions; a layout changes none."""
        if regions:
            self._behind = None
        return super().refresh(*regions, repaint=repaint and not layout, layout=layout, recompose=recompose)

    def remove(self) -> AwaitRemove:
        """Go; the screen behind is where it was, and Textual would lay it out again."""
        return self.app._prune(self)

    def notify_style_update(self) -> None:
        """Dim what is behind in other colours."""
        self._behind = None
        super().notify_style_update()

    def render_line(self, y: int) -> Strip:
        """Paint one line of what is behind."""
        if self._behind is None or len(self._behind) != self.size.height:
            self._behind = self._dim()
        return self._behind[y] if y < len(self._behind) else Strip.blank(self.size.width, self.rich_style)

    def _dim(self) -> list[Strip]:
        stack, over = self.app.screen_stack, self.styles.background
        behind = stack[stack.index(self) - 1]._compositor.render_strips() if self in stack[1:] else []
        return [Strip([Segment(text, _dimmed(style, over)) for text, style, _ in strip]) for strip in behind]


@lru_cache(maxsize=4096)
def _dimmed(style: Style | None, over: Color) -> Style:
    """Return a style below a colour that shows it through, without what it does when it is clicked."""
    if style is None:
        return Style()
    fore, back = (
        (Color.from_rich_color(one) + over).rich_color if one is not None else None
        for one in (style.color, style.bgcolor)
    )
    return style.clear_meta_and_links() + Style.from_color(fore, back)
