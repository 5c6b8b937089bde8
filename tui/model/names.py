"""Names of tensors, cut between words to the room that a line has for them."""

from __future__ import annotations

import re
from itertools import accumulate

MOST_NAME = 48
"""The most characters of a name in a line with other texts."""

_WORDS = re.compile(r"(?=[._,/-])")
"""Where a name or a layout may be cut: before what joins two words."""


def fitted(name: str, room: int) -> str:
    """Return the name in so many characters, cut in its middle: the ends tell tensors apart."""
    if len(name) <= room:
        return name
    first, *words = _WORDS.split(name)
    for head in (first, ""):
        for at in range(len(words)):
            if len(text := f"{head}…{''.join(words[at:])}") <= room:
                return text
    start = max(room // 3, 1)
    return f"{name[:start]}…{name[len(name) - max(room - start - 1, 1) :]}"


def shortened(name: str, most: int = MOST_NAME) -> str:
    """Return the name in at most so many characters; one that is cut ends in an ellipsis, after a word if it can."""
    if len(name) <= most:
        return name
    whole = max((size for size in accumulate(map(len, _WORDS.split(name))) if size < most), default=0)
    return f"{name[: whole if whole > most // 2 else most - 1]}…"
