"""Meshes of a number of ranks, and which of those that were planned fit: each is what a plan of it alone says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.layout.mesh import Mesh
from shardviz.plan.counting import Amounts, crossing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.dump.planned.ranks import PlannedRanks
    from shardviz.dump.records.plan import StepFails

NO_STEP = "no step was planned: the probe has no batch(), and no --batch is given"

MOST_MESHES = 64
"""Meshes that are planned at most: each takes seconds."""

_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) *((?P<unit>[KMGTP])(?P<binary>i?)B?|B)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """One mesh that was planned.

    Attributes:
        mesh: The mesh.
        bytes: Bytes that the GPU of the fullest rank has to hold.
        offloaded: Bytes that a rank has in a CPU's memory at most.
        crossing: Bytes the busiest rank receives in groups that cross nodes; None if no node size is given.
        failed: Why it was not planned; empty if it was.
        without_step: Why activations and collectives are not in it; empty if they are.
        step_fails: Whether that is because the step fails, on real ranks too.
        notes: What a plan of this mesh alone says of how it was made.
        place: Where it stands among the meshes that were tried: rows come as they are known.
    """

    mesh: Mesh
    bytes: int = 0
    offloaded: int = 0
    crossing: int | None = None
    failed: str = ""
    without_step: str = ""
    step_fails: StepFails = "no"
    notes: tuple[str, ...] = ()
    place: int = 0


def row_of(ranks: PlannedRanks) -> Row:
    """Return a plan's row."""
    amounts, plan = Amounts(ranks), ranks.plan
    has_step = all(part.peak is not None for part in plan.parts)
    return Row(
        mesh=ranks.mesh,
        bytes=int(amounts.on_gpu.max()),
        offloaded=int(amounts.offloaded.max()),
        crossing=crossing(plan, ranks.mesh) if plan.node else None,
        without_step="" if has_step else plan.without_step or NO_STEP,
        step_fails=plan.step_fails,
        notes=plan.how[1:],
    )


def bytes_of(text: str) -> int:
    """Read a number of bytes: `80GB`, `79.6GiB`, `80G`.

    Raises:
        ShardvizError: It is not one.

    Example:
        >>> bytes_of("80GB"), bytes_of("1.5KiB")
        (80000000000, 1536)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ShardvizError(f"--memory {text!r} is not a number of bytes with its unit", "write it as 80GB or 79GiB")
    power = " KMGTP".index((match["unit"] or " ").upper())
    base = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * float(base) ** power)


def fitting(rows: Sequence[Row], memory: int) -> list[Row]:
    """Return the meshes that fit, those that cross nodes least first; those without activations last: they may not.

    A mesh on which the step fails is none of them. Any size fits if the memory of a rank is not given.
    """
    fits = [row for row in rows if not (row.failed or is_too_large(row, memory) or is_failing(row, rows))]
    return sorted(fits, key=lambda row: (bool(row.without_step), row.crossing or 0, row.bytes, row.place))


def is_too_large(row: Row, memory: int) -> bool:
    """Whether a mesh needs more than a rank has."""
    return bool(memory) and row.bytes > memory


def is_failing(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a mesh's step fails: where only one without values has, it may be the plan's fault if it does on all."""
    has_step = any(not (one.failed or one.without_step) for one in rows)
    return row.step_fails == "yes" or (row.step_fails == "perhaps" and has_step)


def meshes(axes: Sequence[str], gpus: int, node: int = 0) -> list[Mesh]:
    """Return every way to share out so many ranks over axes, those that are likely first.

    Likely is what keeps the inner axes, whose groups talk most, within a node: an axis called tp, cp or sp is no wider
    than a node if nodes are known.

    Example:
        >>> [str(mesh) for mesh in meshes(("dp", "tp"), 4)]
        ['(dp=4, tp=1)', '(dp=2, tp=2)', '(dp=1, tp=4)']
    """

    def is_wide(mesh: Mesh) -> bool:
        inner = (mesh.axis_size(axis) for axis in mesh.axes if axis in ("tp", "cp", "sp"))
        return bool(node) and any(size > node for size in inner)

    shared = [Mesh(tuple(axes), sizes) for sizes in _shared(gpus, len(axes))]
    return sorted(shared, key=lambda mesh: (is_wide(mesh), mesh.shape[-1]))


def _shared(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a product of so many others."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _shared(number // first, parts - 1):
                yield (first, *rest)
