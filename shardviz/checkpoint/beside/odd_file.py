"""One file of a checkpoint that alone differs from what a job holds, as that of another save does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.elsewhere.one_file import is_open, odd_file
from shardviz.checkpoint.records import Saved
from shardviz.explain.files import FileOfAnotherSave
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.checkpoint.beside.job import Live
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.records import Chunk
    from shardviz.checkpoint.tensor import Entry
    from shardviz.layout.region import Region

    Judged = tuple[Outcome, Live, Entry]


MAX_RANKS = 4


def with_odd_file(judged: Sequence[Judged]) -> list[Outcome]:
    """Say that all parts which ranks hold differently are in one file of the checkpoint."""
    odd = odd_file(1, (_files(*one) for one in judged if one[0].verdict != "not-compared"))
    if odd is None or not odd.differs:
        return [outcome for outcome, _, _ in judged]
    ranks = named_ranks({rank for outcome, _, _ in judged for rank in outcome.ranks}, MAX_RANKS)
    cause = FileOfAnotherSave(odd, "checkpoint", "job", ranks=ranks)
    return [
        outcome.became("other", outcome.why, cause, ranks=outcome.ranks) if is_open(outcome) else outcome
        for outcome, _, _ in judged
    ]


def _files(outcome: Outcome, live: Live, entry: Entry) -> tuple[set[str], set[str]]:
    """Return the files that have what ranks hold, and those that have something else."""
    if not isinstance(entry, Saved):
        return set(), set()
    wrong = [piece.claimed for piece in live.pieces if piece.rank in outcome.ranks and piece.claimed is not None]
    if outcome.ranks and not wrong:
        return set(), set(entry.files)
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in entry.chunks:
        if chunk.place is not None:
            found[any(_share(region, chunk) for region in wrong)].add(chunk.place.file)
    return found[False], found[True]


def _share(region: Region, chunk: Chunk) -> bool:
    """Whether a part and a chunk have elements in common."""
    if len(region.dims) != len(chunk.sizes):
        return True
    spans = zip(chunk.offsets, chunk.sizes, strict=True)
    return all(
        any(max(start, first) < min(stop, first + size) for start, stop in ranges)
        for ranges, (first, size) in zip(region.dims, spans, strict=True)
    )
