"""The scroll bar beside a grid: most of its lines look alike, and each look is painted once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip

from ..box import Unscrolled
from .unframed import Unframed

if TYPE_CHECKING:
    from textual.geometry import Region


class SideScroll(ScrollBar, Unscrolled):
    """A vertical scroll bar that paints its own lines. Textual paints each of them by itself, with rich."""

    def __init__(self, thickness: int) -> None:
        super().__init__(vertical=True, name="vertical", thickness=thickness)
        self._styles_cache = Unframed()
        self._painted: list[Strip] = []

    def render_lines(self, crop: Region) -> list[Strip]:
        """Paint some lines of the bar as it is now."""
        self._painted = []
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Paint one line."""
        if not self._painted:
            self._painted = self._paint()
        return self._painted[y]

    def _paint(self) -> list[Strip]:
        """Paint all lines, those that look alike as one."""
        bar, base = self.render(), self.rich_style
        assert isinstance(bar, ScrollBarRender)
        style = self.app.console.get_style(bar.style)
        assert style.color is not None
        assert style.bgcolor is not None
        segments = bar.render_bar(
            size=self.size.height,
            virtual_size=bar.virtual_size,
            window_size=bar.window_size,
            position=bar.position,
            thickness=bar.thickness,
            back_color=style.bgcolor,
            bar_color=style.color,
        ).segments
        looks = {id(segment): segment for segment in segments}
        strips = {key: Strip(Segment.apply_style([segment], base)) for key, segment in looks.items()}
        return [strips[id(segment)] for segment in segments]
