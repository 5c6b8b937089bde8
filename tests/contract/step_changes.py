"""The changes of one step's numbers: a factor, an order, a reduction, zeros, another part, in every layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.mesh import Mesh, parse_mesh
from tests.contract.by_axes import cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout

    Array = NDArray[Any]
    Held = dict[int, Array]
    Change = Callable[["Place", Held], Held]

MESHES = tuple(map(parse_mesh, ("dp=2,tp=2", "dp=2,tp=3", "pp=2,dp=2,tp=2")))
R, S0, S1, SUM, AVG = "Replicate()", "Shard(0)", "Shard(1)", "Partial()", "Partial('avg')"
LAYOUTS = ((R, R), (R, S0), (R, S1), (S0, R), (S0, S0), (S0, S1), (SUM, R), (AVG, S0), None)
"""Placements along the last two axes; None for a plain tensor."""
SHAPE = (12, 6)
VECTOR: Array = np.linspace(0.5, 2, 6)
MOST_ALIKE = 3
"""Cases that are kept of those with one verdict."""
ROLES = ("grad", "output", "param", "optim", "buffer", "loss", "grad_norm")


@dataclass(frozen=True)
class Place:
    """A tensor's place: its mesh, its layout, all of its values, and those of another tensor of its shape."""

    mesh: Mesh
    layout: Layout
    whole: Array
    other: Array

    def cut(self, whole: Array) -> Held:
        """Return each rank's part; of a sum that is pending, a part of it that differs from rank to rank."""
        held = {}
        for rank in self.mesh.ranks:
            coord = self.mesh.coord_of(rank)
            ids = self.layout.region(coord).flat_ids(self.layout.tensor_shape)
            part = whole.ravel()[ids]
            for axis, op in self.layout.partial:
                size, at = self.mesh.axis_size(axis), coord[self.mesh.axes.index(axis)]
                part = part * (1 + at - (size - 1) / 2) / (size if op == "sum" else 1)
            held[rank] = part
        return held

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks along an axis."""
        return self.mesh.group_of(rank, axis)


def each(change: Callable[[Array], Array]) -> Change:
    """Change what each rank has."""
    return lambda _, held: {rank: change(part) for rank, part in held.items()}


def of_whole(change: Callable[[Place], Array]) -> Change:
    """Change the tensor before it is cut."""
    return lambda place, _: place.cut(change(place))


def on_last(change: Callable[[Array], Array]) -> Change:
    """Change what the last rank has."""
    return lambda _, held: held | {max(held): change(held[max(held)])}


def along(axis: str, change: Callable[[Place, Held, tuple[int, ...], int], Array]) -> Change:
    """Change what each rank has by what the ranks along an axis have."""
    return lambda place, held: {rank: change(place, held, place.group(axis, rank), rank) for rank in held}


def alike(held: Held, group: tuple[int, ...]) -> list[Array]:
    """Return what ranks have, if the shapes are the same; else that of the first."""
    parts = [held[rank] for rank in group]
    return parts if len({part.shape for part in parts}) == 1 else parts[:1]


def with_at(values: Array, index: Any, number: float) -> Array:
    """Return values of which some are another number."""
    changed = values.copy()
    if changed.size:
        changed.reshape(-1)[index] = number
    return changed


def times(factor: float) -> Callable[[Array], Array]:
    """Return what multiplies by a number."""
    return lambda part: part * factor


def plus(number: float) -> Callable[[Array], Array]:
    """Return what adds a number."""
    return lambda part: part + number


def noise(size: float) -> Callable[[Array], Array]:
    """Return what adds noise, the same on every rank."""
    return lambda part: np.asarray(part + size * np.random.default_rng(4).standard_normal(part.shape))


def bfloat16(part: Array) -> Array:
    """Return values rounded to bfloat16, and of two that are as near to the even one."""
    return np.asarray(cast(np.asarray(part, np.float64), "BF16")[1])


def truncated(part: Array) -> Array:
    """Return values of which the bits behind bfloat16's are cut off."""
    return np.asarray(cast(np.asarray(part, np.float64), "BF16", truncated=True)[1])


def term(at: int, size: int) -> float:
    """Return the share of one rank of a sum that nothing has reduced."""
    return (1 + at) / (size * (size + 1) / 2)


