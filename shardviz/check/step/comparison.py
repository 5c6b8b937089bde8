"""One tensor after a step, compared with the unsharded model's, and words for that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from shardviz.check.order.rules.intent import order_of
from shardviz.dump.records.step import Wrapper, WrapperRecord
from shardviz.dump.records.trace import COMPARED_OVER_PARTS, is_value
from shardviz.explain.templates import number as number
from shardviz.layout.notation import write
from shardviz.layout.region import Region
from shardviz.relate.factors import REDUCTIONS
from shardviz.relate.sides import Elements, Rounding, Sides
from shardviz.relate.tolerance import EPSILON, NOISE
from shardviz.relate.values import finite_magnitude, padded_to
from shardviz.text import spans_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.dump.records.base import Moment, Role
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.relate.relations import Related

    Wrapped = Wrapper | Literal["", "none", "alone", "unused"]
    Found = tuple["Compared", Finding]
    """A result that is wrong, with the finding about it."""


def apart_text(low: int, high: int, worst: float) -> str:
    """Return the clause that says how far the copies of two ranks are apart."""
    if math.isinf(worst):
        return f"one of rank {low} and rank {high} has NaN or infinity, and the other has a different value"
    return f"rank {low} and rank {high} differ by up to {number(worst)}"


MAX_SPANS = 4


def spans(places: Iterable[int]) -> str:
    """Name indices in their order as ranges: `0:6+18:24`."""
    named = [f"{start}:{stop}" if stop > start + 1 else f"{start}" for start, stop in spans_of(map(int, places))]
    return "+".join(named[:MAX_SPANS]) + ("+..." if len(named) > MAX_SPANS else "")


def kind_of(finding: Finding) -> str:
    """Return the kind of a finding, with its tensor: `wrong-scale: layers.0.up.weight`."""
    return f"{finding.kind}: {finding.tensor}" if finding.tensor else finding.kind


WHAT = {"grad": "gradient", "output": "output", "scalar": "value"}
"""What a step computes, as sentences call it."""


@dataclass(frozen=True, kw_only=True)
class Compared(Sides):
    """One tensor after a step, on every rank, and its reference.

    Attributes:
        whose: What findings call the wanted values.
        is_assumed: Whether nothing claims the layout, which is the one that a plain output should have.
        padded: A dim that is padded so that all its parts are of one size, and that size; None if there is none.
        rows: The batch's rows of an output's first two micro-batches, if they aren't runs of rows; then `values` are
            in the batch's order.
        wrappers: What reduces its gradient by itself on the first rank, by kind; None if not known.
        other_divisors: By what FSDP divides other gradients that it reduces over the same ranks.
        is_given: Whether it is what a module was given, and not what it returned.
    """

    role: Role
    whose: str = "the unsharded model's"
    is_assumed: bool = False
    padded: tuple[int, int] | None = None
    rows: tuple[tuple[int, ...], ...] = ()
    wrappers: Mapping[str, WrapperRecord] | None = None
    other_divisors: frozenset[float] = frozenset()
    is_given: bool = False

    def wrapped_over(self, axes: Sequence[str]) -> Wrapped:
        """Return the wrapper that reduces its gradient along some axes; empty if unknown."""
        return wrapped_over(self.wrappers, self.mesh, min(self.values), axes)

    @property
    def sharding(self) -> WrapperRecord | None:
        """What was seen to reduce its gradient to shards: FSDP, or DeepSpeed's engine."""
        wrappers = self.wrappers or {}
        return wrappers.get("fsdp") or wrappers.get("zero")

    @property
    def divides_by(self) -> float | None:
        """By what FSDP or DDP divides its gradient; None if neither reduces it, or that is not known."""
        copying = (self.wrappers or {}).get("ddp")
        if self.sharding is not None:
            return self.sharding.divides_by
        return float(len(copying.ranks)) if copying is not None else None

    @property
    def is_dtensor(self) -> bool:
        """Whether it is known to be a DTensor, as all that FSDP2 shards."""
        fsdp = (self.wrappers or {}).get("fsdp")
        return fsdp is not None and self.claimed is not None and not self.claimed.flat

    @property
    def is_averaged_by_fsdp(self) -> bool:
        """Whether FSDP, or DeepSpeed's engine, was seen to divide the sum of its gradients by their number."""
        return self.sharding is not None and self.sharding.divides_by == len(self.sharding.ranks)

    @property
    def what(self) -> str:
        """Its role, as sentences call it."""
        return "input" if self.is_given else WHAT[self.role]

    def finding(self, cause: Cause, sentence: str, ranks: tuple[int, ...] | None = None, **others: Any) -> Finding:
        """Return the finding that has a cause; if no ranks are given, about the wrong ones."""
        claimed = write(self.claimed, equal=True) if self.claimed else ""
        return cause.finding(self.name, self.wrong if ranks is None else ranks, sentence, claimed=claimed, **others)

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

    @cached_property
    def related(self) -> Related | None:
        """Relations of each rank's values to the expected ones; None if too large or incomparable."""
        return None if self.incomparable else super().related

    @property
    def is_told_right(self) -> bool:
        """Whether what every rank holds was compared and is right, and zeros would not be."""
        is_compared = not self.incomparable and self.reduced.keys() == self.values.keys()
        return is_compared and not self.wrong and not self.is_lost

    def is_held(self, values: Mapping[int, NDArray[np.float64]]) -> bool:
        """Whether every rank holds such values, as far as rounding allows."""
        has_all = values.keys() == self.reduced.keys()
        return has_all and all(self.near(held, values[rank]) for rank, held in self.reduced.items())


