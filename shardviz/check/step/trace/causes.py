"""Why a step first goes wrong where it does, from the values there: the rules for results, applied to an activation.

Which part of the unsharded model's values a rank should have is what it has in another layer, or else any split over
the mesh that gives its shape.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from shardviz.check.step.compared import Compared, Rounding
from shardviz.check.step.forward.sums import check_sum_beside_a_vector
from shardviz.check.step.rules.gradients import check_unreduced
from shardviz.check.step.rules.order import check_order
from shardviz.check.step.rules.related import check_related
from shardviz.check.step.rules.terms import added_too_often, mixed_shards
from shardviz.check.step.trace.added import check_added
from shardviz.check.step.trace.scale import check_times
from shardviz.check.step.trace.slices import check_own_statistics
from shardviz.check.step.trace.weights import check_order_of_weights
from shardviz.dump.records.trace import of_point
from shardviz.errors import ShardvizError
from shardviz.explain.forward import JoinedOutOfOrder
from shardviz.layout.layout import Layout
from shardviz.layout.notation import parse
from shardviz.layout.placements import Placement, Replicate, Shard
from shardviz.relate.tolerance import NOISE, POINT_EPSILON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.calls import Calls
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records.base import Role
    from shardviz.explain.finding import Finding

MAX_CANDIDATES = 1 << 10
"""A tensor that could be split over the mesh in more ways than this is not looked at."""


def cause_of(evidence: Evidence, calls: Calls, found: Divergence) -> Finding | None:
    """Return what a rule says of the first wrong values; None where none explains them."""
    for one in compared_at(evidence, calls, found):
        if one.incomparable or not one.wrong:
            continue
        explained = (
            check_unreduced(one)
            or check_times(evidence, one, found)
            or added_too_often(evidence.dump, one)
            or check_order(one)
            or mixed_shards(one)
            or _beside_a_vector(evidence, one)
            or check_own_statistics(one)
            or check_related(one)
        )
        if explained is not None:
            return explained
    return check_added(evidence, found) or check_order_of_weights(evidence, found) or _given_out_of_order(found)


def _given_out_of_order(first: Divergence) -> Finding | None:
    """Return the finding if a linear layer goes wrong that is given its features in another order.

    Tokens in another order come out of it in that order; features meet the wrong columns of its weight.
    """
    call = first.call
    is_linear = call.type == "Linear" and call.state("input") == "moved"
    if not is_linear or (first.direction, first.way) != ("forward", "within"):
        return None
    ranks = tuple(sorted({rank for rank, _ in call.tensors("input", "moved")}))
    sentence = f"the features of {call.module}'s input are in a different order than those of its weight"
    return JoinedOutOfOrder().finding(call.module, ranks, sentence)


def _beside_a_vector(evidence: Evidence, one: Compared) -> Finding | None:
    reason = check_sum_beside_a_vector(evidence, one) if one.role == "output" and one.wanted.ndim else None
    return reason.finding(one, f"the output is not {one.whose}") if reason is not None else None


def compared_at(evidence: Evidence, calls: Calls, found: Divergence) -> Iterator[Compared]:
    """Yield the first wrong values beside the unsharded model's, once for each layout that they may have."""
    point = found.point
    if point is None:
        return
    dump, name = evidence.dump, of_point(point.module, point.what, point.call, point.index)
    tensor, reference = dump.find("step", "activation", name), dump.find("reference", "activation", name)
    if tensor is None or reference is None:
        return
    wanted = dump.values(reference.first, name)
    rounding, noise = _rounding(evidence), point.near / NOISE / (abs(point.scale) or 1.0)
    role: Role = "grad" if point.what.startswith("gradient") else "output"
    values = {rank: dump.values(shard, name) for rank, shard in tensor.shards.items()}
    for layout in _layouts(dump, calls, found, tensor, wanted.shape):
        regions = {rank: layout.region(layout.mesh.coord_of(rank)) for rank in values}
        yield Compared(point.module, role, layout.mesh, layout, wanted, values, regions, rounding, noise=noise)


def _rounding(evidence: Evidence) -> Rounding:
    of_step = evidence.activations.rounding
    return Rounding(min(of_step.epsilon, POINT_EPSILON), of_step.terms, 0.0)


def _layouts(dump: Dump, calls: Calls, found: Divergence, tensor: Tensor, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Yield the layouts that give every rank the shape it has, first what other layers have there."""
    mesh = dump.files.mesh
    local = {rank: shard.body.local_shape for rank, shard in tensor.shards.items()}
    seen: list[Layout] = []
    for layout in (*_of_others(dump, calls, found, shape), *_candidates(dump, shape)):
        fits = all(rank in mesh and layout.region(mesh.coord_of(rank)).shape == local[rank] for rank in local)
        if fits and not layout.partial and layout not in seen:
            seen.append(layout)
            yield layout


def _of_others(dump: Dump, calls: Calls, found: Divergence, shape: tuple[int, ...]) -> Iterator[Layout]:
    point = found.point
    own = next(
        (one for one in calls.in_order if point and (one.module, one.number) == (point.module, point.call)), None
    )
    for other in calls.alike(own) if own is not None and point is not None else ():
        right = other.point(point.what, "right")  # type: ignore[union-attr]
        if right is not None and right.layout:
            try:
                yield parse(right.layout).layout(dump.files.mesh, shape)
            except ShardvizError:
                continue


def _candidates(dump: Dump, shape: tuple[int, ...]) -> Iterator[Layout]:
    mesh = dump.files.mesh
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    if len(kinds) ** mesh.ndim > MAX_CANDIDATES:
        return
    for placements in sorted(
        product(kinds, repeat=mesh.ndim), key=lambda all_: sum(isinstance(x, Shard) for x in all_)
    ):
        yield Layout.from_placements(mesh, shape, placements)
