"""Values that all differ in one way: by a factor, or by a number that was added."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.changed.words import Words
from shardviz.explain.conversion import ForgottenFactor, ForgottenOffset
from shardviz.reference.lookup import is_alike
from shardviz.relate.casts import cast
from shardviz.relate.tolerance import SAFETY

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Values = NDArray[np.float64]

DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Bits of a value behind its first one."""

BLOCK = 1 << 18
"""Elements that are looked at at a time."""

SAMPLES = 256
"""Values that the factor and the number are read off."""


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
    if mine.shape != theirs.shape or dtype not in DIGITS or is_alike(mine) or is_alike(theirs):
        return None
    own, new = (values_of(sampled(bits), dtype) for bits in (mine, theirs))
    exact = 2.0 ** -DIGITS[dtype]
    if not len(own) or not np.isfinite([own, new]).all():
        return None
    largest = int(np.abs(own).argmax())
    room = SAFETY * exact * abs(own[largest])
    if np.ptp(own) <= room:
        return None
    factor, added = float(new[largest] / own[largest]), float(np.median(new - own))
    if (
        factor
        and abs(factor - 1) > SAFETY * exact
        and _fits(mine, theirs, dtype, exact, lambda values: values * factor)
    ):
        return _multiplied(factor, names)
    if abs(added) > room and _fits(mine, theirs, dtype, exact, lambda values: values + added):
        return _added(added, names)
    return None


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
    return (
        f"{near:,}"
        if near and math.isclose(number, near, rel_tol=1e-2) and abs(number - near) < 1e-2
        else f"{number:.4g}"
    )


def sampled(bits: NDArray[Any]) -> NDArray[Any]:
    """Return some elements, evenly spread."""
    places = np.unique(np.linspace(0, bits.size - 1, SAMPLES).astype(np.int64))
    found: NDArray[Any] = bits[np.unravel_index(places, bits.shape)]
    return found


def values_of(bits: NDArray[Any], dtype: str) -> Values:
    """Return values as float64."""
    found = cast(np.ascontiguousarray(bits), dtype, "float64")
    assert found is not None, "numpy knows these types"
    return found.view(np.float64)


def blocks(bits: NDArray[Any]) -> list[NDArray[Any]]:
    """Cut an array along its first dim, or its elements, so that little memory is needed at a time."""
    if bits.ndim and bits.size > BLOCK * max(len(bits), 1):
        bits = bits.reshape(-1)  # a single row may be all of it
    rows = max(BLOCK // max(bits.size // max(len(bits), 1), 1), 1) if bits.ndim else 1
    return [bits[at : at + rows] for at in range(0, len(bits), rows)] if bits.ndim else [bits]


def _fits(mine: NDArray[Any], theirs: NDArray[Any], dtype: str, exact: float, made: Callable[[Values], Values]) -> bool:
    """Whether all values of one side are made of the other's, but for roundings."""
    for own, new in zip(blocks(mine), blocks(theirs), strict=True):
        values, there = values_of(own, dtype), values_of(new, dtype)
        with np.errstate(all="ignore"):
            wanted = made(values)
            room = exact * np.maximum(np.maximum(np.abs(values), np.abs(there)), np.abs(wanted))
            if not (np.abs(there - wanted) <= room).all():
                return False
    return True
