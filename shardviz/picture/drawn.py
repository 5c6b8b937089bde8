"""What draws itself: a picture in a notebook, text in a terminal. `shardviz.show` takes any of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape
from typing import TYPE_CHECKING, Any

from shardviz.errors import ShardvizError
from shardviz.picture.markup import element, words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.text import Text

    from shardviz.picture.text.terminal import Terminal

MOST_LINES = 60
"""Lines that a terminal shows of something that is only named at a prompt; `shardviz.show` prints all."""

HTML, SVG = "text/html", "image/svg+xml"

_FRAME = '<iframe srcdoc="{}" style="width:100%;height:{}px;border:0" title="shardviz"></iframe>'


def framed(page: str, height: int = 640) -> str:
    """Put a page into a frame of a notebook, so that neither the page's style nor the notebook's reaches the other."""
    return _FRAME.format(escape(page), height)


class Drawn(ABC):
    """Something with a picture; IPython and Jupyter call the methods that begin with `_repr_`."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is, in a line."""

    @abstractmethod
    def lines(self, terminal: Terminal) -> list[Text]:
        """Return its picture as text."""

    @abstractmethod
    def markup(self) -> Mapping[str, str]:
        """Return its picture for a notebook, by MIME type."""

    def part(self, name: str) -> Drawn:
        """Return the part that has a name.

        Raises:
            ShardvizError: It has no such part.
        """
        raise ShardvizError(f"{self!r} has no tensors by name", "leave the name out")

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_html_(self) -> str:
        try:
            return next(iter(self.markup().values()))
        except ShardvizError as error:
            return element("pre", words(error.message))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print its text at a prompt, and one line for it within a list or a dictionary."""
        if cycle or len(printer.stack) > 1:
            printer.text(repr(self))
            return
        from shardviz.picture.text.terminal import PIPE_WIDTH, Terminal

        terminal = Terminal(PIPE_WIDTH)
        lines = self.lines(terminal)
        text = terminal.render(lines[:MOST_LINES]).rstrip("\n")
        printer.text(text)
        if (more := len(lines) - MOST_LINES) > 0:
            printer.text(f"\n{terminal.glyphs.more} {more:,} more lines: shardviz.show prints them")
