"""Boxes, rows and columns. Titles in borders are text and never markup: names of tensors and folders are strangers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual._styles_cache import StylesCache
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Region
from textual.widget import Widget

from ..model.names import fitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.geometry import Size
    from textual.strip import Strip
    from typing_extensions import Self

LEAST_NAME = 8
"""Columns of a name in the title of a narrow box."""

CORNERS = 6
"""Columns of a border above that have no title."""

Titles = tuple[Text, Text]


class SidesOnce(StylesCache):
    """The lines of a widget with nothing but blanks in its border: those between the first and the last look alike."""

    _between: Strip | None = None

    def render_widget(self, widget: Widget, crop: Region) -> list[Strip]:
        """Paint some lines of a widget as it looks now."""
        self._between = None
        return super().render_widget(widget, crop)

    def render_line(self, *args: Any) -> Strip:
        """Paint a line; of those that look alike the first."""
        styles, y, size = args[:3]
        if not styles.gutter.top <= y < size.height - styles.gutter.bottom:
            return super().render_line(*args)
        if self._between is None:
            self._between = super().render_line(*args)
        return self._between


class Entitled(Widget):
    """The look of all boxes: a border that is lit where the focus is within, and titles in it."""

    DEFAULT_CLASSES = "boxed"
    _titles: Titles | None = None
    _edges: tuple[Region, ...] = ()

    _title_by_name: tuple[str, str, Sequence[str]] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._styles_cache = SidesOnce()

    def entitle(self, title: str | Text, subtitle: str | Text = "") -> None:
        """Write a title above and one below, and paint those two lines alone."""
        self._title_by_name = None
        self._write(_text(title), _text(subtitle))

    def _write(self, title: Text, subtitle: Text) -> None:
        titles = (title, subtitle)
        if titles != self._titles:
            self._titles = titles
            self._edges = self._sides[:2]
            self.border_title, self.border_subtitle = titles
            self._edges = ()

    def entitle_by_name(self, name: str, *, before: str = "", after: Sequence[str] = ("",)) -> None:
        """Write a name with words around it above: the last of the words behind it, where there is no room for others.

        The name is cut to the room that is left, now and whenever the box has another width.
        """
        self._title_by_name = before, name, after
        self._entitle_by_name()

    def on_resize(self) -> None:
        """Cut the name in the title to its new room."""
        if self._title_by_name is not None:
            self._entitle_by_name()

    def _entitle_by_name(self) -> None:
        assert self._title_by_name is not None
        before, name, after = self._title_by_name
        room = (self.outer_size.width - CORNERS if self.size else cell_len(before + name + after[0])) - cell_len(before)
        behind = next((text for text in after if cell_len(name + text) <= room), after[-1])
        self._write(Text(before + fitted(name, max(room - cell_len(behind), LEAST_NAME)) + behind), Text())

    def light(self, *, on: bool) -> None:
        """Style and paint the border alone: `:focus-within` would do all that is in it again."""
        self.set_class(on, "lit", update=False)
        self._edges = self._sides
        self.app.stylesheet.update_nodes([self])
        self._edges = ()

    @property
    def _sides(self) -> tuple[Region, ...]:
        """The border above, below, left and right, from where the content begins: Textual counts from there."""
        width, height = self.outer_size
        sides = (
            Region(0, 0, width, 1),
            Region(0, height - 1, width, 1),
            Region(0, 0, 1, height),
            Region(width - 1, 0, 1, height),
        )
        return tuple(side.translate(-self.content_offset) for side in sides)

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        """Paint again, while the border changes no more than that."""
        if not regions and not layout:
            regions = self._edges
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)


class Unscrolled(Widget):
    """A widget that is never scrolled: how much is in it changes nothing around it."""

    def _size_updated(self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True) -> bool:
        """Take its size; Textual would lay out the screen again where more or less is in it."""
        return super()._size_updated(size, virtual_size, container_size, layout=False)


class Row(Horizontal, Unscrolled):
    """Parts beside each other. It paints blank lines only, because its parts cover all of it."""

    BLANK: ClassVar[bool] = True


class Column(Vertical, Unscrolled):
    """Parts below each other, blank as a row is."""

    BLANK: ClassVar[bool] = True


class Box(Vertical, Entitled, Unscrolled):
    """A box whose parts are below each other."""


class ScrollBox(VerticalScroll, Entitled):
    """A box that scrolls."""


def _text(title: str | Text) -> Text:
    return Text(title) if isinstance(title, str) else title
