"""What a rank has of a fused tensor whose parts are wrong: cut in one piece, in turns, or in another order."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.maps.views import interleave_views
from shardviz.errors import ShardvizError
from shardviz.explain.transfers import FusedCutOtherwise
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import cast_bits
from shardviz.live.capture.stamp import bits_of_tensor
from shardviz.testing.trips.filling import part_of_entry
from shardviz.testing.trips.mapping import entry_of
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.live.capture.locals import Local
    from shardviz.testing.trips.cutting import Cut, Piece
    from shardviz.testing.trips.judging import Part

    Fused = tuple[str, Cause] | None
    """What a rank has in the place of a fused tensor, in words, and why."""

MOST_ORDERED = 4
"""Parts that are tried in every order."""

MOST_BLOCKS = 256
MOST_ROWS = 12


def fused_findings(
    cut: Cut, theirs: Mapping[str, Local], pieces: Mapping[str, Piece], parts: Mapping[str, Sequence[Part]]
) -> tuple[list[Finding], set[str]]:
    """Return what became of fused tensors as a whole, and the names of their parts. Every rank calls this.

    Args:
        cut: How the target is cut.
        theirs: What this rank has of it.
        pieces: Its pieces.
        parts: What became of each piece on every rank.
    """
    wrong = {name for name, ranks in parts.items() if any(one.fate in ("other", "swapped") for one in ranks)}
    own: dict[str, dict[str, Piece]] = {}
    for name, piece in pieces.items():
        if piece.of[1] is not None:
            own.setdefault(piece.of[0], {})[name] = piece
    mine = {name: (_as(cut, theirs[name], each), tuple(each)) for name, each in own.items() if wrong & each.keys()}
    found: dict[str, dict[int, tuple[Fused, tuple[str, ...]]]] = {}
    for rank, of_rank in enumerate(of_all_ranks(mine)):
        for name, one in of_rank.items():
            found.setdefault(name, {})[rank] = one
    findings, settled = [], set[str]()
    for name, ranks in found.items():
        names = {one for _, each in ranks.values() for one in each}
        if (finding := _agreed(name, names, ranks, parts)) is not None:
            findings.append(finding)
            settled |= names
    return findings, settled


def _agreed(
    name: str,
    names: set[str],
    ranks: Mapping[int, tuple[Fused, tuple[str, ...]]],
    parts: Mapping[str, Sequence[Part]],
) -> Finding | None:
    """Return the finding of a fused tensor that has one thing on all ranks that have it wrong."""
    hit = sorted({one.rank for each in names for one in parts[each] if one.fate != "right"})
    words = {ranks[rank][0] for rank in hit if rank in ranks}
    if len(words) != 1 or (what := words.pop()) is None:
        return None
    held, cause = what
    total = len({one.rank for each in names for one in parts[each]})
    where = [f"{_part(each)} {one.text}" for each in sorted(names) for one in parts[each] if one.fate != "right"]
    text = f"{held}, on {len(hit):,} of {total:,} ranks"
    details = (f"wrong: {listed(where, MOST_ROWS)}",)
    return cause.finding(name, tuple(hit), text, kind="misordered", details=details)


def _as(cut: Cut, local: Local, pieces: Mapping[str, Piece]) -> Fused:
    """Return what a rank has in the place of a fused tensor, and why; None where that cannot be named."""
    got = bits_of_tensor(local.values)
    name = next(iter(pieces.values())).of[0]
    whole = None
    with suppress(ShardvizError):  # a layout of parts need not be one of the whole
        whole = cut.fused(name, local)
    wanted = part_of_entry(whole, cut.entry(name, None)) if whole is not None else None
    if wanted is not None and np.array_equal(cast_bits(wanted, cut.entry(name, None).dtype, local.values.dtype), got):
        return "the rank's rows are those of the whole, cut in one piece", FusedCutOtherwise("piece")
    right = [_right(cut, piece) for piece in pieces.values()]
    dim = cut.dim(name, local)
    if any(one is None for one in right):
        return None
    known = [one for one in right if one is not None]
    return next(_joined(known, got, dim, list(pieces)), None)


def _right(cut: Cut, piece: Piece) -> NDArray[Any] | None:
    entry = entry_of(cut.node(*piece.of))
    part = part_of_entry(piece.local, entry)
    return None if part is None else cast_bits(part, entry.dtype, piece.local.values.dtype)


def _joined(parts: list[NDArray[Any]], got: NDArray[Any], dim: int, names: list[str]) -> Iterator[tuple[str, Cause]]:
    """Yield the way in which a rank's right parts are put together: in turns, or in another order."""
    sizes = [part.shape[dim] for part in parts]
    for blocks in [one for one in range(2, math.gcd(*sizes) + 1) if math.gcd(*sizes) % one == 0][:MOST_BLOCKS]:
        views = interleave_views(got, [part.shape for part in parts], (dim, blocks))
        if all(np.array_equal(view.reshape(part.shape), part) for view, part in zip(views, parts, strict=True)):
            rows = " and ".join(dict.fromkeys(f"{size // blocks:,}" for size in sizes))
            yield f"its parts come in turns, in blocks of {rows} along dim {dim}", FusedCutOtherwise("turns")
    for order in list(permutations(range(len(parts))))[1:] if len(parts) <= MOST_ORDERED else ():
        if np.array_equal(np.concatenate([parts[at] for at in order], dim), got):
            of = ", ".join(_part(names[at]) for at in order)
            yield f"its parts come in the order {of}", FusedCutOtherwise("order")


def _part(name: str) -> str:
    """Return what a part of a fused tensor is made of: `q` of `qkv (q)`."""
    return name.rpartition(" (")[2].rstrip(")")
