"""The text of the help with its table of keys, as one widget: Markdown's own would be one for each paragraph."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from textual.content import Content
from textual.widget import Widget

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from textual.geometry import Size

MARGIN = 2
"""Columns that are free on both sides of the text, and of each column of the table."""

BULLET = "• "
MARKED = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\*([^*]+)\*")
STYLES = (".help--code", "bold", "italic")
"""The styles of what is marked, in the order of the pattern's groups."""


class HelpText(Widget):
    """Headings, paragraphs and lists, and below them the keys of each part with what they do.

    Args:
        text: The text, in as much of Markdown as that takes.
        keys: For each part of the table its keys by what they do.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"help--head", "help--code", "help--bullet"}

    def __init__(self, text: str, keys: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__()
        self._text, self._keys = text, keys
        self._laid_out: tuple[int, list[Content]] = (0, [])

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Take as many lines as there are."""
        return len(self._lines(width))

    def render(self) -> Content:
        """Return the lines."""
        return Content("\n").join(self._lines(self.size.width))

    def _lines(self, width: int) -> list[Content]:
        """Wrap everything, once for a width."""
        if self._laid_out[0] != width:
            self._laid_out = (width, [*_text_lines(self._text, width - 2 * MARGIN), *_key_lines(self._keys, width)])
        return self._laid_out[1]


def _text_lines(text: str, width: int) -> Iterator[Content]:
    """Lay out a text: two lines are free above a heading, one is below each block."""
    for block in text.strip().split("\n\n"):
        if block.startswith("## "):
            yield from (Content(), Content(), _indented(Content.styled(block.removeprefix("## "), ".help--head")))
        elif block.startswith("- "):
            for item in block.removeprefix("- ").split("\n- "):
                first, *others = _marked(item).wrap(width - len(BULLET))
                yield _indented(Content.styled(BULLET, ".help--bullet") + first)
                yield from (_indented(line, MARGIN + len(BULLET)) for line in others)
        else:
            yield from map(_indented, _marked(block).wrap(width))
        yield Content()


def _indented(line: Content, columns: int = MARGIN) -> Content:
    return line.pad_left(columns) if line else line


def _marked(text: str) -> Content:
    """Return a block as one line, what is marked in its style."""
    parts: list[Content | tuple[str, str]] = []
    text, end = " ".join(text.split()), 0
    for match in MARKED.finditer(text):
        at = match.lastindex or 1
        parts += [Content(text[end : match.start()]), (match[at], STYLES[at - 1])]
        end = match.end()
    return Content.assemble(*parts, Content(text[end:]))


def _key_lines(keys: Mapping[str, Mapping[str, str]], width: int) -> Iterator[Content]:
    """Lay out the table: the keys in front, a free line before each part but the first."""
    column = max((len(key) for part in keys.values() for key in part.values()), default=0)
    room = max(width - column - 4 * MARGIN, 1)
    for number, (title, part) in enumerate(keys.items()):
        if number:
            yield Content()
        yield Content.styled(title, "dim").pad_left(column + 3 * MARGIN)
        for what, key in part.items():
            first, *others = Content(what).wrap(room)
            gap = " " * (column + 2 * MARGIN - len(key))
            yield Content.assemble(" " * MARGIN, (key, "bold"), gap, first)
            yield from (line.pad_left(column + 3 * MARGIN) for line in others)
