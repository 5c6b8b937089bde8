"""One tensor after a step beside the same tensor of the unsharded model's step.

How far two right results may be apart, `relate.tolerance` says: every element is a sum of up to n products, rounded at
each step, and in the end to the coarsest dtype that took part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.order.rules.intent import order_of
from shardviz.layout.layout import Layout
from shardviz.layout.region import Region
from shardviz.relate.pair import Pair
from shardviz.relate.relations import Located, Pending, Reassigned
from shardviz.relate.search import relation_of
from shardviz.relate.sums import REDUCTIONS, over
from shardviz.relate.tolerance import EPSILON, MANY, TYPICAL, Bound, above_noise, rounding_of_sums
from shardviz.relate.values import farthest, padded_to, part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh
    from shardviz.relate.pair import Related
    from shardviz.relate.relations import Chain


MAX_RELATED = {"grad": 1 << 16, "output": 1 << 20, "scalar": 0}
"""Elements of all ranks together up to which a result is related to what is wanted: gradients are many."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a model's step allows for rounding.

    Attributes:
        epsilon: The relative precision of the coarsest dtype in the step.
        terms: The longest sum in the step: elements of its largest tensor.
        size: The largest gradient of the reference, at least; gradients that cancel are made of terms of that size.
    """

    epsilon: float
    terms: int
    size: float

    def tolerance(self, wanted: NDArray[np.float64], *, gradient: bool) -> float:
        """Return how far an element may be from what is wanted."""
        own = float(np.max(np.abs(wanted), initial=0.0))
        size = max(own, self.size) if gradient else max(own, self.epsilon)
        return rounding_of_sums(self.epsilon, self.terms) * size


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a tensor that are not a product of index ranges, as a stand-in for a `Region`.

    Attributes:
        numbers: Their numbers, counted row-major from 0, in memory order.
        shape: The local shape.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, ...]

    def is_within(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of `shape` has all of these elements."""
        return max(self.numbers, default=-1) < math.prod(shape)

    def flat_ids(self, _shape: Sequence[int]) -> NDArray[np.int64]:
        """Return the numbers, in the local shape."""
        return np.array(self.numbers, np.int64).reshape(self.shape)


