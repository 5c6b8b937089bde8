"""Leaves out what a job rightly changed since it had the values that a model is compared with: weights drawn again."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from shardviz.dump.arrays.ids import ID_NONE
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import bits_of_tensor
from shardviz.live.run.known.values import NAME
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from shardviz.live.claims.local import Local
    from shardviz.live.run.known.choosing import Chosen
    from shardviz.live.run.known.values import Kept

WRITTEN = "its values were written after it was sharded: no rank holds any of the values from before"
AGAIN = "every rank computed it again after it was sharded, with equal results"
DIFFERED = (
    "ranks had different values before it was sharded, as with a seed per rank, so its shards are pieces of different "
    "tensors, whose order cannot be checked. For weights drawn at random that is fine, as long as copies agree; to "
    "have the order checked, seed or load alike on all ranks"
)

FEW = 0.1
"""The part of a tensor's elements that may be found in its old values by chance."""


class Sifting:
    """Says which tensors were written since.

    If no rank holds any old value of a tensor, it was written, and nothing more is known of it. If some ranks hold old
    values and others do not, that is a finding, unless they had different ones from the start. Buffers that have other
    values than before, the same on every rank, were computed again.
    """

    def __init__(
        self,
        kept: Mapping[str, Kept],
        chosen: Chosen,
        equal: Collection[str] = (),
        how: Callable[[Collection[str]], Mapping[str, str]] | None = None,
    ) -> None:
        self._equal = equal
        self._how = how
        self._samples = {name: one.sample for name, one in kept.items() if name in chosen.before}
        self._snapshots = chosen.snapshots
        self._elsewhere = chosen.elsewhere

    def __call__(self, places: Mapping[str, NDArray[np.int64] | None]) -> dict[str, str]:
        """Return which of this job's tensors are not to be checked, and why. Every rank calls this."""
        mine = {name: self._found(name, ids) for name, ids in places.items() if name in self._snapshots}
        of_all = of_all_ranks((mine, self._samples))
        changed = (name for name, ids in places.items() if ids is not None and name in self._snapshots)
        not_known = dict.fromkeys((name for name in changed if name in self._equal), AGAIN)
        for name in sorted({name for found, _ in of_all for name in found}):
            lost = {
                samples.get(name) for found, samples in of_all if found.get(name, Found.AS_CLAIMED) < Found.AS_CLAIMED
            }
            first = next((samples[name] for _, samples in of_all if samples.get(name) is not None), None)
            if name in not_known:
                continue
            if lost - {None, first}:
                not_known[name] = DIFFERED
            elif not any(found.get(name) for found, _ in of_all):  # NONE is false
                not_known[name] = self._written(name)
        written = [name for name, why in not_known.items() if why == self._written(name) != WRITTEN]
        by_rule = self._how(written) if self._how is not None else {}
        return not_known | {name: f"{self._opened(name)} {how}" for name, how in by_rule.items()}

    def _found(self, name: str, ids: NDArray[np.int64] | None) -> Found:
        # Compared with what another machine's rank had, a shard says nothing of the first rank's values.
        return min(_found(ids), Found.SOME) if name in self._elsewhere else _found(ids)

    def _written(self, name: str) -> str:
        path = self._snapshots[name]
        if str(path) == NAME:
            return WRITTEN
        return f"{self._opened(name)} no rank holds any of the values that it has there"

    def _opened(self, name: str) -> str:
        return f"the job opened {printable(self._snapshots[name].name)}, and"


class Found(IntEnum):
    """How much of its tensor's old values a shard has."""

    NONE = 0
    SOME = 1
    AS_CLAIMED = 2


def _found(ids: NDArray[np.int64] | None) -> Found:
    if ids is None:
        return Found.AS_CLAIMED
    return Found.SOME if bool(np.mean((ids != ID_NONE) & (ids != 0)) > FEW) else Found.NONE


def equal_buffers(locals_: Iterable[Local]) -> frozenset[str]:
    """Return the buffers without a claim that are bitwise the same on every rank. Every rank calls this."""
    sums = {
        local.name: crc32(bits_of_tensor(local.values).tobytes())
        for local in locals_
        if local.role == "buffer" and local.claim is None and not local.values.is_meta
    }
    first, *others = of_all_ranks(sums)
    return frozenset(name for name, own in first.items() if all(other.get(name) == own for other in others))
