"""What became of a tensor that is not equal: another order, padding, a rounding, a factor, or other values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.agreement import narrower
from shardviz.checkpoint.comparing.changed.differences import counted_differences
from shardviz.checkpoint.comparing.changed.factors import shifted
from shardviz.checkpoint.comparing.changed.numbers import padding, repeated, rounded
from shardviz.checkpoint.comparing.changed.orders import name_change
from shardviz.checkpoint.records import Saved
from shardviz.relate.casts import cast

if TYPE_CHECKING:
    from shardviz.checkpoint.comparing.outcome import Verdict
    from shardviz.checkpoint.tensor import Tensor
    from shardviz.explain.cause import Cause

SIDES = ("the first", "the second")


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a tensor.

    Attributes:
        verdict: That in a word.
        why: In words, with the numbers.
        explanation: What was done; None where that is not known.
    """

    verdict: Verdict
    why: str
    explanation: Cause | None = None


def change_of(one: Tensor, other: Tensor, names: tuple[str, str] = SIDES) -> Change:
    """Say what became of a tensor.

    Args:
        one: What it was.
        other: What it is: not that, in a type to which values are known to be rounded.
        names: What the two are called.

    Raises:
        DumpError: One of them cannot be read.
    """
    narrow = narrower(one.dtype, other.dtype)
    mine, theirs = (cast(side.bits, side.dtype, narrow) for side in (one, other))
    assert mine is not None, "can_cast says so"
    assert theirs is not None, "can_cast says so"
    types = "" if one.dtype == other.dtype else f"; {one.dtype} and {other.dtype}"
    cuts = tuple(side for side in (other, one) if isinstance(side, Saved))
    if change := name_change(mine, theirs, cuts):
        return Change("permuted", f"{change}{types}")
    if found := repeated(mine, theirs, names):
        shapes = f"{one.dtype}{list(one.shape)} became {other.dtype}{list(other.shape)}"
        return Change("other", f"{shapes}: {found.why}", found.explanation)
    if found := padding(mine, theirs, names):
        return Change("padded", f"{found.why}{types}", found.explanation)
    if found := rounded(one, other, names):
        return Change("cast", *found)
    if found := shifted(mine, theirs, narrow, names):
        return Change("other", f"{found.why}{types}", found.explanation)
    return Change("other", counted_differences(one, other, mine, theirs, names))
