"""An exhibit's columns as texts, the same for every format: signs before what is wrong, decimal points in line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.picture.model.palette import RIGHT, WRONG
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.picture.exhibits.exhibit import Cell, Exhibit

_NUMBER = re.compile(r"-?(?:\d+|inf|nan)(?=(?:[./e][-+.e\d]*)?$)")
"""A number up to its decimal point, or to the line of a fraction."""


def columns_of(exhibit: Exhibit, spelled: Callable[[str], str] = printable) -> list[list[str]]:
    """Return each column after the first as texts, its head first, numbers with their decimal points in line.

    Args:
        exhibit: The table.
        spelled: Writes a text, or a sign, in the characters that can be shown.
    """
    return [
        _column(spelled(head), [row.cells[at] if at < len(row.cells) else None for row in exhibit.rows], spelled)
        for at, head in enumerate(exhibit.heads[1:])
    ]


def _column(head: str, cells: Sequence[Cell | None], spelled: Callable[[str], str]) -> list[str]:
    """Write the cells of a column; beside those that carry a sign, the others are set in by as much."""
    texts = _in_line([spelled(cell.text) if cell else "" for cell in cells])
    signs = [spelled(_sign(cell)) for cell in cells]
    if not any(signs):
        return [head, *texts]
    marked = (f"{sign or ' '} {text}" if text else "" for sign, text in zip(signs, texts, strict=True))
    return [f"  {head}", *marked]


def _sign(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return WRONG if cell.is_wrong else RIGHT if cell.is_right else ""


def _in_line(texts: Sequence[str]) -> list[str]:
    """Set numbers below each other; other texts stay as they are."""
    found = [_NUMBER.match(text) for text in texts]
    if not all(match or not text for match, text in zip(found, texts, strict=True)):
        return list(texts)
    ends = [match.end() if match else 0 for match in found]
    return [" " * (max(ends, default=0) - end) + text if text else "" for end, text in zip(ends, texts, strict=True)]