@dataclass(frozen=True)
class Compared:
    """One tensor after a step, on every rank, and its reference.

    Attributes:
        name: The tensor's name.
        role: `grad`, `output` or `scalar`.
        mesh: The mesh on which its ranks stand.
        claimed: What is claimed of it; None if it is plain.
        wanted: The unsharded model's values, flattened as regions count.
        values: What each rank holds.
        regions: The part of the tensor that each rank holds.
        rounding: What the step allows for rounding.
        whose: What findings call the wanted values.
        noise: How far rounding alone was seen to take an element; 0 if that was not tried.
        typical: The root of the mean square of how far it took all elements.
        is_assumed: Whether nothing claims the layout, which is the one that a plain output should have.
        padded: A dim that is padded so that all its parts are of one size, and that size; None if there is none.
    """

    name: str
    role: Role
    mesh: Mesh
    claimed: Layout | None
    wanted: NDArray[np.float64]
    values: Mapping[int, NDArray[np.float64]]
    regions: Mapping[int, Region | Elements]
    rounding: Rounding
    whose: str = "the unsharded model's"
    noise: float = 0.0
    typical: float = 0.0
    is_assumed: bool = False
    padded: tuple[int, int] | None = None

    @cached_property
    def tolerance(self) -> float:
        """How far an element may be from what is wanted."""
        allowed = self.rounding.tolerance(self.wanted, gradient=self.role == "grad")
        if not self.noise:
            return allowed
        least = self.rounding.epsilon * float(np.max(np.abs(self.wanted), initial=0.0))
        few = max(1.0, math.sqrt(MANY / max(self.wanted.size, 1)))  # the largest of few says less of all that may be
        return above_noise(few * self.noise, least, allowed)

    @cached_property
    def incomparable(self) -> str:
        """Why it cannot be compared with its reference; empty if it can."""
        if self.claimed is not None and not self.claimed.flat and self.claimed.shape != self.wanted.shape:
            return f"it is {list(self.claimed.shape)} over all ranks, the unsharded model has {list(self.wanted.shape)}"
        for rank, values in self.values.items():
            if values.shape != self.regions[rank].shape:
                return f"rank {rank} has {list(values.shape)}, and it is not known which part of the tensor that is"
            if not self.regions[rank].is_within(self.wanted.shape):
                whole = list(self.wanted.shape)
                return f"rank {rank} claims a part that lies outside {whole}, the unsharded model's shape"
        if num_odd := int(np.count_nonzero(~np.isfinite(self.wanted))):
            return f"{num_odd:,} of {self.wanted.size:,} elements of {self.whose} are NaN or infinite"
        unknown = [op for _, op in self.claimed.partial if op not in REDUCTIONS] if self.claimed else []
        return f"shardviz cannot make up for a pending {unknown[0]}" if unknown else ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have it, after the reductions that are pending."""
        return tuple(self.reduced)

    def held_of(self, rank: int) -> NDArray[np.float64]:
        """Return what a rank holds after the reductions that its placements say are pending."""
        return self.reduced[rank]

    def wanted_of(self, rank: int) -> NDArray[np.float64]:
        """Return what a rank should hold."""
        return self.part(self.wanted, rank)

    def part(self, whole: NDArray[Any], rank: int) -> NDArray[Any]:
        """Return a rank's part of a whole tensor with as many elements as this one; often a read-only view."""
        region = self.regions[rank]
        if isinstance(region, Region):
            return part_of(whole.reshape(self.wanted.shape), region)
        return whole.ravel()[region.flat_ids(self.wanted.shape)]

    def is_right(self, rank: int, values: NDArray[np.float64]) -> bool:
        """Whether values are what a rank should hold, except for rounding."""
        wanted = self.wanted_of(rank)
        return self.near(values, wanted) and self._is_typical(values, wanted)

    def _is_typical(self, values: NDArray[np.float64], wanted: NDArray[np.float64]) -> bool:
        """Whether values are no farther from those wanted on the whole than rounding takes them."""
        if not self.typical or values.size < MANY:
            return True
        allowed = max(TYPICAL * self.typical, self.rounding.epsilon / 4 * _root(wanted))
        return _root(values - wanted) <= allowed

    def near(self, left: NDArray[np.float64], right: NDArray[np.float64], scale: float = 1.0) -> bool:
        """Whether two arrays are equal except for rounding; NaN is near to nothing."""
        with np.errstate(invalid="ignore"):  # the difference of two infinities
            return bool(np.all(np.abs(left - right) <= self.tolerance * max(1.0, scale)))

    @cached_property
    def reduced(self) -> Mapping[int, NDArray[np.float64]]:
        """What each rank holds after the reductions that its placements say are pending."""
        values: Mapping[int, NDArray[np.float64]] = self.values
        for axis, op in self.claimed.partial if self.claimed else ():
            values = self.over(axis, op, values)
        return values

    def over(self, axis: str, op: str, values: Mapping[int, NDArray[np.float64]]) -> dict[int, NDArray[np.float64]]:
        """Reduce values over an axis; a group with a rank missing has no result."""
        return over(axis, op, values, self.mesh)

    @cached_property
    def related(self) -> Related | None:
        """What each rank holds of the values wanted; None if it is too large or cannot be compared with them."""
        num_elements = sum(values.size for values in self.values.values())
        if self.incomparable or num_elements > MAX_RELATED.get(self.role, 0):
            return None
        is_whole = all(region == Region.whole(self.wanted.shape) for region in self.regions.values())
        whole = Layout(self.mesh, self.wanted.shape, ((),) * self.wanted.ndim)
        layout = self.claimed or (whole if is_whole else None)
        bound = Bound.of_elements(self.tolerance, _root(self.wanted))
        return relation_of(Pair(self.wanted, self.values, layout, self.mesh, bound))

    def held_by(self, rank: int) -> tuple[Region, Chain] | None:
        """Return which part of the values wanted a rank holds, and what is changed; None if it holds no part.

        A sum that is pending is a change if it is not claimed, and so is one that is claimed and not pending.
        """
        chain = self._chains.get(rank)
        located = next((link for link in chain or () if isinstance(link, Located)), None)
        if chain is None or located is None:
            return None
        source = next((link.source_of(rank) for link in chain if isinstance(link, Reassigned)), rank)
        claimed = {Pending(*partial) for partial in self.claimed.partial} if self.claimed is not None else set()
        pending = claimed ^ {link for link in chain if isinstance(link, Pending)}
        others = (link for link in chain if not isinstance(link, (Located, Reassigned, Pending)))
        links = (*sorted(pending, key=lambda link: link.axis), *others)
        return located.layout.region(self.mesh.coord_of(source)), links

    def changes_of(self, rank: int) -> Chain | None:
        """Return what is changed in a rank's own part; None if it holds another one, or nothing explains it."""
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

    @property
    def is_told_right(self) -> bool:
        """Whether what every rank holds was compared and is right, and zeros would not be."""
        return (
            not self.incomparable and self.reduced.keys() == self.values.keys() and not self.wrong and not self.is_lost
        )

    @cached_property
    def is_lost(self) -> bool:
        """Whether what is wanted is so small that rounding alone could make it."""
        return 0.0 < float(np.max(np.abs(self.wanted), initial=0.0)) <= self.tolerance

    @cached_property
    def copies_differ_along(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same part with different values."""
        return tuple(axis for axis in self.mesh.axes if any(map(self._differs, self.mesh.groups(axis))))

    def _differs(self, group: tuple[int, ...]) -> bool:
        present = [rank for rank in group if rank in self.reduced]
        return any(
            self.regions[one] == self.regions[other] and not self._equal(self.reduced[one], self.reduced[other])
            for one, other in pairwise(present)
        )

    def neighbors_apart(self, groups: Iterable[Sequence[int]]) -> list[tuple[int, int, float]]:
        """Return neighbors within groups of ranks that have copies of one part, and how far apart they are."""
        held = self.reduced
        pairs = (pair for group in groups for pair in pairwise(rank for rank in group if rank in held))
        alike = (pair for pair in pairs if self.regions[pair[0]] == self.regions[pair[1]])
        return [(low, high, farthest(held[low], held[high])) for low, high in alike]

    def _equal(self, left: NDArray[np.float64], right: NDArray[np.float64]) -> bool:
        return np.array_equal(left, right, equal_nan=True) or self.near(left, right)


def ranks_by_part(result: Compared) -> list[tuple[int, ...]]:
    """Return the ranks that hold the same part of a tensor, a group a part."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(result.reduced):
        groups.setdefault(result.regions[rank], []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def compared(dump: Dump) -> Iterator[Compared]:
    """Yield every tensor of the step that the unsharded model's step has too, with the same shape."""
    rounding = rounding_of(dump)
    for tensor in dump.at("step"):
        for name in tensor.names:
            reference = dump.find("reference", tensor.role, name)
            if reference is not None and tensor.role in ("grad", "output", "scalar"):
                wanted = dump.values(reference.first, name)
                yield laid_out(dump, tensor, name, wanted, rounding)


def rounding_of(dump: Dump) -> Rounding:
    """Return what the step allows for rounding, from the tensors that took part in it."""
    dtypes = {shard.body.dtype for tensor in dump.at("step") for shard in tensor.shards.values()}
    dtypes |= {dtype for record in dump.files.ranks.values() for dtype in record.narrowed_to}
    epsilon = max((EPSILON.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    whole = [tensor for tensor in dump.at("reference") if tensor.role != "activation"]
    terms = max((math.prod(tensor.shape) for tensor in whole), default=1)
    gradients = [
        _largest(dump.values(tensor.first, name)) for tensor in whole for name in tensor.names if tensor.role == "grad"
    ]
    return Rounding(epsilon, max(terms, 1), max(gradients, default=0.0))


def _largest(values: NDArray[np.float64]) -> float:
    """Return the size of the largest finite number: NaN in one gradient says nothing of how others are rounded."""
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def laid_out(dump: Dump, tensor: Tensor, name: str, wanted: NDArray[np.float64], rounding: Rounding) -> Compared:
    """Pair what every rank holds of a tensor with the values that are wanted."""
    claimed, wanted = tensor.claimed, in_order(dump, tensor.role, name, wanted)
    if claimed is not None and not claimed.flat and tensor.role != "output":
        wanted = padded_to(wanted, claimed.shape)  # nothing reads padding: its gradient is zero, too
    if claimed is not None and claimed.flat:
        wanted = wanted.ravel()
    values, regions = {}, {}
    for rank, shard in tensor.shards.items():
        values[rank] = dump.values(shard, name)
        regions[rank] = _region(dump, shard, name, wanted.shape)
    mesh = claimed.mesh if claimed else dump.files.mesh
    noise = dump.noises.get((tensor.role, name))
    largest, typical = (noise.largest, noise.typical) if noise is not None else (0.0, 0.0)
    return Compared(
        name,
        tensor.role,
        mesh,
        claimed,
        wanted,
        values,
        regions,
        rounding,
        noise=largest,
        typical=typical,
        is_assumed=all(shard.body.assumed for shard in tensor.shards.values()),
    )


def _root(values: NDArray[np.float64]) -> float:
    return math.sqrt(float(np.mean(values * values))) if values.size else 0.0


def in_order(dump: Dump, role: str, name: str, whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the unsharded model's values of a weight, its gradient or state, as its dim is meant to be ordered."""
    weight = name.rpartition(".")[0] if role == "optim" else name
    order = order_of(dump, weight) if role in ("grad", "param", "optim") else None
    stamp = dump.stamps.get(weight)
    if order is None or stamp is None or whole.shape != stamp.shape:
        return whole
    return order.of(whole).astype(np.float64)


def _region(dump: Dump, shard: Shard, name: str, shape: tuple[int, ...]) -> Region | Elements:
    """Return the part that a rank holds: what is claimed of it, or what its parameter was seen to hold."""
    if shard.layout is not None:
        return shard.layout.region(shard.layout.mesh.coord_of(shard.rank))
    stamped = dump.find("stamped", "param", name) or dump.find("stamped", "buffer", name)
    if shard.body.local_shape != shape and stamped is not None and shard.rank in stamped.shards:
        ids = stamped.shards[shard.rank]
        if ids.held is not None and ids.held.shape == shard.body.local_shape:
            return ids.held
        if ids.body.runs is not None and ids.body.local_shape == shard.body.local_shape:
            numbers = dump.local_ids(ids, name) - 1
            if numbers.min(initial=0) >= 0:
                return Elements(tuple(numbers.ravel().tolist()), shard.body.local_shape)
    return Region.whole(shape)
