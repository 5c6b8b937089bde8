"""Names the difference between a tensor and its reference: a scale, a missing sum, a wrong order or a wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import Case
from shardviz.check.order.rules.places import check_places
from shardviz.check.step.rules.factors import check_scale
from shardviz.check.step.rules.order import check_order
from shardviz.check.step.rules.reductions import check_unreduced
from shardviz.errors import ShardvizError
from shardviz.explain.assertions import (
    AllRanksDiffer,
    FewElementsChanged,
    FewElementsDiffer,
    FewElementsZero,
    OnlyZeros,
    PartAsReference,
    PartWithoutPlacements,
    SomeRanksDiffer,
    UnexplainedDifference,
    UnrelatedShapes,
    WrongLocalShape,
)
from shardviz.layout.ids import region_of
from shardviz.layout.notation import write
from shardviz.layout.region import box_of, index_of
from shardviz.reference.lookup import bits_of, locate
from shardviz.reference.windows import UNPLACED
from shardviz.relate.values import is_alike
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

WEIGHTS = ("param", "buffer", "optim")


Far = Mapping[int, "NDArray[np.bool_]"]
"""The ranks whose values are too far from the reference's, each with the elements that are."""


def explained(dump: Dump, tensor: Tensor, result: Compared, far: Far, tolerance: str) -> list[Finding]:
    """Return the findings with the known cause of a difference, or else with the element that is farthest off.

    Args:
        dump: The dump that the tensor is of.
        tensor: The tensor, or its fold.
        result: The same, compared with its reference.
        far: The ranks whose values are too far from it, and which of them.
        tolerance: The tolerance, as text.
    """
    if placed := misplaced(dump, tensor, result):
        return placed
    is_grad = result.role == "grad"
    alike = replace(result, role="grad" if is_grad else "scalar", whose="the reference's")
    known = _of_step(alike if is_grad else replace(alike, role="output"), result.role) or check_scale(alike)
    return [_value(result, far, tolerance) if known is None else replace(known, ranks=tuple(far))]


def _of_step(result: Compared, role: str) -> Finding | None:
    """Return what the rules of a step say; weights are not computed."""
    return None if role in WEIGHTS else check_unreduced(result) or check_order(result)


def misshapen(tensor: Tensor, name: str, shape: Sequence[int]) -> Finding:
    """Return the finding for a tensor whose shape is not its reference's, with the side that must be wrong."""
    return _of_shapes(tensor, tuple(shape)).finding(
        name,
        tuple(tensor.shards),
        f"its shape is {list(tensor.shape)} ({list(tensor.first.body.local_shape)} on rank {tensor.first.rank}), but "
        f"the reference's is {list(shape)}",
        claimed=write(tensor.claimed) if tensor.claimed else "",
    )


def _of_shapes(tensor: Tensor, shape: tuple[int, ...]) -> Cause:
    """Return the cause of a shape: which side is the other's part, or has local shapes of its own."""
    actual = tensor.shape
    if actual == shape:
        return WrongLocalShape()
    odd = [dim for dim, (one, other) in enumerate(zip(actual, shape, strict=False)) if one != other]
    if len(actual) != len(shape) or len(odd) != 1 or not min(actual[odd[0]], shape[odd[0]]):
        return UnrelatedShapes()
    dim = odd[0]
    if actual[dim] < shape[dim]:
        return PartWithoutPlacements(dim, actual[dim], shape[dim], is_plain=tensor.claimed is None)
    return PartAsReference(dim, actual[dim], shape[dim])


def misplaced(dump: Dump, tensor: Tensor, result: Compared) -> list[Finding]:
    """Return the findings if ranks hold the reference's own values, each once looked up, but not in the claimed places.

    Values are as good as ids if they are nearly unique; those that repeat are distinguished by their neighbors.
    """
    if result.claimed is None or result.claimed.flat or not set(result.reduced) <= set(result.mesh.ranks):
        return []
    whole = bits_of(result.wanted + 0.0)  # minus zero is zero
    if is_alike(whole):
        return []
    regions, ids = {}, {}
    for rank, got in result.reduced.items():
        elements = locate(bits_of(got + 0.0), whole, result.claimed.region(result.mesh.coord_of(rank)))
        if (elements == UNPLACED).any():
            return []
        region, coord = region_of(elements, result.wanted.shape), result.mesh.coord_of(rank)
        if region is not None:
            regions[coord] = region
        else:
            ids[coord] = elements
    shards = {result.mesh.coord_of(rank): tensor.shards[rank] for rank in result.reduced}
    try:
        findings = list(
            check_places(Case(dump, tensor, result.name, result.mesh, result.claimed, shards, regions, ids))
        )
    except ShardvizError:
        return []
    return [
        replace(finding, sentence=f"the values are the reference's, but {finding.sentence}") for finding in findings
    ]


def _value(result: Compared, far: Far, tolerance: str) -> Finding:
    off, apart = _off(result, far), {rank: _apart(result, rank) for rank in far}
    rank = max(far, key=lambda rank: float(np.max(apart[rank], initial=0.0)))
    at = int(np.argmax(apart[rank]))
    got, wanted = result.reduced[rank].ravel()[at], result.wanted_of(rank).ravel()[at]
    box, is_part = box_of(off), all(2 * elements.sum() < elements.size for elements in far.values())
    cause = _of_part(result, far) if is_part else _of_values(result, far)
    return cause.finding(
        result.name,
        tuple(far),
        f"{off.sum():,} of {counted(off.size, 'element')} {'is' if off.sum() == 1 else 'are'} not the reference's"
        f"{f', all of {box}' if box else ''}, on {len(far):,} of {counted(len(result.reduced), 'rank')}: at "
        f"{_index(result, rank, at)} rank {rank} has {got:.6g}, the reference has {wanted:.6g} ({tolerance})",
        claimed=write(result.claimed) if result.claimed else "",
    )


def _off(result: Compared, far: Far) -> NDArray[np.bool_]:
    """Return which elements of the whole tensor are off on some rank."""
    off = np.zeros(result.wanted.shape, np.bool_)
    for rank, elements in far.items():
        off.ravel()[result.regions[rank].flat_ids(result.wanted.shape)[elements]] = True
    return off


def _of_part(result: Compared, far: Far) -> Cause:
    """Return the likely cause of a difference in few elements: neither seed nor file nor batch is another."""
    if result.role not in WEIGHTS:
        return FewElementsDiffer()
    if all(not result.reduced[rank][elements].any() for rank, elements in far.items()):
        return FewElementsZero()
    return FewElementsChanged()


def _of_values(result: Compared, far: Far) -> Cause:
    """Return the likely cause of a difference that no rule explains, and how to distinguish such causes."""
    of_all = len(far) == len(result.reduced)
    if result.role not in WEIGHTS:
        return UnexplainedDifference(of_all)
    if all(not result.reduced[rank].any() for rank in far):
        return OnlyZeros(of_all)
    return SomeRanksDiffer() if len(far) < len(result.reduced) else AllRanksDiffer()


def _apart(result: Compared, rank: int) -> NDArray[np.float64]:
    """Return how far each element of a rank is off; NaN is farthest."""
    got, wanted = result.reduced[rank].ravel(), result.wanted_of(rank).ravel()
    with np.errstate(invalid="ignore"):
        apart = np.abs(got - wanted)
    return np.where(got == wanted, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _index(result: Compared, rank: int, at: int) -> list[int]:
    """Return the global index of element number `at` of a rank's part."""
    number = int(result.regions[rank].flat_ids(result.wanted.shape).ravel()[at])
    return index_of(number, result.wanted.shape)
