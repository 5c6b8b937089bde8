"""Fused tensors of a target, judged whole: what stands in the place of a part, and how the parts were joined."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.maps.functions import views_in
from shardviz.checkpoint.maps.mapped_tensors import (
    Op,
    label_of,
)
from shardviz.errors import ShardvizError
from shardviz.explain.testing.transfers import FusedCutOtherwise
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import bits_of_tensor
from shardviz.testing.trips.contents import wanted_bits
from shardviz.testing.trips.pieces import dim_of_parts, entry_of
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.live.capture.locals import Local
    from shardviz.testing.trips.judging import PartOutcome
    from shardviz.testing.trips.pieces import PieceCuts, TargetPiece

    Fused = tuple[str, Cause] | None
    """What a rank has in the place of a fused tensor, in words, and why."""

MOST_BLOCKS = 256
MOST_ROWS = 12
MOST_ORDERED = 4
"""Parts that are tried in every order."""


def fused_findings(
    cut: PieceCuts,
    target_locals: Mapping[str, Local],
    pieces: Mapping[str, TargetPiece],
    parts: Mapping[str, Sequence[PartOutcome]],
) -> tuple[list[Finding], set[str]]:
    """Return findings of whole fused tensors, and their parts' names. Every rank calls this.

    Args:
        cut: How the target is cut.
        target_locals: What this rank has of it.
        pieces: Its pieces.
        parts: What became of each piece on every rank.
    """
    wrong = {name for name, ranks in parts.items() if any(one.fate in ("other", "swapped") for one in ranks)}
    groups: dict[str, dict[str, TargetPiece]] = {}
    own_fused: dict[str, tuple[Fused, tuple[str, ...]]] = {}
    for name, piece in pieces.items():
        if piece.of[1] is not None:
            groups.setdefault(piece.of[0], {})[name] = piece
        elif name in wrong and isinstance(node := cut.node(*piece.of), Op) and node.function == "interleave":
            own_fused[name] = _joined_not_interleaved(piece.local, node), (name,)
    own_fused |= {
        name: (_name_content(cut, target_locals[name], each), tuple(each))
        for name, each in groups.items()
        if wrong & each.keys()
    }
    fused: dict[str, dict[int, tuple[Fused, tuple[str, ...]]]] = {}
    for rank, of_rank in enumerate(of_all_ranks(own_fused)):
        for name, fused_here in of_rank.items():
            fused.setdefault(name, {})[rank] = fused_here
    findings, settled = [], set[str]()
    for name, ranks in fused.items():
        names = {one for _, each in ranks.values() for one in each}
        if (finding := _common_finding(name, names, ranks, parts)) is not None:
            findings.append(finding)
            settled |= names
    return findings, settled


def _common_finding(
    name: str,
    names: set[str],
    ranks: Mapping[int, tuple[Fused, tuple[str, ...]]],
    parts: Mapping[str, Sequence[PartOutcome]],
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


def _name_content(cut: PieceCuts, local: Local, pieces: Mapping[str, TargetPiece]) -> Fused:
    """Name what a rank has instead of a fused tensor, and the cause; return None if unknown."""
    got = bits_of_tensor(local.values)
    name = next(iter(pieces.values())).of[0]
    whole = None
    with suppress(ShardvizError):  # a layout of parts need not be one of the whole
        whole = cut.fused(name, local)
    expected = wanted_bits(whole, cut.entry(name, None)) if whole is not None else None
    if expected is not None and np.array_equal(expected, got):
        return "the rank's rows are those of the whole, cut in one piece", FusedCutOtherwise("piece")
    right = [wanted_bits(piece.local, cut.entry(*piece.of)) for piece in pieces.values()]
    answers = [one for one in right if one is not None]
    return (
        next(_name_join(answers, got, cut.dim(name, local), list(pieces)), None) if len(answers) == len(right) else None
    )


def _joined_not_interleaved(local: Local, node: Op) -> Fused:
    """Name what a rank has if it is parts one after the other, where a map interleaves them; else return None."""
    got, wanted = bits_of_tensor(local.values), wanted_bits(local, entry_of(node))
    dim = dim_of_parts(node, node.shape)
    of = " and ".join(map(label_of, node.parts)) if len(node.parts) == 2 else "its parts"
    joined = FusedCutOtherwise("joined")
    whole = wanted_bits(local, entry_of(replace(node, function="cat", numbers=(dim,))))
    if whole is not None and np.array_equal(whole, got):
        return f"{of} stand one after the other", joined
    shapes = [part.shape for part in node.parts]
    blocks = node.numbers[1] if len(node.numbers) > 1 else shapes[0][dim]
    if wanted is None or blocks * wanted.shape[dim] % node.shape[dim]:
        return None
    blocks = blocks * wanted.shape[dim] // node.shape[dim]
    own_shapes = [
        (*wanted.shape[:dim], size[dim] * wanted.shape[dim] // node.shape[dim], *wanted.shape[dim + 1 :])
        for size in shapes
    ]
    views = views_in(wanted, "interleave", own_shapes, (dim, blocks)) if blocks else []
    parts = [view.reshape(shape) for view, shape in zip(views, own_shapes, strict=True)] if views else []
    return (
        (f"the rank's parts of {of} stand one after the other", joined)
        if parts and np.array_equal(np.concatenate(parts, dim), got)
        else None
    )


def _name_join(parts: list[NDArray[Any]], got: NDArray[Any], dim: int, names: list[str]) -> Iterator[tuple[str, Cause]]:
    """Yield how a rank joined its right parts: interleaved, or in a different order."""
    sizes = [part.shape[dim] for part in parts]
    for blocks in [one for one in range(2, math.gcd(*sizes) + 1) if math.gcd(*sizes) % one == 0][:MOST_BLOCKS]:
        views = views_in(got, "interleave", [part.shape for part in parts], (dim, blocks))
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
