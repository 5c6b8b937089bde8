"""The memory of modules on all ranks: each layer's bytes, the fullest rank's, how uneven they are, and bars."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from shardviz.dump.costs.memory import ROLES
from shardviz.text import bytes_text

from .tree import Node, tree_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.check.verdicts import Verdict
    from shardviz.dump.costs.memory import Counted

    from .document import Document
    from .tree import TreeLine

    Bytes = NDArray[np.int64]

    """Bytes, of each group of ranks that hold as much as each other; where ranks are meant, of each rank."""

    Flags = NDArray[np.bool_]

    """Whether the ranks of each group have a part."""


EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, width: int) -> str:
    """Draw a share of the longest bar; whatever is not nothing is seen.

    Args:
        share: The share, from 0 to 1.
        width: The columns of the longest bar, which the text takes in any case.
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width)


@dataclass(frozen=True)
class Spread:
    """Bytes over the ranks.

    Attributes:
        most: Those of the fullest rank.
        mean: Their mean over the ranks that have a part, be it an empty one.
        least: Those of the emptiest of these.
    """

    most: int
    mean: float
    least: int

    @property
    def imbalance(self) -> float:
        """The fullest rank's bytes over the mean; 1 where all hold the same."""
        return self.most / self.mean if self.mean else 1.0


def spread(taken: Bytes, has: Flags, ranks: NDArray[np.int64] | None = None) -> Spread:
    """Sum bytes up, of the ranks that have a part: those of another pipeline stage have none.

    Args:
        taken: Bytes on a rank of each group.
        has: Which groups have a part.
        ranks: How many ranks each group has; None where all have as many.
    """
    held = taken[has]
    if not held.size:
        return Spread(0, 0.0, 0)
    return Spread(
        int(held.max()), float(np.average(held, weights=None if ranks is None else ranks[has])), int(held.min())
    )


@dataclass(frozen=True)
class UsageEntry:
    """A tensor that takes memory, or identical layers of one, as the tree needs it.

    Attributes:
        names: Its names.
        role: What it is to the model.
        widths: For each name the bytes of an element.
        taken: By the bytes of an element, the bytes of one name on a rank of each group.
        has: Which groups have a part, be it an empty one.
    """

    names: tuple[str, ...]
    role: str
    widths: dict[str, int]
    taken: dict[int, Bytes] = field(compare=False, repr=False)
    has: Flags = field(compare=False, repr=False)
    is_state: bool = False
    short_layout: ClassVar[str] = ""
    facts: ClassVar[str] = ""

    @property
    def suffix(self) -> str:
        """Its role, unless it is a parameter."""
        return "" if self.role == "param" else self.role

    def verdict_of(self, name: str) -> Verdict:
        """Return no verdict: layers differ in bytes alone here."""
        return "good"

    def of(self, name: str) -> Bytes:
        """Return the bytes of a name on a rank of each group."""
        return self.taken[self.widths[name]]

    @property
    def together(self) -> Bytes:
        """The bytes of all its names on a rank of each group."""
        names = Counter(self.widths.values())
        total: Bytes = np.sum([self.taken[width] * count for width, count in names.items()], axis=0)
        return total


@dataclass(frozen=True)
class EquallyFull:
    """Ranks that hold as many bytes as each other.

    Attributes:
        ranks: The ranks, rising.
        taken: The bytes of each.
    """

    ranks: tuple[int, ...]
    taken: int


