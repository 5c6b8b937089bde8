"""Steps without a reference, of which only copies can be compared: a captured job's, and one that draws random numbers.

Copies are what placements claim alike, or what the ids of the weight show. Plain tensors are copies where their weights
are: bit by bit the same on these ranks, and not all one number, which shards can be too.

All ranks are seeded alike before a step in training mode. Ranks along an axis that does not split the batch and that
hold copies of an output or a gradient must have drawn the same numbers for it. Those that hold different parts of an
activation must drop different elements (`identical-shards`): an axis splits it where every rank along it has other
values, and the whole is as many times as large. Masks that are equal in a second step, too, in which all ranks are
seeded differently, were seeded by the model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.layout import axes_of_change
from shardviz.check.report import NotChecked
from shardviz.check.step.comparison import apart_text, compared, largest_of, wrapped_over, wrappers_of
from shardviz.check.step.contradictions import check_absent_gradients
from shardviz.check.values.copies import copies_of, with_copies
from shardviz.explain.step.losses import ScalarNotReduced
from shardviz.explain.step.sums import GradientNotReduced, OutputCopiesDiffer
from shardviz.explain.step.whole_step import DifferentMasks, IdenticalMasks
from shardviz.explain.templates import number
from shardviz.layout.notation import write
from shardviz.relate.tolerance import EPSILON, ROUNDINGS_OF_ONE, ROUNDINGS_OF_SUM
from shardviz.relate.values import farthest
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.values.copies import Groups
    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.dump.records.step import MaskRecord
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh

    Values = dict[int, NDArray[np.float64]]
    Row = dict[int, MaskRecord]

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
    apart = {rank: farthest(held, values[first]) for rank, held in values.items()}
    largest = max(largest_of(held) for held in values.values())
    dtype = "float32" if tensor.role == "scalar" else group[0].body.dtype
    epsilon = EPSILON.get(dtype, EPSILON["float32"])
    allowed = (ROUNDINGS_OF_ONE * epsilon + ROUNDINGS_OF_SUM * min(epsilon, EPSILON["float32"])) * largest
    wrong = [rank for rank, by in apart.items() if not by <= allowed]
    if not wrong or all(np.array_equal(held, values[first], equal_nan=True) for held in values.values()):
        return None
    return _differing(dump, tensor, name, values, (first, max(wrong, key=lambda rank: apart[rank])))


def _differing(dump: Dump, tensor: Tensor, name: str, values: Values, pair: tuple[int, int]) -> Finding:
    low, high = pair
    apart = apart_text(low, high, farthest(values[low], values[high]))
    mesh = dump.files.mesh
    contents = {mesh.coord_of(at): own.tobytes() for at, own in values.items() if at in mesh}
    differing = tuple(axes_of_change(mesh, contents))
    axes = _joined(differing)
    summary = f"copies of its {tensor.role} differ along {axes}: {apart}"
    if tensor.role == "scalar":
        logged = dict.fromkeys(number(float(own.sum())) for own in values.values())
        summary = f"ranks log {listed(logged, MAX_LISTED)}"
    elif tensor.role == "grad":
        summary = f"the gradient differs along {axes}: {apart}"
    cause = CAUSES[tensor.role](differing)
    if tensor.role == "grad" and dump.files.run.probe:  # kept when the step had ended
        cause = GradientNotReduced(differing, wrapper=wrapped_over(wrappers_of(dump, low, name), mesh, low, differing))
    finding = cause.finding(
        name,
        tuple(sorted(values)),
        summary,
        claimed=write(tensor.claimed, equal=True) if tensor.claimed and tensor.role != "scalar" else "",
        held=f"different values along {axes}",
    )
    return with_copies(finding, dump, tensor)


def _joined(axes: tuple[str, ...]) -> str:
    return " and ".join(axes) or "the ranks"


ROLES = ("output", "scalar", "grad")
"""Causes before what is computed from them."""


def check_training(dump: Dump) -> Iterator[Finding]:
    """Yield the first of output, loss and gradients whose copies differ after a step in training mode."""
    for role in ROLES:
        in_eval = {result.name: result for result in compared(dump, (role,))}
        training = (result for result in compared(dump, (role,), at="training") if not result.incomparable)
        differing = (result for result in training if result.copies_differ_along)
        apart = [result for result in differing if _has_equal_copies(in_eval.get(result.name))]
        if apart:
            finding, tensor = _in_training(apart[0], len(apart) - 1), dump.find("training", role, apart[0].name)
            yield with_copies(finding, dump, tensor) if tensor is not None else finding
            return


def _has_equal_copies(result: Compared | None) -> bool:
    """Whether copies agreed in `eval()`: else another finding names the cause."""
    return result is not None and not result.incomparable and not result.copies_differ_along


def _in_training(comparison: Compared, others: int) -> Finding:
    along = " and ".join(comparison.copies_differ_along)
    low, high, worst = max(comparison.pairs_of_copies, key=lambda pair: pair[2])
    more = f"; so do those of {others} other{'s' * (others > 1)}" if others else ""
    return comparison.finding(
        DifferentMasks(along),
        f"copies of the {comparison.what} differ along {along} in training mode, which draws random numbers: "
        f"{apart_text(low, high, worst)}; in eval() they are equal{more}",
        tuple(sorted(comparison.values)),
        held=f"different values along {along}",
    )


LEAST_BITS = 64
"""Masks of fewer random bits than this may be equal by chance."""

OF_THE_JOB = (
    "whether ranks draw different dropout masks for different parts of an activation: the model leaves that to the "
    "seeds of the job, and a probe seeds all ranks itself"
)


def check_masks(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield masks that are equal along axes that split their tensor, and notes if seeds decide."""
    of_ranks = {rank: record.masks for rank, record in dump.files.ranks.items()}
    count = min(map(len, of_ranks.values()), default=0)
    if not count or len(set(map(len, of_ranks.values()))) != 1 or dump.files.missing_ranks:
        return
    rows = [{rank: masks[index] for rank, masks in of_ranks.items()} for index in range(count)]
    splitting = [_splitting(dump.files.mesh, row) for row in rows]
    pairs = [(row, axis) for row, axes in zip(rows, splitting, strict=True) for axis in axes]
    equal = [(row, axis) for row, axis in pairs if _are_equal(dump.files.mesh, row, axis)]
    seeded = [(row, axis) for row, axis in equal if _are_equal(dump.files.mesh, row, axis, again=True)]
    if seeded:
        num_seeded = len({id(row) for row, _ in seeded})
        yield _of_masks(dump, num_seeded, count, seeded)
    elif equal:
        yield NotChecked("", OF_THE_JOB, "step")


