"""Lines of widgets that have nothing around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual._styles_cache import StylesCache
from textual.strip import Strip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.color import Color
    from textual.filter import LineFilter
    from textual.geometry import Region
    from textual.widget import Widget


class Unframed(StylesCache):
    """The lines of a widget that paints all of them in its own colours, with no border or padding around them.

    Textual looks up for each line what is around it, and again for each frame what its filters make of the line.
    """

    _painted_for: tuple[int, Sequence[LineFilter], Color] | None = None

    def render_widget(self, widget: Widget, crop: Region) -> list[Strip]:
        """Paint some lines of a widget: those that are new, or have changed."""
        region = widget.region
        if widget.content_region.size != region.size:
            return super().render_widget(widget, crop)
        painted_for = region.width, widget.get_line_filters(), widget.background_colors[1]
        if painted_for != self._painted_for:
            self.clear()
            self._painted_for = painted_for
        lines = crop.line_range
        for y in lines:
            if y in self._dirty_lines or y not in self._cache:
                self._cache[y] = _filtered(widget.render_line(y), *painted_for)
        self._dirty_lines.difference_update(lines)
        return [self._cache[y].crop(crop.x, crop.right) for y in lines]


def _filtered(strip: Strip, width: int, filters: Sequence[LineFilter], background: Color) -> Strip:
    """Return a line as wide as its widget, in the colours that the terminal has."""
    segments = [*strip.adjust_cell_length(width)]
    for one in filters:
        segments = one.apply(segments, background)
    return Strip(segments, width)
