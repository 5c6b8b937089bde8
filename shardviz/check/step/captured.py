"""A captured job's step, which has no unsharded model's beside it: copies of one gradient, output or number differ.

Copies are what placements claim alike, or what the ids of the weight show. Plain tensors are copies where their weights
are: bit by bit the same on these ranks, and not all one number, which shards can be too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.no_gradient import check_absent_gradients
from shardviz.check.step.words import apart_text
from shardviz.check.values.copies import copies_of, with_copies
from shardviz.explain.losses import ScalarNotReduced
from shardviz.explain.sums import GradientNotReduced, OutputCopiesDiffer
from shardviz.explain.templates import number
from shardviz.layout.notation import write
from shardviz.relate.tolerance import EPSILON, ROUNDINGS_OF_ONE, ROUNDINGS_OF_SUM
from shardviz.relate.values import farthest
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.values.copies import Groups
    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Values = dict[int, NDArray[np.float64]]

MAX_LISTED = 4
NO_REFERENCE = "the step against an unsharded model's: a captured job has none; copies on its ranks were compared"
CAUSES: Mapping[str, Callable[[tuple[str, ...]], Cause]] = {
    "grad": lambda axes: GradientNotReduced(axes, is_captured=True),
    "output": lambda axes: OutputCopiesDiffer(_joined(axes)),
    "scalar": lambda axes: ScalarNotReduced(_joined(axes)),
}
"""What is wrong if copies differ along some axes, by role."""


def check_captured(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield what differs between the ranks of a captured step."""
    yield NotChecked("", NO_REFERENCE, "step")
    yield from check_absent_gradients(dump)
    yield from copies_apart(dump, CAUSES)


def copies_apart(dump: Dump, roles: Collection[str]) -> Iterator[Finding]:
    """Yield the results of some roles whose copies differ between ranks."""
    for tensor in dump.at("step"):
        for name in tensor.names if tensor.role in roles else ():
            for group in _copies(dump, tensor, name):
                if (finding := _compared(dump, tensor, name, group)) is not None:
                    yield finding
                    break


def _copies(dump: Dump, tensor: Tensor, name: str) -> Groups:
    """Return the groups of shards that must be equal; none if nothing says so."""
    groups = copies_of(tensor, dump.stamped.get(name))
    if tensor.role != "grad" or tensor.claimed is not None or name in dump.stamped:
        return [group for group in groups if len(group) > 1 and (tensor.claimed is not None or tensor.role == "grad")]
    weight = dump.find("initial", "param", name)
    if weight is None:
        return []
    index = weight.index(name)
    return [group for group in groups if len(group) > 1 and _are_copies(weight, index, group)]


def _are_copies(weight: Tensor, index: int, group: list[Shard]) -> bool:
    shards = [weight.shards[shard.rank] for shard in group if shard.rank in weight.shards]
    constant = any(shard.body.constant for shard in shards)
    return len(shards) == len(group) and not constant and len({shard.digest(index) for shard in shards}) == 1


def _compared(dump: Dump, tensor: Tensor, name: str, group: list[Shard]) -> Finding | None:
    """Return the finding where copies are farther apart than rounding explains."""
    index = tensor.index(name)
    if len({shard.digest(index) for shard in group}) == 1:
        return None
    values = {shard.rank: np.asarray(dump.values(shard, name), np.float64) for shard in group}
    first = group[0].rank
    apart = {rank: farthest(one, values[first]) for rank, one in values.items()}
    largest = max(float(np.max(np.abs(one), initial=0.0, where=np.isfinite(one))) for one in values.values())
    dtype = "float32" if tensor.role == "scalar" else group[0].body.dtype
    own = EPSILON.get(dtype, EPSILON["float32"])
    allowed = (ROUNDINGS_OF_ONE * own + ROUNDINGS_OF_SUM * min(own, EPSILON["float32"])) * largest
    wrong = [rank for rank, by in apart.items() if not by <= allowed]
    if not wrong or all(np.array_equal(one, values[first], equal_nan=True) for one in values.values()):
        return None
    return _finding(dump, tensor, name, values, (first, max(wrong, key=lambda rank: apart[rank])))


def _finding(dump: Dump, tensor: Tensor, name: str, values: Values, pair: tuple[int, int]) -> Finding:
    low, high = pair
    apart = apart_text(low, high, farthest(values[low], values[high]))
    differing = tuple(_axes(dump, values))
    axes = _joined(differing)
    summary = f"copies of its {tensor.role} differ along {axes}: {apart}"
    if tensor.role == "scalar":
        summary = f"ranks log {listed(dict.fromkeys(number(float(one)) for one in values.values()), MAX_LISTED)}"
    elif tensor.role == "grad":
        summary = f"the gradient differs along {axes}: {apart}"
    finding = CAUSES[tensor.role](differing).finding(
        name,
        tuple(sorted(values)),
        summary,
        claimed=write(tensor.claimed, equal=True) if tensor.claimed and tensor.role != "scalar" else "",
        held=f"different values along {axes}",
    )
    return with_copies(finding, dump, tensor)


def _joined(axes: tuple[str, ...]) -> str:
    return " and ".join(axes) or "the ranks"


def _axes(dump: Dump, values: Values) -> list[str]:
    """Return the axes of the run's mesh along which neighbors differ."""
    mesh = dump.files.mesh
    return [
        axis
        for axis in mesh.axes
        if any(
            not np.array_equal(values[group[0]], values[rank])
            for group in mesh.groups(axis)
            for rank in group
            if group[0] in values and rank in values
        )
    ]
