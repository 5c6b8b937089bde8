"""Heat on the mesh: a number for each rank, and how much it is beside those of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.dump.costs.comms import received
from shardviz.dump.costs.memory import memory_table
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.model.palette import HEAT_SIGNS
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.report import Report
    from shardviz.dump.dump import Dump


@dataclass(frozen=True)
class Heat:
    """One number for each rank.

    Attributes:
        title: What is counted.
        by_rank: The numbers; ranks that are not in it have none.
        in_bytes: Whether they are bytes.
    """

    title: str
    by_rank: Mapping[int, int]
    in_bytes: bool = False

    def level(self, rank: int) -> int:
        """Return how hot a rank is: 0 for the least of all ranks, 7 for the most, -1 if nothing is known."""
        if rank not in self.by_rank:
            return -1
        least, most = self.ends
        return (self.by_rank[rank] - least) * (len(HEAT_SIGNS) - 1) // (most - least) if most > least else 0

    def sign(self, rank: int) -> str:
        """Return the sign of a rank's level; `?` where nothing is known."""
        level = self.level(rank)
        return HEAT_SIGNS[level] if level >= 0 else "?"

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The least and the most that any rank has."""
        return min(self.by_rank.values(), default=0), max(self.by_rank.values(), default=0)

    def text(self, count: int) -> str:
        """Write one of the numbers."""
        return bytes_text(count) if self.in_bytes else f"{count:,}"

    def __str__(self) -> str:
        """Return what is counted, the least and the most, and which ranks have these."""
        least, most = self.ends
        if least == most:
            return f"{self.title}: {self.text(most)} on every rank"
        ends = ((HEAT_SIGNS[0], least), (HEAT_SIGNS[-1], most))
        return f"{self.title}: " + ", ".join(f"{sign} {self.text(end)} on {self._with(end)}" for sign, end in ends)

    def _with(self, count: int) -> str:
        return ranks_in_words([rank for rank, own in self.by_rank.items() if own == count], 40)


def heats_of(dump: Dump, report: Report | None = None) -> list[Heat]:
    """Return what can be shown as heat: bytes held, findings, bytes received in a step; none if all are nothing."""
    found = [bytes_held(dump), findings_on(dump, report), bytes_received(dump)]
    return [heat for heat in found if any(heat.by_rank.values())]


def bytes_held(dump: Dump) -> Heat:
    """Count the bytes of all tensors that a rank holds."""
    return Heat("bytes held", {rank: sum(sizes) for rank, sizes in memory_table(dump).by_rank.items()}, in_bytes=True)


def findings_on(dump: Dump, report: Report | None) -> Heat:
    """Count the findings that name a rank; one that many tensors have counts once for each."""
    named = Counter[int]()
    for finding in report.findings if report else ():
        named.update(dict.fromkeys(finding.ranks, len(finding.each)))
    return Heat("findings", {rank: named[rank] for rank in dump.files.mesh.ranks})


def bytes_received(dump: Dump) -> Heat:
    """Count the bytes that a rank receives in a step."""
    counted: dict[int, int] = {}
    for record, ranks in dump.files.alike():
        counted |= dict.fromkeys(ranks, sum(map(received, record.collectives)))
    return Heat("bytes received in a step", dict(sorted(counted.items())), in_bytes=True)
