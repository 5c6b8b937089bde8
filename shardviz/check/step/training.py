"""A step of a model that draws random numbers in training: no other step can be compared, but its copies must agree.

All ranks are seeded alike before it. Ranks along an axis that does not split the batch and that hold copies of an
output or a gradient must have drawn the same numbers for it. Those that hold different parts of an activation must drop
different elements (`identical-shards`): an axis splits it where every rank along it has other values, and the whole is
as many times as large. Masks that are equal in a second step, too, in which all ranks are seeded differently, were
seeded by the model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.check.step.compared import laid_out, ranks_by_part, rounding_of
from shardviz.check.step.words import WHAT, apart_text, claimed_text
from shardviz.check.values.copies import with_copies
from shardviz.explain.step import DifferentMasks, IdenticalMasks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment
    from shardviz.dump.records.step import MaskRecord
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh

    Row = dict[int, MaskRecord]


ROLES = ("output", "scalar", "grad")
"""Causes before what is computed from them."""


def check_training(dump: Dump) -> Iterator[Finding]:
    """Yield the first of output, loss and gradients whose copies differ after a step in training mode."""
    for role in ROLES:
        in_eval = {one.name: one for one in _of_role(dump, role, "step")}
        apart = [
            one
            for one in _of_role(dump, role, "training")
            if not one.incomparable and one.copies_differ_along and _has_equal_copies(in_eval.get(one.name))
        ]
        if apart:
            finding, tensor = _finding(apart[0], len(apart) - 1), dump.find("training", role, apart[0].name)
            yield with_copies(finding, dump, tensor) if tensor is not None else finding
            return


def _has_equal_copies(result: Compared | None) -> bool:
    """Whether copies agreed in `eval()`: else another finding names the cause."""
    return result is not None and not result.incomparable and not result.copies_differ_along


def _of_role(dump: Dump, role: str, moment: Moment) -> Iterator[Compared]:
    rounding = rounding_of(dump)
    for tensor in dump.at(moment):
        for name in tensor.names if tensor.role == role else ():
            reference = dump.find("reference", role, name)
            if reference is not None:
                yield laid_out(dump, tensor, name, dump.values(reference.first, name), rounding)


def _finding(result: Compared, others: int) -> Finding:
    along = " and ".join(result.copies_differ_along)
    groups = ((ranks[0], rank) for ranks in ranks_by_part(result) for rank in ranks[1:])
    low, high, worst = max(result.neighbors_apart(groups), key=lambda pair: pair[2])
    more = f"; so do those of {others} other{'s' * (others > 1)}" if others else ""
    return DifferentMasks(along).finding(
        result.name,
        tuple(sorted(result.values)),
        f"copies of the {WHAT[result.role]} differ along {along} in training mode, which draws random numbers: "
        f"{apart_text(low, high, worst)}; in eval() they are equal{more}",
        claimed=claimed_text(result),
        held=f"different values along {along}",
    )


LEAST_BITS = 64
"""Masks of fewer random bits than this may be equal by chance."""

OF_THE_JOB = (
    "whether ranks draw different dropout masks for different parts of an activation: the model leaves that to the "
    "seeds of the job, and a probe seeds all ranks itself"
)


def check_masks(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield the masks that are equal along axes that split what they are laid on, and say where seeds decide."""
    of_ranks = {rank: record.masks for rank, record in dump.files.ranks.items()}
    count = min(map(len, of_ranks.values()), default=0)
    if (
        dump.files.mesh is None
        or not count
        or len({len(masks) for masks in of_ranks.values()}) != 1
        or dump.files.missing_ranks
    ):
        return
    rows = [{rank: masks[index] for rank, masks in of_ranks.items()} for index in range(count)]
    splitting = [_splitting(dump.files.mesh, row) for row in rows]
    pairs = [(row, axis) for row, axes in zip(rows, splitting, strict=True) for axis in axes]
    equal = [(row, axis) for row, axis in pairs if _are_equal(dump.files.mesh, row, axis)]
    seeded = [(row, axis) for row, axis in equal if _are_equal(dump.files.mesh, row, axis, again=True)]
    if seeded:
        yield _of_masks(dump, len([row for row in rows if any(row is one for one, _ in seeded)]), count, seeded)
    elif equal:
        yield NotChecked("", OF_THE_JOB, "step")


def _splitting(mesh: Mesh, row: Row) -> tuple[str, ...]:
    """Return the axes that split what a mask is laid on; none if that is not known."""
    first = next(iter(row.values()))
    if any((one.size, one.num_kept == one.size) != (first.size, False) for one in row.values()):
        return ()
    axes = tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1 and _differ(mesh, row, axis))
    return axes if first.whole == first.size * math.prod(map(mesh.axis_size, axes)) else ()


def _differ(mesh: Mesh, row: Row, axis: str) -> bool:
    return all(len({row[rank].given for rank in group}) == len(group) for group in mesh.groups(axis))


def _are_equal(mesh: Mesh, row: Row, axis: str, *, again: bool = False) -> bool:
    groups = [[row[rank] for rank in group] for group in mesh.groups(axis)]
    alike = all(len({one.again if again else one.mask for one in group}) == 1 for group in groups)
    return alike and all(_bits(group[0]) >= LEAST_BITS for group in groups)


def _bits(mask: MaskRecord) -> float:
    """Return how unlikely it is that another mask drawn like this one is equal, as a power of 2."""
    kept = mask.num_kept / mask.size
    return -mask.size * math.log2(kept**2 + (1 - kept) ** 2)


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
