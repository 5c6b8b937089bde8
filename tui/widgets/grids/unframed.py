"""Lines of widgets that have nothing around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual._styles_cache import StylesCache

if TYPE_CHECKING:
    from textual.strip import Strip


class Unframed(StylesCache):
    """The lines of a widget that paints all of them in its own colours, with no border or padding around them."""

    def render_line(self, *args: Any) -> Strip:
        """Return a line of the content as it is: Textual would lay what is around it over it, piece by piece."""
        _, y, size, content_size, _, _, _, render_content_line = args[:8]
        if size != content_size:
            return super().render_line(*args)
        line: Strip = render_content_line(y)
        return line