def compared(
    dump: Dump, roles: Sequence[str] = tuple(WHAT), *, at: Moment = "step", reference: Moment = "reference"
) -> Iterator[Compared]:
    """Yield every tensor of some roles, and of a moment, that the unsharded model has too."""
    rounding = rounding_of(dump)
    for tensor in dump.at(at):
        for name in tensor.names if tensor.role in roles else ():
            if (whole := whole_of(dump, tensor.role, name, reference)) is not None:
                yield laid_out(dump, tensor, name, whole, rounding)


def rounding_of(dump: Dump) -> Rounding:
    """Return what the step allows for rounding, from the tensors that took part in it.

    What was recorded when it ran again, line by line, allows no more: ranks note what was rounded.
    """
    tensors = (tensor for tensor in dump.at("step") if not all(map(is_value, tensor.names)))
    dtypes = {shard.body.dtype for tensor in tensors for shard in tensor.shards.values()}
    dtypes |= {dtype for record in dump.files.ranks.values() for dtype in record.narrowed_to}
    epsilon = max((EPSILON.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    whole = [tensor for tensor in dump.at("reference") if tensor.role != "activation"]
    terms = max((math.prod(tensor.shape) for tensor in whole), default=1)
    of_grads = [(tensor, name) for tensor in whole for name in tensor.names if tensor.role == "grad"]
    gradients = [finite_magnitude(dump.values(tensor.first, name)) for tensor, name in of_grads]
    rounding = Rounding(epsilon, max(terms, 1), max(gradients, default=0.0))
    noise = max((record.largest for (role, _), record in dump.noises.items() if role == "grad"), default=0.0)
    return replace(rounding, size=max(rounding.size, NOISE * noise / (rounding.of_sums or 1.0)))


def whole_of(dump: Dump, role: str, name: str, moment: Moment = "reference") -> NDArray[np.float64] | None:
    """Return the unsharded model's values of a tensor; None if the dump has none of that moment."""
    tensor = dump.find(moment, role, name)
    return None if tensor is None else dump.values(tensor.first, name)


def laid_out(dump: Dump, tensor: Tensor, name: str, expected: NDArray[np.float64], rounding: Rounding) -> Compared:
    """Pair what every rank holds of a tensor with the values that are wanted."""
    claimed, expected = tensor.claimed, in_order(dump, tensor.role, name, expected)
    if claimed is not None and not claimed.flat and tensor.role != "output":
        expected = padded_to(expected, claimed.shape)  # nothing reads padding: its gradient is zero, too
    if claimed is not None and claimed.flat:
        expected = expected.ravel()
    values, regions = {}, {}
    weight = weight_of(tensor.role, name)
    for rank, shard in tensor.shards.items():
        held, region = dump.values(shard, name), _region(dump, shard, weight, expected.shape)
        is_cut = isinstance(region, Elements) and len(region.shape) == held.ndim
        values[rank] = held[tuple(map(slice, region.shape))] if is_cut else held
        regions[rank] = region
    mesh = claimed.mesh if claimed else dump.files.mesh
    noise = dump.noises.get((tensor.role, name))
    largest, typical = (noise.largest, noise.typical) if noise is not None else (0.0, 0.0)
    wrappers = wrappers_of(dump, min(tensor.shards), name) if tensor.role == "grad" else None
    pair = Compared(
        name=name,
        role=tensor.role,
        mesh=mesh,
        claimed=claimed,
        wanted=expected,
        values=values,
        regions=regions,
        rounding=rounding,
        noise=largest,
        typical=typical,
        is_assumed=all(shard.body.assumed for shard in tensor.shards.values()),
        wrappers=wrappers,
        other_divisors=_other_divisors(dump, min(tensor.shards), (wrappers or {}).get("fsdp")),
    )
    is_masked = tensor.role == "output" and np.isinf(pair.wanted).any()
    return _without_infinities(pair) if is_masked else pair


def _without_infinities(pair: Compared) -> Compared:
    """Return a pair with 0 where both sides have the same infinity, as masked logits do; as it is if they differ."""
    are_parts = all(
        pair.regions[rank].shape == held.shape and pair.regions[rank].is_within(pair.wanted.shape)
        for rank, held in pair.values.items()
    )
    if not are_parts or (pair.claimed is not None and pair.claimed.partial):
        return pair
    for rank, held in pair.values.items():
        due = pair.wanted_of(rank)
        if not np.array_equal(np.where(np.isfinite(held), 0, held), np.where(np.isfinite(due), 0, due)):
            return pair
    values = {rank: np.where(np.isfinite(held), held, 0) for rank, held in pair.values.items()}
    return replace(pair, wanted=np.where(np.isfinite(pair.wanted), pair.wanted, 0), values=values)


def is_of_parts(dump: Dump, what: str = COMPARED_OVER_PARTS) -> bool:
    """Whether a step was compared over parts of the batch: lines are compared with the whole batch's all the same."""
    return any(what in why for record in dump.files.ranks.values() for _, why in record.not_checked)


def wrapped_over(wrappers: Mapping[str, WrapperRecord] | None, mesh: Mesh, rank: int, axes: Sequence[str]) -> Wrapped:
    """Return which of a gradient's wrappers reduces it along some axes; empty if they are unknown."""
    if wrappers is None:
        return ""
    groups = [set(group) for axis in axes for group in mesh.groups(axis) if rank in group]
    candidates = wrappers.items() if groups else ()
    over = [kind for kind, wrapper in candidates if all(group <= {*wrapper.ranks} for group in groups)]
    is_alone = any(len(wrapper.ranks) == 1 for wrapper in wrappers.values())
    return next((kind for kind in get_args(Wrapper) if kind in over), "alone" if is_alone else "none")


def wrappers_of(dump: Dump, rank: int, name: str) -> dict[str, WrapperRecord] | None:
    """Return the wrappers that reduce a parameter's gradient on a rank, by any of its names; None if unrecorded."""
    record = dump.files.ranks.get(rank)
    if record is None or record.wrappers is None:
        return None
    names = {name, *dump.ties.get(name, ())}
    return {wrapper.kind: wrapper for wrapper in record.wrappers if not names.isdisjoint(wrapper.names)}


def _other_divisors(dump: Dump, rank: int, fsdp: WrapperRecord | None) -> frozenset[float]:
    """Return the numbers by which FSDP divides other gradients that it reduces over the same ranks."""
    if fsdp is None:
        return frozenset()
    alike = (wrapper for wrapper in dump.files.ranks[rank].wrappers or () if wrapper.kind == "fsdp")
    divisors = {wrapper.divides_by for wrapper in alike if wrapper.ranks == fsdp.ranks} - {fsdp.divides_by}
    return frozenset(divisor for divisor in divisors if divisor is not None)


def weight_of(role: str, name: str) -> str:
    """Return the weight that a state is of: a wrong state makes a wrong weight, and is the cause of it.

    An average that a job keeps of a weight is called `average of up.weight`.
    """
    return name.rpartition(".")[0] if role == "optim" else name.rpartition(" of ")[2] if role == "buffer" else name


def in_order(dump: Dump, role: str, name: str, whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the unsharded model's values of a weight, its gradient or state, as its dim is meant to be ordered."""
    weight = weight_of(role, name)
    order = order_of(dump, weight) if role in ("grad", "param", "optim") else None
    stamp = dump.stamps.get(weight)
    if order is None or stamp is None or whole.shape != stamp.shape:
        return whole
    return order.of(whole).astype(np.float64)


def _region(dump: Dump, shard: Shard, name: str, shape: tuple[int, ...]) -> Region | Elements:
    """Return the region that a rank holds: as claimed, or where the ids of the weight `name` are."""
    if shard.layout is not None:
        return shard.layout.region_of_rank(shard.rank)
    stamped = dump.find("stamped", "param", name) or dump.find("stamped", "buffer", name)
    if shard.body.local_shape != shape and stamped is not None and shard.rank in stamped.shards:
        ids = stamped.shards[shard.rank]
        if ids.held is not None and ids.held.shape == shard.body.local_shape:
            return ids.held
        if ids.body.runs is not None and ids.body.local_shape == shard.body.local_shape:
            numbers = _without_padding(dump.local_ids(ids, name) - 1)
            if numbers.min(initial=0) >= 0:
                return Elements(tuple(numbers.ravel().tolist()), numbers.shape)
    return Region.whole(shape)


def _without_padding(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the elements of a part that was cut by hand without the zeros at the end of a dim, as padding is."""
    for dim in range(numbers.ndim):
        is_empty = np.all(numbers < 0, axis=tuple(other for other in range(numbers.ndim) if other != dim))
        size = len(is_empty) - int(is_empty.sum())
        if 0 < size < len(is_empty) and is_empty[size:].all():
            return numbers.take(range(size), dim)
    return numbers


@dataclass(frozen=True, slots=True)
class Agreement:
    """A sharded step beside the unsharded model's.

    Attributes:
        loss: The loss of the sharded step over all ranks, or of the first rank that has a wrong one; NaN if it was not
            captured.
        odd_rank: The rank that `loss` is of, if others have the right one.
        loss_wanted: The unsharded model's.
        num_right: How many gradients are the unsharded model's.
        largest_error_of_right: The largest difference of any element of them, on any rank.
        num_wrong: How many gradients are not.
        largest_error_of_wrong: The largest difference of any element of those, on any rank; infinite if one has NaN
            or infinity.
    """

    loss: float
    odd_rank: int | None
    loss_wanted: float
    num_right: int
    largest_error_of_right: float
    num_wrong: int
    largest_error_of_wrong: float


def agreement(dump: Dump) -> Agreement | None:
    """Return how near the step came; None if the dump has none."""
    results = [result for result in compared(dump) if not result.incomparable] if dump.at("reference") else []
    losses = [result for result in results if result.role == "scalar" and result.name == "loss" and result.reduced]
    gradients = [result for result in results if result.role == "grad"]
    if not losses and not gradients:
        return None
    of_rank = {rank: float(value) for rank, value in losses[0].reduced.items()} if losses else {}
    odd = losses[0].wrong if losses else ()
    loss = of_rank[next(iter((*odd, *of_rank)))] if of_rank else math.nan
    odd_rank = odd[0] if 0 < len(odd) < len(of_rank) else None
    reference_loss = float(losses[0].wanted) if losses else math.nan
    right, wrong = ([result for result in gradients if bool(result.wrong) == is_wrong] for is_wrong in (False, True))
    near, far = (max((result.farthest for result in ones), default=0.0) for ones in (right, wrong))
    return Agreement(loss, odd_rank, reference_loss, len(right), near, len(wrong), far)


@dataclass(frozen=True)
class Reason:
    """An explanation of a wrong output, or of what an optimizer made wrong.

    Attributes:
        explanation: The cause, or the likeliest that fits.
        clause: What bears it out, in numbers.
        tensor: The tensor or module at fault; empty if it is the output itself.
        claimed: Where its elements are taken to be, in the notation.
        held: Where they are, in the notation or in words.
        alike: Other tensors with the same fault.
    """

    explanation: Cause
    clause: str
    tensor: str = ""
    claimed: str = ""
    held: str = ""
    alike: tuple[str, ...] = ()

    def of(self, finding: Finding) -> Finding:
        """Return the finding of a wrong output with this reason."""
        named = replace(
            finding,
            kind=self.explanation.kinds[0],
            tensor=self.tensor or finding.tensor,
            details=(*finding.details, self.clause),
            claimed=self.claimed or ("" if self.tensor else finding.claimed),
            held=self.held,
            generic=False,
        )
        named = named.because(self.explanation)
        members = [replace(named, tensor=name) for name in (named.tensor, *self.alike)] if self.alike else []
        return replace(named, members=tuple(members))

    def finding(self, result: Compared, sentence: str) -> Finding:
        """Return the finding that a result is wrong for this reason."""
        return self.of(self.explanation.finding(result.name, result.wrong, sentence))
