"""`identical-shards` of dropout masks: ranks that hold different parts of an activation drop the same of each.

An axis splits an activation where every rank along it has other values, and the whole is as many times as large. All
ranks are seeded alike in one step and differently in another: masks that are equal in both were seeded by the model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.explain.step import IdenticalMasks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import MaskRecord
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh

    Row = dict[int, MaskRecord]

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
        yield _finding(dump, len([row for row in rows if any(row is one for one, _ in seeded)]), count, seeded)
    elif equal:
        yield NotChecked("", OF_THE_JOB, "step")


def _splitting(mesh: Mesh, row: Row) -> tuple[str, ...]:
    """Return the axes that split what a mask is laid on; none where that is not known."""
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


def _bits(one: MaskRecord) -> float:
    """Return how unlikely it is that another mask drawn like this one is equal, as a power of 2."""
    kept = one.num_kept / one.size
    return -one.size * math.log2(kept**2 + (1 - kept) ** 2)


def _finding(dump: Dump, num_equal: int, count: int, seeded: list[tuple[Row, str]]) -> Finding:
    along = " and ".join(dict.fromkeys(axis for _, axis in seeded))
    one = next(iter(seeded[0][0].values()))
    return IdenticalMasks(along).finding(
        "",
        tuple(dump.files.ranks),
        f"ranks along {along} drop the same elements of different parts of an activation, in {num_equal} of {count} "
        f"dropout masks: {one.size - one.num_kept:,} of {one.size:,} elements on every rank",
        held=f"equal masks along {along}",
    )
