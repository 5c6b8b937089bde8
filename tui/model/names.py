"""Names of tensors, cut between words to the room that a line has for them."""

from __future__ import annotations

import re
from itertools import accumulate

from rich.cells import cell_len, set_cell_size

MOST_NAME = 48
"""The most columns of a name in a line with other texts."""

_WORDS = re.compile(r"(?=[._,/-])")
"""Where a name or a layout may be cut: before what joins two words."""


def fitted(name: str, room: int) -> str:
    """Return the name in so many columns, cut in its middle: the ends tell tensors apart."""
    if cell_len(name) <= room:
        return name
    first, *words = _WORDS.split(name)
    for head in (first, ""):
        for at in range(len(words)):
            if cell_len(text := f"{head}…{''.join(words[at:])}") <= room:
                return text
    start = room // 3
    end = set_cell_size(name[::-1], max(room - start - 1, 0))[::-1]
    return f"{set_cell_size(name, start).rstrip()}…{end.lstrip()}"


def shortened(name: str, most: int = MOST_NAME) -> str:
    """Return the name in at most so many columns; one that is cut ends in an ellipsis, after a word if it can."""
    if cell_len(name) <= most:
        return name
    wholes = (text for text in accumulate(_WORDS.split(name)) if cell_len(text) < most)
    whole = max(wholes, key=cell_len, default="")
    return f"{whole if cell_len(whole) > most // 2 else set_cell_size(name, most - 1).rstrip()}…"
