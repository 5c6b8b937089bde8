"""The memory of modules on all ranks: each layer's bytes, the fullest rank's, how uneven they are, and bars."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from shardviz.dump.costs import memory_table

from .tree import Node, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardviz.check.verdicts import Verdict
    from shardviz.dump.costs import CountedTensor, MemoryTable

    from .document import Document
    from .tree import TreeLine

    Bytes = NDArray[np.int64]
    """Bytes, of each group of ranks that hold as much of everything."""

    EquallyFull = tuple[tuple[int, ...], int]
    """Ranks that hold as many bytes as each other, rising, and the bytes of each."""


EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, width: int) -> str:
    """Draw a share of the longest bar; whatever is not nothing is seen."""
    eighths = min(max(round(share * width * 8), int(share > 0)), width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width)


@dataclass(frozen=True)
class Spread:
    """Bytes over the ranks: those of the fullest and of the emptiest that have a part, and their mean."""

    most: int
    mean: float
    least: int

    @property
    def imbalance(self) -> float:
        """The fullest rank's bytes over the mean; 1 if all hold the same."""
        return self.most / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class UsageEntry:
    """A tensor that takes memory, or identical layers of one, as the tree needs it.

    Attributes:
        groups: The groups that have a part, be it an empty one: ranks of another pipeline stage have none.
        taken: For each name its bytes on a rank of each of them.
    """

    names: tuple[str, ...]
    role: str
    groups: NDArray[np.intp] = field(compare=False, repr=False)
    taken: dict[str, Bytes] = field(compare=False, repr=False)
    listed: ClassVar[bool] = True

    def verdict_of(self, name: str) -> Verdict:
        """Return no verdict: layers differ in bytes alone here."""
        return "good"


@dataclass(frozen=True)
class Usage:
    """The memory of a run.

    Attributes:
        groups: The ranks that were read, in groups that hold as much of everything.
        entries: What takes memory.
        table: The bytes of each rank by role, as `shardviz show --memory` prints them.
    """

    groups: tuple[tuple[int, ...], ...]
    entries: Sequence[UsageEntry]
    table: MemoryTable

    @cached_property
    def tree(self) -> Node:
        """The modules."""
        return tree_of(self.entries)

    @cached_property
    def total(self) -> dict[int, int]:
        """The bytes of each rank."""
        return {rank: sum(sizes) for rank, sizes in self.table.by_rank.items()}

    @cached_property
    def lines(self) -> Callable[[bool, bool], tuple[EquallyFull, ...]]:
        """Returns the ranks, each alone or equally full ones together, fullest first or by number."""
        return cache(self._lines)

    def _lines(self, each: bool, fullest_first: bool) -> tuple[EquallyFull, ...]:
        groups: dict[int, list[int]] = {}
        for rank, taken in self.total.items():
            groups.setdefault(rank if each else taken, []).append(rank)
        lines = [(tuple(ranks), self.total[ranks[0]]) for ranks in groups.values()]
        return tuple(sorted(lines, key=lambda line: -line[1]) if fullest_first else lines)

    def _add(self, node: Node, taken: Bytes, has: NDArray[np.bool_]) -> None:
        """Add the bytes of a module on a rank of each group, and note which groups have a part of it."""
        for part in node.parts.values():
            self._add(part, taken, has)
        if node.entry is not None:
            entry = self.entries[node.entry]
            has[entry.groups] = True
            for name in node.names:
                taken[entry.groups] += entry.taken[name]

    def _sums(self, nodes: Sequence[Node]) -> tuple[Bytes, NDArray[np.bool_]]:
        taken, has = np.zeros(len(self.groups), np.int64), np.zeros(len(self.groups), np.bool_)
        for node in nodes:
            self._add(node, taken, has)
        return taken, has

    def spread(self, line: TreeLine | None = None) -> Spread:
        """Sum up the bytes of a line over the ranks that have a part of it, or of all over all ranks."""
        taken, has = self._sums(line.nodes if line is not None else (self.tree,))
        has = has if line is not None else np.ones(len(self.groups), np.bool_)
        held, sizes = taken[has], np.array([len(group) for group in self.groups])[has]
        if not held.size:
            return Spread(0, 0.0, 0)
        return Spread(int(held.max()), float(np.average(held, weights=sizes)), int(held.min()))

    def largest_first(self, alike: Sequence[Node]) -> float:
        """Return a key that sorts modules by the bytes of their fullest rank, those that are alike together."""
        return -float(self._sums(alike)[0].max(initial=0))


def usage_of(document: Document) -> Usage:
    """Return the memory of a dump's modules."""
    groups = document.dump.files.equally_full
    group_of = {group[0]: number for number, group in enumerate(groups)}
    return Usage(groups, [_entry(item, group_of) for item in document.counted], memory_table(document.dump))


def _entry(item: CountedTensor, group_of: dict[int, int]) -> UsageEntry:
    by_width = {width: item.bytes(name, group_of) for name, width in item.widths.items()}
    taken = {width: np.array([*sizes.values()], np.int64) for width, sizes in by_width.items()}
    by_name = {name: taken[width] for name, width in item.widths.items()}
    groups = [group_of[rank] for rank in next(iter(by_width.values()), ())]
    return UsageEntry(tuple(item.widths), item.tensor.role, np.array(groups, np.intp), by_name)
