"""`collective-mismatch`: a collective returned other numbers than its definition gives for its inputs.

Ranks are counted within the group, `size` of them; parts are equal and in the group's order. The result of a
`reduce` or `gather` is defined on its root only, and not looked at elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.errors import DumpError
from shardviz.explain.step.sums import WrongCollective
from shardviz.explain.templates import number
from shardviz.relate.tolerance import SINGLE
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import CallRecord
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.relate.relations import Related

    Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A rank that has something else after a collective than is defined."""

    call: CallRecord
    after: Values
    expected: Values


@dataclass(frozen=True)
class CallResults:
    """What ranks have after a collective, compared with what its definition gives them.

    Attributes:
        wrong: The ranks that have something else.
        related: None, as no relation is looked for.
    """

    wrong: Mapping[int, Wrong]
    related: Related | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """These ranks, rising."""
        return tuple(sorted(self.wrong))

    def wanted_of(self, rank: int) -> Values:
        """Return what a rank should have."""
        return self.wrong[rank].expected

    def held_of(self, rank: int) -> Values:
        """Return what a rank has."""
        return self.wrong[rank].after


MAX_SHOWN = 8

DEFINITIONS: Mapping[str, Callable[[Values, int], Values | None]] = {
    "broadcast": lambda before, me: before[0],
    "reduce": lambda before, me: None if me else before.sum(0),
    "all_reduce": lambda before, me: before.sum(0),
    "scatter": lambda before, me: np.split(before[0], len(before))[me],
    "gather": lambda before, me: None if me else before,
    "all_gather": lambda before, me: before,
    "reduce_scatter": lambda before, me: np.split(before.sum(0), len(before))[me],
    "all_to_all": lambda before, me: np.concatenate([np.split(row, len(before))[me] for row in before]),
    "send_recv": lambda before, me: before[me - 1],
}
"""What rank `me` of a group has after a collective, of what all had before, `[size, ...]`; the root is the first.

`send_recv` is a ring: each gets what the rank before it had, the first what the last had.
"""


def check_collectives(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield the collectives of a step that did not give what they are defined to give, once for all groups."""
    wrong: dict[tuple[str, str], dict[int, Wrong]] = {}
    for call in calls_of(dump):
        try:
            wrong.setdefault((call.module, call.op), {}).update(wrong_after(dump, call))
        except (DumpError, ValueError) as error:
            yield NotChecked(call.module, f"{call.op} over ranks {listed(call.ranks, MAX_SHOWN)}: {error}", "step")
    mesh = dump.files.mesh
    yield from (_finding(mesh, module, op, ranks) for (module, op), ranks in wrong.items() if ranks)


def calls_of(dump: Dump) -> list[CallRecord]:
    """Return the calls of a step whose results were written down, each once."""
    return list(dict.fromkeys(call for rank in dump.files.ranks.values() for call in rank.calls))


def wrong_after(dump: Dump, call: CallRecord) -> dict[int, Wrong]:
    """Return the ranks of a group that have something else than is defined.

    Raises:
        DumpError: The dump does not have what the ranks had.
        ValueError: They had tensors of different shapes, or such as cannot be parted.
    """
    if call.op not in DEFINITIONS:
        raise ValueError(f"shardviz has no definition of {call.op}")
    before = np.stack([values_of(dump, f"{call.module}.before", rank) for rank in call.ranks])
    wrong = {}
    for me, rank in enumerate(call.ranks):
        expected = DEFINITIONS[call.op](before, me)
        if expected is not None:
            after = values_of(dump, call.module, rank)
            if after.shape != expected.shape or not np.allclose(after, expected, rtol=SINGLE, atol=0):
                wrong[rank] = Wrong(call, after, expected)
    return wrong


def values_of(dump: Dump, name: str, rank: int) -> Values:
    """Return a rank's values of a step, by their name.

    Raises:
        DumpError: It wrote none.
    """
    tensor = dump.find("step", "activation", name)
    if tensor is None or rank not in tensor.shards:
        raise DumpError(f"rank {rank} wrote no {name}")
    return dump.values(tensor.shards[rank], name)


def _finding(mesh: Mesh, module: str, op: str, ranks: Mapping[int, Wrong]) -> Finding:
    rank, first = next(iter(sorted(ranks.items())))
    axes = mesh.axes_within(first.call.ranks)
    over = f"over ranks {listed(first.call.ranks, MAX_SHOWN)}"
    group = f"along {' and '.join(axes)}, {over}," if axes else over
    finding = WrongCollective().finding(
        module,
        tuple(sorted(ranks)),
        f"{op} {group} gave rank {rank} {_shown(first.after)}; the ranks' inputs give {_shown(first.expected)}",
    )
    return finding.seen_in(CallResults(ranks))


def _shown(values: Values) -> str:
    return f"[{listed(map(number, values.ravel()), MAX_SHOWN)}]"
