"""Values that all differ in one way: by a factor, or by a number that was added."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.changed.words import Words
from shardviz.explain.conversion import ForgottenFactor, ForgottenOffset
from shardviz.relate.casts import cast, values_of
from shardviz.relate.relations import Scaled
from shardviz.relate.stored import line_between
from shardviz.relate.tolerance import WHOLE_FACTOR
from shardviz.relate.values import blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray


def shifted(mine: NDArray[Any], theirs: NDArray[Any], dtype: str, names: tuple[str, str]) -> Words | None:
    """Say that all values of one side are those of the other times a factor, or with a number added.

    Args:
        mine: The first side's bits.
        theirs: The second's.
        dtype: The element type of both.
        names: What the two are called.

    Returns:
        The words; None where it is not so.
    """
    relation = line_between(mine, theirs, dtype)
    if isinstance(relation, Scaled):
        return _multiplied(relation.factor, names)
    return None if relation is None else _added(relation.number, names)


def _multiplied(factor: float, names: tuple[str, str]) -> Words:
    why = f"every value of {names[1]} is {factor_text(factor)} times that of {names[0]}"
    return Words(why, ForgottenFactor(factor_text(1 / factor)))


def _added(added: float, names: tuple[str, str]) -> Words:
    size, (how, undo) = factor_text(abs(added)), ("more", "subtract") if added > 0 else ("less", "add")
    why = f"every value of {names[1]} is {size} {how} than in {names[0]}"
    return Words(why, ForgottenOffset(undo, size))


def overflown(wide: NDArray[Any], dtype: str, to: str) -> str:
    """Say how many values a cast made infinite; empty where it made none."""
    count = 0
    for part in blocks(wide):
        narrow = cast(part, dtype, to)
        if narrow is not None:
            count += int((np.isinf(values_of(narrow, to)) & np.isfinite(values_of(part, dtype))).sum())
    return f"{count:,} of {wide.size:,} values are too large for {to} and became infinite" if count else ""


def factor_text(number: float) -> str:
    """Return a factor in few digits; as a whole number where it is nearly one."""
    near = round(number)
    is_whole = near and math.isclose(number, near, rel_tol=WHOLE_FACTOR) and abs(number - near) < WHOLE_FACTOR
    return f"{near:,}" if is_whole else f"{number:.4g}"
