"""Plans compared: the meshes of a number of ranks that fit, or the bytes of two plans."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import ShardvizError
from shardviz.layout.mesh import Mesh
from shardviz.plan.counting import OF_A_STEP, ROLES, PlanBytes, crossing_bytes, received_along
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.plan import PlannedRanks
    from shardviz.dump.read import DumpFiles
    from shardviz.dump.records.files import StepFails


NO_STEP = "no step was planned: the probe has no batch(), and no --batch is given"

MOST_MESHES = 64
"""Meshes that are planned at most: each takes seconds."""

_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) *((?P<unit>[KMGTP])(?P<binary>i?)B?|B)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """One planned mesh.

    Attributes:
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
    amounts, plan = PlanBytes(ranks), ranks.plan
    has_step = all(part.peak is not None for part in plan.parts)
    return Row(
        mesh=ranks.mesh,
        bytes=int(amounts.on_gpu.max()),
        offloaded=int(amounts.offloaded.max()),
        crossing=crossing_bytes(ranks) if plan.node else None,
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


def fitting_meshes(rows: Sequence[Row], memory: int) -> list[Row]:
    """Sort the meshes that fit by traffic across nodes; those without activations come last.

    A mesh on which the step fails is none of them. Any size fits if the memory of a rank is not given.
    """
    fits = [row for row in rows if not (row.failed or is_too_large(row, memory) or is_failing(row, rows))]
    return sorted(fits, key=lambda row: (bool(row.without_step), row.crossing or 0, row.bytes, row.place))


def is_too_large(row: Row, memory: int) -> bool:
    """Whether a mesh needs more than a rank has."""
    return bool(memory) and row.bytes > memory


def is_failing(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the step fails on a mesh; a doubtful failure counts only if some mesh has a step."""
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

    shared = [Mesh(tuple(axes), sizes) for sizes in _factorizations(gpus, len(axes))]
    return sorted(shared, key=lambda mesh: (is_wide(mesh), mesh.shape[-1]))


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a product of so many others."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for more in _factorizations(number // first, parts - 1):
                yield (first, *more)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of one kind in two plans.

    Attributes:
        name: What they are: a role, or the axes along which they are received.
        before: How many the first plan has; None if it does not tell.
        after: How many the second one has.
        title: Which rank has them.
    """

    name: str
    before: int | None
    after: int | None
    title: str

    @property
    def is_changed(self) -> bool:
        """Whether both plans tell how many there are, and differ."""
        return None not in (self.before, self.after) and self.before != self.after

    def cells(self) -> list[str]:
        """Return the row of a table that has both, and what has changed."""
        texts = ["not planned" if size is None else bytes_text(size) for size in (self.before, self.after)]
        if self.before is None or self.after is None:
            return [f"  {self.name}", *texts, ""]
        more = self.after - self.before
        return [f"  {self.name}", *texts, f"{'+' if more > 0 else '-'}{bytes_text(abs(more))}" if more else "="]


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """The bytes of two plans.

    Attributes:
        sizes: Kind by kind: those that ranks hold, then those that they receive.
        not_compared: Of which plan alone no step was planned, and why; empty if that is true of both or of none.
    """

    sizes: tuple[Size, ...] = ()
    not_compared: str = ""


def sizes_beside(before: DumpFiles, after: DumpFiles) -> PlanSizes:
    """Return the bytes of two plans; nothing if the ranks of one of them were run.

    If one plan has no step, nothing is said to have changed that only a step tells.
    """
    if before.planned is None or after.planned is None:
        return PlanSizes()
    plans = before.planned, after.planned
    reasons = [ranks.plan.without_step for ranks in plans]
    if all(reasons) or not any(reasons):
        return PlanSizes((*_held_sizes(plans, ROLES), *_received(plans)))
    lacking = "first" if reasons[0] else "second"
    why = f"what a step needs: the {lacking} plan has none: {''.join(reasons)}"
    lasting = tuple(role for role in ROLES if role not in OF_A_STEP)
    return PlanSizes((*_held_sizes(plans, lasting), *_received(plans)), why)


def _held_sizes(plans: tuple[PlannedRanks, PlannedRanks], compared: tuple[str, ...]) -> Iterator[Size]:
    """Yield one rank's bytes in each plan by role, and the sum of the compared roles."""
    by_role = [PlanBytes(ranks).by_role for ranks in plans]
    before, after = (np.stack([sizes[role] for role in compared]) for sizes in by_role)
    title, shown = _ranks_to_show(before, after)
    for role in ROLES:
        bytes_of_plans = [int(sizes[role][rank]) for sizes, rank in zip(by_role, shown, strict=True)]
        if any(bytes_of_plans):
            first, second = bytes_of_plans if role in compared else map(_size_if_known, plans, bytes_of_plans)
            yield Size(role, first, second, title)
    name = "together" if compared == ROLES else "together, no step"
    yield Size(name, int(before[:, shown[0]].sum()), int(after[:, shown[1]].sum()), title)


def _ranks_to_show(before: NDArray[np.int64], after: NDArray[np.int64]) -> tuple[str, tuple[int, int]]:
    """Return which rank of each plan to show: the fullest, or the first that differs."""
    fullest = int(before.sum(0).argmax()), int(after.sum(0).argmax())
    if before.shape == after.shape and np.array_equal(before[:, fullest[0]], after[:, fullest[1]]):
        for rank in np.flatnonzero((before != after).any(0)):
            return f"bytes of rank {rank}; the fullest ranks are equal", (int(rank), int(rank))
    return "bytes of the fullest rank", fullest


def _received(plans: tuple[PlannedRanks, PlannedRanks]) -> Iterator[Size]:
    title = "received in a step, at most"
    along = [received_along(ranks) for ranks in plans]
    for name in dict.fromkeys([*along[0], *along[1]]):
        first, second = (_size_if_known(ranks, sizes.get(name, 0)) for ranks, sizes in zip(plans, along, strict=True))
        yield Size(name, first, second, title)
    for node in sorted({ranks.plan.node for ranks in plans if ranks.plan.node} if any(along) else ()):
        first, second = (_size_if_known(ranks, crossing_bytes(ranks), node) for ranks in plans)
        yield Size(f"crossing nodes of {node}", first, second, title)


def _size_if_known(ranks: PlannedRanks, size: int, node: int = 0) -> int | None:
    """Return `size`; None if the plan has no step or no nodes of that size."""
    return None if ranks.plan.without_step or (node and ranks.plan.node != node) else size
