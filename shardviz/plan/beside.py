"""Two plans side by side: what the fullest rank holds, and what a rank receives in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.plan.counting import OF_A_STEP, ROLES, Amounts, crossing, received_along
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.dump.planned.ranks import PlannedRanks
    from shardviz.dump.read import DumpFiles

    Plans = tuple[PlannedRanks, PlannedRanks]

NOT_PLANNED = "not planned"


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
        texts = [NOT_PLANNED if size is None else bytes_text(size) for size in (self.before, self.after)]
        if self.before is None or self.after is None:
            return [f"  {self.name}", *texts, ""]
        more = self.after - self.before
        return [f"  {self.name}", *texts, f"{'+' if more > 0 else '-'}{bytes_text(abs(more))}" if more else "="]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of two plans.

    Attributes:
        sizes: Kind by kind: those that ranks hold, then those that they receive.
        not_compared: Of which plan alone no step was planned, and why; empty if that is true of both or of none.
    """

    sizes: tuple[Size, ...] = ()
    not_compared: str = ""


def sizes_beside(before: DumpFiles, after: DumpFiles) -> Sizes:
    """Return the bytes of two plans; nothing if the ranks of one of them were run.

    If one plan has no step, nothing is said to have changed that only a step tells.
    """
    if before.planned is None or after.planned is None:
        return Sizes()
    plans = before.planned, after.planned
    reasons = [ranks.plan.without_step for ranks in plans]
    if all(reasons) or not any(reasons):
        return Sizes((*_held(plans, ROLES), *_received(plans)))
    lacking = "first" if reasons[0] else "second"
    why = f"what a step needs: the {lacking} plan has none: {''.join(reasons)}"
    lasting = tuple(role for role in ROLES if role not in OF_A_STEP)
    return Sizes((*_held(plans, lasting), *_received(plans)), why)


def _held(plans: Plans, compared: tuple[str, ...]) -> Iterator[Size]:
    """Yield the bytes of one rank of each plan by role, and together those of the roles that are compared."""
    by_role = [Amounts(ranks).by_role for ranks in plans]
    before, after = (np.stack([sizes[role] for role in compared]) for sizes in by_role)
    title, shown = _shown(before, after)
    for role in ROLES:
        both = [int(sizes[role][rank]) for sizes, rank in zip(by_role, shown, strict=True)]
        if any(both):
            one, other = both if role in compared else map(_unless, plans, both)
            yield Size(role, one, other, title)
    name = "together" if compared == ROLES else "together, no step"
    yield Size(name, int(before[:, shown[0]].sum()), int(after[:, shown[1]].sum()), title)


def _shown(before: NDArray[np.int64], after: NDArray[np.int64]) -> tuple[str, tuple[int, int]]:
    """Return which rank of each plan to show: the fullest, or if these have the same, the first that has not."""
    fullest = int(before.sum(0).argmax()), int(after.sum(0).argmax())
    if before.shape == after.shape and np.array_equal(before[:, fullest[0]], after[:, fullest[1]]):
        for rank in np.flatnonzero((before != after).any(0)):
            return f"bytes of rank {rank}, the fullest have the same", (int(rank), int(rank))
    return "bytes of the fullest rank", fullest


def _received(plans: Plans) -> Iterator[Size]:
    title = "received in a step, at most"
    along = [received_along(ranks.plan, ranks.mesh) for ranks in plans]
    for name in dict.fromkeys([*along[0], *along[1]]):
        one, other = (_unless(ranks, sizes.get(name, 0)) for ranks, sizes in zip(plans, along, strict=True))
        yield Size(name, one, other, title)
    for node in sorted({ranks.plan.node for ranks in plans if ranks.plan.node} if any(along) else ()):
        one, other = (_unless(ranks, crossing(ranks.plan, ranks.mesh), node) for ranks in plans)
        yield Size(f"crossing nodes of {node}", one, other, title)


def _unless(ranks: PlannedRanks, size: int, node: int = 0) -> int | None:
    """Return a number of bytes; None if a plan does not tell, having no step or no nodes of that size."""
    return None if ranks.plan.without_step or (node and ranks.plan.node != node) else size
