"""What a plan's layouts leave uneven, empty, or whole where it could be split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.layout.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.plan.counting.amounts import Amounts, Held

LARGE = 0.01
"""A tensor is large from this part of the parameters of the fullest rank."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """A parameter whose parts differ in size from rank to rank.

    Attributes:
        held: The parameter.
        least: Elements of the smallest part.
        most: Elements of the largest part.
        empty: How many ranks have none.
        ranks: How many ranks have the parameter.
    """

    held: Held
    least: int
    most: int
    empty: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A large parameter that every rank along an axis has whole, though other parameters are split over that axis.

    Attributes:
        held: The parameter.
        axis: The axis.
        size: Ranks along it.
        saved: Bytes that a rank would save, with gradient and optimizer state.
    """

    held: Held
    axis: str
    size: int
    saved: int


def uneven(amounts: Amounts) -> Iterator[Uneven]:
    """Yield the parameters whose parts differ in size from rank to rank, the emptiest first.

    Those of FSDP1's flat parameters do not count: these are cut into equal parts, wherever one of them ends.
    """
    found = []
    for one, sizes in _parameters(amounts):
        least, most = int(sizes.min()), int(sizes.max())
        is_flat = one.layout is not None and one.layout.flat is not None
        if least < most and not is_flat:
            found.append(Uneven(one, least, most, int((sizes == 0).sum()), len(sizes)))
    yield from sorted(found, key=lambda one: (-one.empty / one.ranks, -(one.most - one.least)))


def _parameters(amounts: Amounts) -> Iterator[tuple[Held, NDArray[np.int64]]]:
    """Yield every parameter as the first part of the plan has it, with its elements on the ranks of all parts."""
    by_name: dict[str, list[Held]] = {}
    for _, held in amounts.held:
        for one in held:
            if one.role == "parameters":
                by_name.setdefault(one.name, []).append(one)
    for own in by_name.values():
        yield own[0], np.concatenate([one.sizes for one in own])


def whole(amounts: Amounts) -> Iterator[Whole]:
    """Yield large parameters that could be split over an axis that splits others, those that would save most first."""
    most = int(amounts.by_role["parameters"].max())
    found: dict[tuple[str, str], Whole] = {}
    for _, held in amounts.held:
        params = [one for one in held if one.role == "parameters" and one.layout is not None]
        used = {axis for one in params if one.layout for axis in one.layout.split_axes}
        large = (one for one in params if int(one.bytes.max()) >= LARGE * most)
        for other in (other for one in large for other in _copied(one, held, used)):
            key = (other.held.name, other.axis)
            found[key] = max(found.get(key, other), other, key=lambda one: one.saved)
    yield from sorted(found.values(), key=lambda one: -one.saved)


def _copied(one: Held, held: tuple[Held, ...], used: set[str]) -> Iterator[Whole]:
    assert one.layout is not None
    for axis in one.layout.replicate_axes:
        size = one.layout.mesh.axis_size(axis)
        if size > 1 and axis in used and any(dim >= size for dim in one.body.local_shape):
            yield Whole(one, axis, size, _with_state(one, held) * (size - 1) // size)


def _with_state(one: Held, held: tuple[Held, ...]) -> int:
    """Return the bytes on the fullest rank of a parameter, its gradient and what the optimizer keeps of it."""
    after = [other for other in held if other.role in ("gradients", "optimizer") and other.owner == one.name]
    return sum(int(other.sizes.max()) * itemsize(other.body.dtype) * other.count for other in (one, *after))
