"""Checks that names share storage, with the check that compares a run with the unsharded model's ties."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from shardviz.check.values.ties import check_ties
from shardviz.dump.dump import Dump
from shardviz.dump.find import meant
from shardviz.dump.records.tensors import Stamp
from shardviz.explain.finding import Finding
from shardviz.explain.values import BrokenTie
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_tied(dump: Dump, first: str, others: Iterable[str]) -> list[Finding]:
    """Return findings for the names that do not share the first one's storage on some rank.

    Raises:
        ShardAssertionError: No rank has a tensor of one of the names, or no rank has both.
    """
    __tracebackhide__ = True
    shapes = {name: tensor.shape for tensor in dump.tensors for name in tensor.names}
    for name in (first, *others):
        if name not in shapes:
            raise ShardAssertionError(f"no rank has a tensor {name}\n  fix       {meant(name, [*shapes])}")
    stamps = (Stamp(first, 1, shapes[first]), *(Stamp(name, 1, shapes[name], tied_to=first) for name in others))
    run = msgspec.structs.replace(dump.files.run, stamps=stamps)
    wanted = Dump(replace(dump.files, run=run), dump.tensors)
    results = list(check_ties(wanted))
    for result in results:
        if not isinstance(result, Finding):
            raise ShardAssertionError(f"{result.tensor} and {first} cannot be tied: no rank has both")
    return [_reworded(result, first) for result in results if isinstance(result, Finding)]


def _reworded(finding: Finding, first: str) -> Finding:
    """Leave out the state before sharding, which an assertion cannot know, and the name that it was told first."""
    sentence = f"it does not share storage with {first} on {counted(len(finding.ranks), 'rank')}"
    cause = BrokenTie(finding.tensor, first, was_tied=False)
    return replace(finding, sentence=sentence, members=()).because(cause)
