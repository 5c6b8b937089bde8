"""What became of values, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardviz.explain.cause import Cause


class Words(NamedTuple):
    """What became of a tensor.

    Attributes:
        why: That, with the numbers.
        explanation: What was done.
    """

    why: str
    explanation: Cause
