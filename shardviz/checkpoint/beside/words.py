"""Ranks and their rows in sentences, and where shards are that are not what they claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.order.case import Case
from shardviz.check.order.rules.places import check_places
from shardviz.errors import ShardvizError
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardviz.checkpoint.beside.job import Live, Piece
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding
    from shardviz.layout.region import Region

AS_HASHED = "the dump has hashes of the job's values only"
DIFFERENT = ("has what the checkpoint has", "have what the checkpoint has")
MOST_PARTS = 3
"""Parts of a tensor that are named."""


def ranks_of(pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Return the ranks of some shards, rising."""
    return tuple(sorted({piece.rank for piece in pieces}))


def in_words(pieces: Sequence[Piece], live: Live) -> str:
    """Name shards by their ranks and the parts that they claim: `ranks 1, 3 in [2:4, 0:8]`; `all ranks`."""
    by_part: dict[Region | None, list[Piece]] = {}
    if len(pieces) == len(live.pieces) > 1:
        return f"all of {named_ranks(ranks_of(pieces))}"
    for piece in pieces:
        by_part.setdefault(piece.claimed, []).append(piece)
    texts = (f"{named_ranks(ranks_of(same))} in {part}" for part, same in by_part.items())
    return listed(texts, MOST_PARTS)


def holding(pieces: Sequence[Piece], live: Live) -> str:
    """Name shards as what holds something."""
    return f"{in_words(pieces, live)} {'hold' if len(pieces) > 1 else 'holds'}"


def name_places(live: Live, parts: Mapping[int, Region], dump: Dump) -> tuple[str, Finding | None]:
    """Say what ranks hold instead of what they claim; with what a check of the job finds there, if it does.

    Args:
        live: The tensor.
        parts: Where the shards are found to be that are not what they claim, by rank.
        dump: The job's dump.
    """
    claimed = live.dumped.claimed
    is_one = len(live.dumped.claims) == 1 and claimed is not None
    finding = next(iter(_findings(live, parts, dump)), None) if is_one else None
    if finding is None:
        texts = (f"rank {rank} has {part}" for rank, part in parts.items())
        return f"{listed(texts, MOST_PARTS)} of the checkpoint's", None
    where = f"the job claims {finding.claimed}, and holds {finding.held} of the checkpoint"
    return f"{where}: {finding.summary}", finding


def _findings(live: Live, parts: Mapping[int, Region], dump: Dump) -> list[Finding]:
    """Return what a check of the job says of shards that are somewhere else."""
    claimed = live.dumped.claimed
    assert claimed is not None, "the caller has looked"
    mesh = claimed.mesh
    shards = {mesh.coord_of(piece.rank): piece for piece in live.pieces if piece.rank in mesh}
    regions = {at: parts.get(piece.rank, piece.claimed) for at, piece in shards.items()}
    known = {at: region for at, region in regions.items() if region is not None}
    records = {at: piece.shard for at, piece in shards.items()}
    case = Case(dump, live.dumped, live.name, mesh, claimed, records, known, {})
    try:
        return list(check_places(case))
    except ShardvizError:  # too many elements to be counted
        return []