@dataclass(frozen=True)
class Usage:
    """The memory of a run.

    Attributes:
        groups: The ranks that were read, in groups that hold as much of everything.
        entries: What takes memory.
    """

    groups: tuple[tuple[int, ...], ...]
    entries: Sequence[UsageEntry]
    _sums: dict[int, Bytes] = field(default_factory=dict, compare=False, repr=False)
    _flags: dict[int, Flags] = field(default_factory=dict, compare=False, repr=False)
    _keys: dict[tuple[int, ...], float] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def tree(self) -> Node:
        """The modules."""
        return tree_of(self.entries)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were read, rising."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        return np.array([len(group) for group in self.groups], np.int64)

    def _by_rank(self, taken: Bytes) -> Bytes:
        ranks = np.array([rank for group in self.groups for rank in group], np.int64)
        return np.repeat(taken, self._sizes)[ranks.argsort()]

    @cached_property
    def total(self) -> Bytes:
        """The bytes of each rank."""
        return self._by_rank(self._of(self.tree))

    @cached_property
    def equally_full(self) -> tuple[EquallyFull, ...]:
        """The ranks, those with as many bytes together, by the lowest of each."""
        groups: dict[int, list[int]] = {}
        for rank, taken in zip(self.ranks, self.total.tolist(), strict=True):
            groups.setdefault(taken, []).append(rank)
        return tuple(EquallyFull(tuple(ranks), taken) for taken, ranks in groups.items())

    @cached_property
    def each_rank(self) -> tuple[EquallyFull, ...]:
        """The ranks, one by one."""
        return tuple(EquallyFull((rank,), taken) for rank, taken in zip(self.ranks, self.total.tolist(), strict=True))

    @cached_property
    def fullest_first(self) -> tuple[EquallyFull, ...]:
        """The ranks, those with as many bytes together, the fullest first."""
        return tuple(sorted(self.equally_full, key=lambda group: -group.taken))

    @cached_property
    def each_fullest_first(self) -> tuple[EquallyFull, ...]:
        """The ranks one by one, the fullest first."""
        each = self.each_rank
        return tuple([each[at] for at in np.argsort(-self.total, kind="stable").tolist()])

    @cached_property
    def by_role(self) -> dict[str, Bytes]:
        """The bytes of each rank by role, in the order of columns."""
        taken: dict[str, Bytes] = {}
        for role in ROLES:
            entries = [entry.together for entry in self.entries if entry.role == role]
            if entries:
                taken[role] = self._by_rank(np.sum(entries, axis=0))
        return taken

    def _of(self, node: Node) -> Bytes:
        """Return the bytes of a module on a rank of each group, worked out once."""
        if id(node) not in self._sums:
            parts = [self._of(part) for part in node.parts.values()]
            tensors = [self.entries[node.entry].of(name) for name in node.names] if node.entry is not None else []
            self._sums[id(node)] = sum([*parts, *tensors], start=np.zeros(len(self.groups), np.int64))
        return self._sums[id(node)]

    def _of_line(self, line: TreeLine) -> Bytes:
        return sum((self._of(node) for node in line.nodes), start=np.zeros(len(self.groups), np.int64))

    def of(self, line: TreeLine) -> Bytes:
        """Return the bytes of all that a line is on each rank."""
        return self._by_rank(self._of_line(line))

    def spread(self, line: TreeLine | None = None) -> Spread:
        """Sum up the bytes of a line, or of all, over the ranks that have a part of it."""
        if line is None:
            return spread(self._of(self.tree), np.ones(len(self.groups), np.bool_), self._sizes)
        return spread(self._of_line(line), self._has(line.nodes[0]), self._sizes)

    def _has(self, node: Node) -> Flags:
        """Return which groups have a part of a module; those of alike ones are the same."""
        if id(node) not in self._flags:
            parts = [self._has(part) for part in node.parts.values()]
            tensors = [self.entries[node.entry].has] if node.entry is not None else []
            self._flags[id(node)] = np.any([*parts, *tensors, np.zeros(len(self.groups), np.bool_)], axis=0)
        return self._flags[id(node)]

    def largest_first(self, alike: Sequence[Node]) -> float:
        """Return a key that sorts modules by the bytes of their fullest rank, those that are alike together."""
        key = tuple(map(id, alike))
        if key not in self._keys:
            taken = self._of(alike[0]) if len(alike) == 1 else np.sum([self._of(node) for node in alike], axis=0)
            self._keys[key] = -float(taken.max(initial=0))
        return self._keys[key]


def usage_of(document: Document) -> Usage:
    """Return the memory of a dump's modules."""
    groups = document.dump.files.equally_full
    return Usage(groups, [_entry(item, [group[0] for group in groups]) for item in document.counted])


def _entry(item: Counted, ranks: Sequence[int]) -> UsageEntry:
    by_width = {width: name for name, width in item.widths.items()}
    taken = {
        width: np.array([item.on(rank, name) for rank in ranks], dtype=np.int64) for width, name in by_width.items()
    }
    has = np.array([rank in item.tensor.shards for rank in ranks], dtype=np.bool_)
    return UsageEntry(tuple(item.widths), item.tensor.role, dict(item.widths), taken, has, item.tensor.role == "optim")


def spread_text(shared: Spread, count: int = 1) -> tuple[str, str, str, str]:
    """Write how many layers there are, one's bytes on the fullest rank and on the mean one, and the imbalance."""
    each = f"{count:,} ×" if count > 1 else ""
    return (
        each,
        bytes_text(round(shared.most / count)),
        bytes_text(round(shared.mean / count)),
        f"{shared.imbalance:.2f}",
    )