def _splitting(mesh: Mesh, row: Row) -> tuple[str, ...]:
    """Return the axes that split what a mask is laid on; none if that is not known."""
    first = next(iter(row.values()))
    if any((mask.size, mask.num_kept == mask.size) != (first.size, False) for mask in row.values()):
        return ()
    axes = tuple(
        axis
        for axis in mesh.axes
        if mesh.axis_size(axis) > 1
        and all(len({row[rank].given for rank in group}) == len(group) for group in mesh.groups(axis))
    )
    return axes if first.whole == first.size * math.prod(map(mesh.axis_size, axes)) else ()


def _are_equal(mesh: Mesh, row: Row, axis: str, *, again: bool = False) -> bool:
    groups = [[row[rank] for rank in group] for group in mesh.groups(axis)]
    alike = all(len({mask.again if again else mask.mask for mask in group}) == 1 for group in groups)
    return alike and all(_bits(group[0]) >= LEAST_BITS for group in groups)


def _bits(mask: MaskRecord) -> float:
    """Return how unlikely it is that another mask drawn like this one is equal, as a power of 2."""
    fraction = mask.num_kept / mask.size
    return -mask.size * math.log2(fraction**2 + (1 - fraction) ** 2)


def _of_masks(dump: Dump, num_equal: int, count: int, seeded: list[tuple[Row, str]]) -> Finding:
    along = " and ".join(dict.fromkeys(axis for _, axis in seeded))
    mask = next(iter(seeded[0][0].values()))
    return IdenticalMasks(along).finding(
        "",
        tuple(dump.files.ranks),
        f"ranks along {along} drop the same elements of different parts of an activation, in {num_equal} of {count} "
        f"dropout masks: {mask.size - mask.num_kept:,} of {mask.size:,} elements on every rank",
        held=f"equal masks along {along}",
    )
