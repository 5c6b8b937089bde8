"""Meshes that were planned, and which of them fit: each is what a plan of that mesh alone says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.plan.counting.amounts import Amounts
from shardviz.plan.counting.traffic import crossing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.dump.planned.ranks import PlannedRanks
    from shardviz.dump.records.plan import StepFails
    from shardviz.layout.mesh import Mesh

NO_STEP = "no step was planned: the probe has no batch(), and no --batch is given"

_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) *((?P<unit>[KMGTP])(?P<binary>i?)B?|B)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """One mesh that was planned.

    Attributes:
        mesh: The mesh.
        bytes: Bytes that the GPU of the fullest rank has to hold.
        offloaded: Bytes that a rank has in a CPU's memory at most.
        crossing: Bytes the busiest rank receives in groups that cross nodes; None where no node size is given.
        failed: Why it was not planned; empty where it was.
        without_step: Why activations and collectives are not in it; empty where they are.
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
    amounts = Amounts(ranks)
    has_step = all(part.peak is not None for part in ranks.plan.parts)
    without = "" if has_step else ranks.plan.without_step or NO_STEP
    across = crossing(ranks.plan, ranks.mesh) if ranks.plan.node else None
    return Row(
        ranks.mesh,
        int(amounts.on_gpu.max()),
        int(amounts.offloaded.max()),
        across,
        without_step=without,
        step_fails=ranks.plan.step_fails,
        notes=ranks.plan.how[1:],
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

    A mesh on which the step fails is none of them.

    Args:
        rows: The meshes that were planned.
        memory: Bytes that a rank has; 0 where it is not given.
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
