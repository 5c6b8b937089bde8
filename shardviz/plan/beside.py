"""Two plans side by side: what the fullest rank holds, and what a rank receives in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.plan.counting.amounts import OF_A_STEP, ROLES, Amounts
from shardviz.plan.counting.traffic import crossing, received_along
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.dump.planned.ranks import PlannedRanks
    from shardviz.dump.read import DumpFiles

NOT_PLANNED = "not planned"


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of one kind in two plans.

    Attributes:
        name: What they are: a role, or the axes along which they are received.
        before: How many the first plan has; None where it does not tell.
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
        not_compared: Of which plan alone no step was planned, and why; empty where that is true of both or of none.
    """

    sizes: tuple[Size, ...] = ()
    not_compared: str = ""


def sizes_beside(before: DumpFiles, after: DumpFiles) -> Sizes:
    """Return the bytes of two plans; nothing where the ranks of one of them were run.

    Where one plan has no step, nothing is said to have changed that only a step tells.

    Args:
        before: The plan to compare with.
        after: The plan that may have changed.
    """
    if before.planned is None or after.planned is None:
        return Sizes()
    plans = before.planned, after.planned
    return Sizes((*_held(*plans), *_received(*plans)), _without_step(*plans))


def _without_step(before: PlannedRanks, after: PlannedRanks) -> str:
    """Say of which plan alone no step was planned, and why; empty where that is true of both or of none."""
    reasons = [ranks.plan.without_step for ranks in (before, after)]
    if all(reasons) or not any(reasons):
        return ""
    return f"what a step needs: the {'first' if reasons[0] else 'second'} plan has none: {''.join(reasons)}"


def _held(before: PlannedRanks, after: PlannedRanks) -> Iterator[Size]:
    plans, is_mixed = (before, after), bool(_without_step(before, after))
    roles = tuple(role for role in ROLES if not (is_mixed and role in OF_A_STEP))
    by_role = [np.stack([Amounts(ranks).by_role[role] for role in ROLES]) for ranks in plans]
    counted = [sizes[[ROLES.index(role) for role in roles]] for sizes in by_role]
    title, shown = _shown(*counted)
    for at, role in enumerate(ROLES):
        both = [int(sizes[at, rank]) for sizes, rank in zip(by_role, shown, strict=True)]
        if any(both):
            one, other = (
                None if role not in roles and ranks.plan.without_step else size
                for ranks, size in zip(plans, both, strict=True)
            )
            yield Size(role, one, other, title)
    one, other = (int(sizes[:, rank].sum()) for sizes, rank in zip(counted, shown, strict=True))
    yield Size(f"together{', no step' * is_mixed}", one, other, title)


def _shown(before: NDArray[np.int64], after: NDArray[np.int64]) -> tuple[str, tuple[int, int]]:
    """Return which rank of each plan to show: the fullest, or where these have the same, the first that has not."""
    fullest = int(before.sum(0).argmax()), int(after.sum(0).argmax())
    if before.shape == after.shape and np.array_equal(before[:, fullest[0]], after[:, fullest[1]]):
        for rank in np.flatnonzero((before != after).any(0)):
            return f"bytes of rank {rank}, the fullest have the same", (int(rank), int(rank))
    return "bytes of the fullest rank", fullest


def _received(before: PlannedRanks, after: PlannedRanks) -> Iterator[Size]:
    plans, title = (before, after), "received in a step, at most"
    found = [received_along(ranks.plan, ranks.mesh) for ranks in plans]
    for name in dict.fromkeys([*found[0], *found[1]]):
        one, other = (_unless(ranks, own.get(name, 0)) for ranks, own in zip(plans, found, strict=True))
        yield Size(name, one, other, title)
    for node in sorted({ranks.plan.node for ranks in plans if ranks.plan.node} if any(found) else ()):
        one, other = (_unless(ranks, crossing(ranks.plan, ranks.mesh), node) for ranks in plans)
        yield Size(f"crossing nodes of {node}", one, other, title)


def _unless(ranks: PlannedRanks, size: int, node: int = 0) -> int | None:
    """Return a number of bytes; None where a plan does not tell, having no step or no nodes of that size."""
    return None if ranks.plan.without_step or (node and ranks.plan.node != node) else size
