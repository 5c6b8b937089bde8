"""Bars to scale, an eighth of a column fine."""

from __future__ import annotations

EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, width: int) -> str:
    """Draw a share of the longest bar; whatever is not nothing is seen.

    Args:
        share: The share, from 0 to 1.
        width: The columns of the longest bar, which the text takes in any case.
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width)
