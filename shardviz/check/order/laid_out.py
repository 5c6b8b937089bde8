"""Every stamped tensor laid out once: checks, pictures, comparisons and assertions all read the same cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.order.case import cases_of

if TYPE_CHECKING:
    from shardviz.check.order.case import Case
    from shardviz.dump.dump import Dump, Tensor

MAX_KEPT = 1 << 24
"""Numbers that are kept of all cases together; past that, a tensor is laid out again when it is asked for."""

KEPT_PER_SHARD = 32
"""What a shard takes beside its ids, in numbers."""


class LaidOut:
    """The stamped tensors of a dump, each laid out when it is first asked for.

    Attributes:
        dump: The dump.
    """

    def __init__(self, dump: Dump) -> None:
        """Lay out nothing yet."""
        self.dump = dump
        self._cases: dict[tuple[str, str, bool], tuple[Case, ...]] = {}
        self._room = MAX_KEPT

    def cases(self, tensor: Tensor, name: str, *, claims: bool = True) -> tuple[Case, ...]:
        """Return a tensor's cases, one for each mesh that its ranks are on; none where it was not stamped.

        Args:
            tensor: The tensor, or the fold that it is in.
            name: Its name.
            claims: Whether the placements are used; they cannot be where even the global shape is wrong.

        Raises:
            DumpError: The dump does not have the ids, or there are too many to lay out.
        """
        if tensor.moment != "stamped":
            return ()
        key = (tensor.role, name, claims)
        if key not in self._cases:
            cases = tuple(cases_of(self.dump, tensor, name, claims=claims))
            size = sum(map(_size, cases))
            if size > self._room:
                return cases
            self._room -= size
            self._cases[key] = cases
        return self._cases[key]


def _size(case: Case) -> int:
    return len(case.shards) * KEPT_PER_SHARD + sum(ids.size for ids in case.ids.values())
