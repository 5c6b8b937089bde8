"""Actual and expected values of one tensor: which ranks are wrong, where replicas differ.

`measures` says what else the two sides have to do with each other. How far two right results may differ, `tolerance`
says: every element is a sum of up to n products, rounded at each step, and in the end to the coarsest dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.layout import Layout
from shardviz.layout.mesh import ranks_by
from shardviz.layout.region import Region
from shardviz.relate.factors import over
from shardviz.relate.relations import Located, Pair, Pending, Reassigned
from shardviz.relate.search import relation_of
from shardviz.relate.tolerance import EPSILON, MANY, TYPICAL, Bound, above_noise, rounding_of_sums
from shardviz.relate.values import farthest, is_near_but_for_kinks, magnitude, part_of, root_mean_square

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.relate.relations import Chain, Related

    Values = NDArray[np.float64]

MAX_RELATED = {"grad": 1 << 16, "output": 1 << 20, "scalar": 0}
"""Elements of all ranks together up to which a result is related to what is wanted: gradients are many."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a model's step allows for rounding.

    Attributes:
        epsilon: The relative precision of the coarsest dtype in the step.
        terms: The longest sum in the step: elements of its largest tensor.
        size: The largest gradient of the reference, at least; gradients that cancel are made of terms of that size.
            More if all of them cancel: rounding was seen to do to them what it does to sums of that size.
    """

    epsilon: float
    terms: int
    size: float

    @property
    def is_double(self) -> bool:
        """Whether the whole step is in float64, in which only sums that nearly cancel have noise."""
        return self.epsilon <= EPSILON["float64"]

    def tolerance(self, expected: NDArray[np.float64], *, gradient: bool) -> float:
        """Return how far an element may be from what is wanted."""
        largest = magnitude(expected)
        size = max(largest, self.size) if gradient else max(largest, self.epsilon)
        return self.of_sums * size

    @property
    def of_sums(self) -> float:
        """How far an element may be off, relative to the size of its terms."""
        return rounding_of_sums(self.epsilon, self.terms)


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a tensor that are not a product of index ranges, as a stand-in for a `Region`.

    Attributes:
        numbers: Their numbers, counted row-major from 0, in memory order.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, ...]

    def is_within(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of `shape` has all of these elements."""
        return max(self.numbers, default=-1) < math.prod(shape)

    def flat_ids(self, _shape: Sequence[int]) -> NDArray[np.int64]:
        """Return the numbers, in the local shape."""
        return np.array(self.numbers, np.int64).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class Sides:
    """One tensor on every rank, and what each rank should hold of it.

    Attributes:
        role: What it is in a step: `grad`, `output`, `scalar`, `param`, `optim` or `buffer`.
        claimed: What is claimed of it; None if it is plain.
        wanted: The whole values, flattened as regions count.
        values: What each rank holds.
        noise: How far rounding alone was seen to take an element; 0 if that was not tried.
        typical: The root of the mean square of how far it took all elements; 0 if `noise` is what right steps were
            seen to have, as nothing was measured in this one.
    """

    name: str
    role: str
    mesh: Mesh
    claimed: Layout | None
    wanted: Values
    values: Mapping[int, Values]
    regions: Mapping[int, Region | Elements]
    rounding: Rounding
    noise: float = 0.0
    typical: float = 0.0

    @cached_property
    def tolerance(self) -> float:
        """How far an element may be from what is wanted."""
        allowed = self.rounding.tolerance(self.wanted, gradient=self.role == "grad")
        if not self.noise:
            return allowed
        few = max(1.0, math.sqrt(MANY / max(self.wanted.size, 1)))  # the largest of few says less of all that may be
        if self.rounding.is_double:
            return above_noise(few * self.noise, allowed)
        least = self.rounding.epsilon * magnitude(self.wanted)
        return above_noise(few * self.noise, least, allowed if self.noise <= allowed else math.inf)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have it, after the reductions that are pending."""
        return tuple(self.reduced)

    def held_of(self, rank: int) -> Values:
        """Return what a rank holds after the reductions that its placements say are pending."""
        return self.reduced[rank]

    def wanted_of(self, rank: int) -> Values:
        """Return what a rank should hold."""
        return self.part(self.wanted, rank)

    def part(self, whole: NDArray[Any], rank: int) -> NDArray[Any]:
        """Return a rank's part of a whole tensor with this tensor's shape; often a read-only view."""
        region = self.regions[rank]
        if isinstance(region, Region):
            return part_of(whole.reshape(self.wanted.shape), region)
        return whole.ravel()[region.flat_ids(self.wanted.shape)]

    def is_right(self, rank: int, values: Values) -> bool:
        """Whether values are what a rank should hold, except for rounding."""
        expected = self.wanted_of(rank)
        if self.near(values, expected):
            return self._is_typical(values, expected)
        has_kinks = self.role == "grad" and self.noise > 0 and not self.typical and not self.rounding.is_double
        return has_kinks and is_near_but_for_kinks(np.abs(values - expected), self.tolerance, expected)

    def _is_typical(self, values: Values, expected: Values) -> bool:
        """Whether values are no farther from those wanted on the whole than rounding takes them."""
        if not self.typical or values.size < MANY or self.rounding.is_double:
            return True
        allowed = max(TYPICAL * self.typical, self.rounding.epsilon / 4 * root_mean_square(expected))
        return root_mean_square(values - expected) <= allowed

    def near(self, actual: Values, expected: Values, scale: float = 1.0) -> bool:
        """Whether two arrays are equal except for rounding; NaN is near to nothing."""
        with np.errstate(invalid="ignore"):  # the difference of two infinities
            return bool(np.all(np.abs(actual - expected) <= self.tolerance * max(1.0, scale)))

    @cached_property
    def reduced(self) -> Mapping[int, Values]:
        """What each rank holds after the reductions that its placements say are pending."""
        values: Mapping[int, Values] = self.values
        for axis, op in self.claimed_partial:
            values = self.over((axis,), op, values)
        return values

    @property
    def claimed_partial(self) -> tuple[tuple[str, str], ...]:
        """The axes over which a reduction is pending as placements say, and its operation."""
        return self.claimed.partial if self.claimed is not None else ()

    def over(self, axes: Iterable[str], op: str, values: Mapping[int, Values] | None = None) -> Mapping[int, Values]:
        """Reduce values (default: those held) over axes; incomplete groups have no result."""
        values = self.reduced if values is None else values
        for axis in axes:
            values = over(axis, op, values, self.mesh)
        return values

    @cached_property
    def related(self) -> Related | None:
        """What each rank holds of the values wanted; None if it is too large."""
        num_elements = sum(values.size for values in self.values.values())
        if num_elements > MAX_RELATED.get(self.role, 0):
            return None
        is_whole = all(region == Region.whole(self.wanted.shape) for region in self.regions.values())
        layout = self.claimed or (Layout.replicated(self.mesh, self.wanted.shape) if is_whole else None)
        bound = Bound.of_elements(self.tolerance, root_mean_square(self.wanted))
        return relation_of(Pair(self.wanted, self.values, layout, self.mesh, bound))

    def held_by(self, rank: int) -> tuple[Region, Chain] | None:
        """Return the part of the expected values that a rank holds, with its changes; or None.

        A sum that is pending is a change if it is not claimed, and so is one that is claimed and not pending.
        """
        chain = self._chains.get(rank)
        located = next((link for link in chain or () if isinstance(link, Located)), None)
        if chain is None or located is None:
            return None
        source = next((link.source_of(rank) for link in chain if isinstance(link, Reassigned)), rank)
        claimed = {Pending(*partial) for partial in self.claimed_partial}
        pending = claimed ^ {link for link in chain if isinstance(link, Pending)}
        other_links = (link for link in chain if not isinstance(link, (Located, Reassigned, Pending)))
        links = (*sorted(pending, key=lambda link: link.axis), *other_links)
        return located.layout.region(self.mesh.coord_of(source)), links

    def changes_of(self, rank: int) -> Chain | None:
        """Return the changes of a rank's own part; None if it holds another, or unexplained values."""
        chain, held = self._chains.get(rank), self.held_by(rank)
        if held is None:
            return chain  # filled with one number
        return held[1] if held[0] == self.regions[rank] else None

    @cached_property
    def _chains(self) -> Mapping[int, Chain | None]:
        groups = self.related.groups if self.related is not None else ()
        return {rank: group.chain for group in groups for rank in group.ranks}

    @cached_property
    def wrong(self) -> tuple[int, ...]:
        """The ranks that are off."""
        return tuple(rank for rank, values in self.reduced.items() if not self.is_right(rank, values))

    @cached_property
    def is_lost(self) -> bool:
        """Whether what is wanted is so small that rounding alone could make it."""
        return 0.0 < magnitude(self.wanted) <= self.tolerance

    @cached_property
    def farthest(self) -> float:
        """How far the element that is farthest off on any rank is from what it should be."""
        return max((farthest(held, self.wanted_of(rank)) for rank, held in self.reduced.items()), default=0.0)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same part, a group a part."""
        groups = ranks_by((rank, self.regions[rank]) for rank in sorted(self.reduced))
        return tuple(map(tuple, groups.values()))

    def is_split(self, axis: str) -> bool:
        """Whether ranks along an axis hold different parts."""
        groups = self.mesh.groups(axis) if axis in self.mesh.axes else []
        return any(len({self.regions[rank] for rank in group if rank in self.regions}) > 1 for group in groups)

    def has_group(self, axis: str) -> bool:
        """Whether all ranks of some group along an axis have the tensor."""
        groups = self.mesh.groups(axis) if axis in self.mesh.axes else []
        return any(all(rank in self.reduced for rank in group) for group in groups)

    @cached_property
    def copies_differ_along(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same part with different values."""
        return tuple(axis for axis in self.mesh.axes if any(map(self._differs, self.mesh.groups(axis))))

    def _differs(self, group: tuple[int, ...]) -> bool:
        present = [rank for rank in group if rank in self.reduced]
        return any(
            self.regions[low] == self.regions[high] and not self.are_equal(self.reduced[low], self.reduced[high])
            for low, high in pairwise(present)
        )

    @property
    def pairs_of_copies(self) -> list[tuple[int, int, float]]:
        """Pairs of replicas, each with the first one, and how far they differ."""
        return self.neighbors_apart((ranks[0], rank) for ranks in self.holders for rank in ranks[1:])

    def neighbors_apart(self, groups: Iterable[Sequence[int]]) -> list[tuple[int, int, float]]:
        """Return neighboring ranks that should have equal copies, and how far their copies differ."""
        held = self.reduced
        pairs = (pair for group in groups for pair in pairwise(rank for rank in group if rank in held))
        alike = (pair for pair in pairs if self.regions[pair[0]] == self.regions[pair[1]])
        return [(low, high, farthest(held[low], held[high])) for low, high in alike]

    def are_equal(self, left: Values, right: Values) -> bool:
        """Whether two ranks' copies are equal except for rounding."""
        return np.array_equal(left, right, equal_nan=True) or self.near(left, right)
