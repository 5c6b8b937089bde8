"""What became of values, in words."""

from __future__ import annotations

from typing import NamedTuple


class Words(NamedTuple):
    """What became of a tensor.

    Attributes:
        why: That, with the numbers.
        cause: What was done.
        fix: What to do about it.
    """

    why: str
    cause: str
    fix: str
