"""Names of tensors in the room that a line has for them."""

from __future__ import annotations

MOST_NAME = 48
"""Characters of a name that stands in a line with other things."""


def shortened(name: str, most: int = MOST_NAME) -> str:
    """Return the name in so many characters at most; what is left out is an ellipsis."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
