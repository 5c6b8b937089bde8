"""Why an optimizer's state differs after the step: it started from zeros, or belongs to another rank.

What the gradient adds in the step is the same in both cases, so what is left says what the state started from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.update.reasons import MAX_LISTED
from shardviz.check.step.update.steps import Why, factor_to
from shardviz.explain.states import StateInAnotherOrder, StateNotLoaded, StateOfAnotherRank
from shardviz.relate.tolerance import FEW
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump


def why_state(dump: Dump, result: Compared) -> Why | None:
    """Return why an optimizer's state differs after the step, if it shows what it started from."""
    gradient = dump.find("reference", "grad", result.name.rpartition(".")[0])
    if gradient is None:
        return None
    whole = dump.values(gradient.first, result.name.rpartition(".")[0])
    if whole.size != result.wanted.size:
        return None
    for added in (whole, whole**2):
        parts = {rank: result.part(added, rank) for rank in result.reduced}
        if _are_multiples(result, parts):
            return Why(
                "the optimizer's state is what the first step leaves that starts from zeros; the unsharded model's is "
                "not",
                StateNotLoaded(),
            )
        if others := _from_others(result, parts):
            return of_others(others)
    return None


def _are_multiples(result: Compared, parts: Mapping[int, NDArray[np.float64]]) -> bool:
    """Whether all ranks' state is one multiple of what a step adds, and the wanted state is not a multiple."""
    got = np.concatenate([result.reduced[rank].ravel() for rank in parts])
    due = np.concatenate([result.wanted_of(rank).ravel() for rank in parts])
    added = np.concatenate([part.ravel() for part in parts.values()])
    if np.count_nonzero(added) < FEW or not np.any(got):
        return False
    return factor_to(got, added) is not None and factor_to(due, added) is None


def _from_others(result: Compared, parts: Mapping[int, NDArray[np.float64]]) -> dict[int, int]:
    """Return for each wrong rank the rank from whose part of the state it started; empty if one has none."""
    owners: dict[int, int] = {}
    for rank in result.wrong:
        owner = next((other for other in parts if _is_from(result, parts, rank, other)), None)
        if owner is None:
            return {}
        owners[rank] = owner
    return owners


def _is_from(result: Compared, parts: Mapping[int, NDArray[np.float64]], rank: int, other: int) -> bool:
    """Whether a rank's state is another's, but for what the two ranks' own gradients add to it."""
    got, due = result.reduced[rank], result.wanted_of(other)
    if result.regions[rank] == result.regions[other] or got.shape != due.shape or got.size < FEW:
        return False
    off, added = got - due, parts[rank] - parts[other]
    return bool(np.any(added)) and factor_to(off, added) is not None


def of_another_order(result: Compared, ranks: Sequence[int]) -> Why | None:
    """Return why ranks have the numbers of their own part of a state at other places; None if they have not."""
    parts = [(result.reduced[rank].ravel(), result.wanted_of(rank).ravel()) for rank in ranks]
    if any(got.size < 2 or not result.near(np.sort(got), np.sort(due)) for got, due in parts):
        return None
    got, due = parts[0]
    moved = int(np.count_nonzero(np.abs(got - due) > result.tolerance))
    return Why(
        f"the optimizer's state is in another order within its part: {moved:,} of {got.size:,} elements of rank "
        f"{ranks[0]} are out of place",
        StateInAnotherOrder(),
    )


def of_others(others: Mapping[int, int]) -> Why:
    """Return why ranks have the state of other ranks."""
    pairs = listed((f"rank {rank} has that of rank {other}" for rank, other in others.items()), MAX_LISTED)
    if len(set(others.values())) == 1:
        first = next(iter(others.values()))
        return Why(
            f"the optimizer's state is of the same part on every rank, rank {first}'s", StateOfAnotherRank(is_one=True)
        )
    return Why(f"the optimizer's state is of the part of another rank: {pairs}", StateOfAnotherRank())