CHANGES: Mapping[str, Change] = {
    **{f"times {factor:g}": each(times(factor)) for factor in (0.5, 2, 3, 4, 0.25, -1, 0, 1.37, 65536, 1.02, 6)},
    **{f"times {factor:g}": each(times(factor)) for factor in (1 + 3e-5, 1 / 3)},
    **{f"plus {size:g}": each(plus(size)) for size in (1.0, -0.25, 0.69314718, 1.09861229)},
    **{f"noise {size:g}": each(noise(size)) for size in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.3)},
    "last rank's halved": on_last(lambda part: part / 2),
    "last rank's zero": on_last(lambda part: part * 0),
    "last rank's scaled by a loss scale": on_last(lambda part: part * 1024),
    "one element of the last rank's": on_last(lambda part: with_at(part, -1, 9)),
    "last rank's reversed": on_last(lambda part: part[::-1] if part.ndim else -part),
    "last rank's a row less": on_last(lambda part: part[:-1] if part.ndim else part + 1),
    "last rank's missing": lambda _, held: {rank: part for rank, part in held.items() if rank != max(held)},
    "all but the first missing": lambda _, held: {min(held): held[min(held)]},
    "one element": of_whole(lambda place: with_at(place.whole, 3, 2.5)),
    "two elements zero": of_whole(lambda place: with_at(place.whole, [1, -1], 0)),
    "NaN": of_whole(lambda place: with_at(place.whole, 1, np.nan)),
    "all NaN": each(lambda part: part * np.nan),
    "infinite on the last rank": on_last(lambda part: with_at(part, 0, np.inf)),
    "rounded": each(bfloat16),
    "truncated": each(truncated),
    "constant": each(np.ones_like),
    "squared": each(np.square),
    "the exponential": each(np.exp),
    "of another tensor": of_whole(lambda place: place.other),
    "plus another tensor": of_whole(lambda place: place.whole + place.other),
    "plus half another tensor": of_whole(lambda place: place.whole + 0.5 * place.other),
    "plus a vector": each(lambda part: part + VECTOR[: part.shape[-1]] if part.ndim > 1 else part + 1),
    "minus a vector": each(lambda part: part - VECTOR[: part.shape[-1]] if part.ndim > 1 else part - 1),
    "rows reversed": of_whole(lambda place: place.whole[::-1] if place.whole.ndim else -place.whole),
    "columns reversed": of_whole(lambda place: place.whole[..., ::-1] if place.whole.ndim else 2 - place.whole),
    "rows interleaved": of_whole(lambda place: np.concatenate([place.whole[::2], place.whole[1::2]])),
    "halves exchanged": each(lambda part: np.roll(part, len(part) // 2, 0) if part.ndim else part * 1.5),
    "two rows exchanged": of_whole(lambda place: place.whole[[1, 0, *range(2, SHAPE[0])]]),
    "transposed": of_whole(lambda place: place.whole.T.reshape(place.whole.shape)),
    "two rows zero": of_whole(lambda place: place.whole * (np.arange(SHAPE[0])[:, None] >= 2)),
    "a column zero": of_whole(lambda place: place.whole * (np.arange(SHAPE[1]) > 0)),
    "first half repeated": of_whole(lambda place: np.concatenate([place.whole[:6], place.whole[:6]])),
    "whole on all": lambda place, held: dict.fromkeys(held, place.whole),
    "flat": each(lambda part: part.reshape(-1)),
    "turned": each(lambda part: part.T),
    "each rank's times its number": lambda _, held: {rank: part * (1 + rank) for rank, part in held.items()},
    "norms made 1": each(lambda part: part / (np.linalg.norm(part) or 1.0)),
}


def changes(mesh: Mesh) -> Iterator[tuple[str, Change]]:
    """Yield every change, and those along an axis."""
    yield from CHANGES.items()
    for axis in mesh.axes[-2:]:
        far = float(np.log(mesh.axis_size(axis)))
        yield (
            f"a term each along {axis}",
            along(axis, lambda _, held, group, rank: held[rank] * term(group.index(rank), len(group))),
        )
        yield (
            f"own values along {axis}",
            along(axis, lambda _, held, group, rank: held[rank] + 0.5 * (group.index(rank) - (len(group) - 1) / 2)),
        )
        yield (
            f"a norm each along {axis}",
            along(axis, lambda _, held, group, rank: held[rank] * term(group.index(rank), len(group)) ** 0.5),
        )
        yield f"summed over {axis}", along(axis, lambda _, held, group, __: np.sum(alike(held, group), axis=0))
        yield f"averaged over {axis}", along(axis, lambda _, held, group, __: np.mean(alike(held, group), axis=0))
        yield f"the first's along {axis}", along(axis, lambda _, held, group, __: held[group[0]])
        yield (
            f"the next's along {axis}",
            along(axis, lambda _, held, group, rank: held[group[(group.index(rank) + 1) % len(group)]]),
        )
        yield (
            f"times {axis}, pending",
            along(axis, lambda _, held, group, rank: held[rank] * term(group.index(rank), len(group)) * len(group)),
        )
        yield f"plus the logarithm of {axis}", each(plus(far))
        yield f"minus the logarithm of {axis}", each(plus(-far))
        yield (
            f"half of {axis} zero",
            along(axis, lambda _, held, group, rank: held[rank] * (group.index(rank) < len(group) / 2)),
        )
