"""Names of tensors, cut to the room that a line has for them."""

from __future__ import annotations

MOST_NAME = 48
"""The most characters of a name in a line with other texts."""


def fitted(name: str, room: int) -> str:
    """Return the name in so many characters, cut in its middle: the ends tell tensors apart."""
    if len(name) <= room:
        return name
    head = max(room // 3, 1)
    return f"{name[:head]}…{name[len(name) - max(room - head - 1, 1) :]}"


def shortened(name: str, most: int = MOST_NAME) -> str:
    """Return the name in at most so many characters; a name that is cut ends in an ellipsis."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
