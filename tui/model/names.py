"""Names of tensors, cut to the room that a line has for them."""

from __future__ import annotations

MOST_NAME = 48
"""The most characters of a name in a line with other texts."""


def shortened(name: str, most: int = MOST_NAME) -> str:
    """Return the name in at most so many characters; a name that is cut ends in an ellipsis."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
