"""What became of one tensor between a job and a checkpoint, with the ranks that have it otherwise and their rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.beside.reading import Reader
from shardviz.checkpoint.beside.shapes import of_another_shape
from shardviz.checkpoint.beside.words import AS_HASHED, DIFFERENT, holding, in_words, name_places, ranks_of
from shardviz.checkpoint.comparing.agreement import can_cast
from shardviz.checkpoint.comparing.changed.numbers import NARROW, WIDE
from shardviz.errors import DumpError
from shardviz.explain.conversion import NarrowedOnTheWay, OneSidedTie
from shardviz.explain.files import NeverLoaded, ValuesOfAnotherStep
from shardviz.layout.region import index_of
from shardviz.relate.casts import cast, is_narrower
from shardviz.text import counted, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.checkpoint.beside.job import Live, Piece
    from shardviz.checkpoint.beside.searching import Search
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.tensor import Tensor
    from shardviz.dump.dump import Dump


@dataclass(frozen=True)
class Sorted:
    """A tensor's shards by what their hashes say.

    Attributes:
        right: Those that are what they claim.
        wrong: Those that are something else.
        unknown: Those that nothing is known of, with why.
    """

    right: tuple[Piece, ...]
    wrong: tuple[Piece, ...]
    unknown: tuple[tuple[Piece, str], ...]


def judge(outcome: Outcome, live: Live, entry: Tensor, dump: Dump, search: Search) -> Outcome:
    """Return what became of a tensor that both have.

    Args:
        outcome: Its names.
        live: What the job has.
        entry: What the checkpoint has, or what is made of it.
        dump: The job's dump.
        search: Where shards are looked for that are not what they claim.
    """
    try:
        if not can_cast(live.dtype, entry.dtype):
            why = f"it is {live.dtype} and {entry.dtype}, and how one is rounded to the other is not known"
            return outcome.became("not-compared", why)
        if live.shape != entry.shape:
            return of_another_shape(outcome, live, entry)
        reader = Reader(entry, live.dtype, live.index_shape)
        found = sort_pieces(live, reader)
        if not found.wrong:
            return _nothing_wrong(outcome, live, entry, found)
        return _something_wrong(outcome, live, entry, dump, search, reader, found)
    except DumpError as error:
        return outcome.became("not-compared", error.message)


def sort_pieces(live: Live, reader: Reader) -> Sorted:
    """Return which shards are what they claim.

    Raises:
        DumpError: The checkpoint cannot be read.
    """
    right, wrong, unknown = [], [], []
    for piece in live.pieces:
        if piece.claimed is None or not piece.digest:
            unknown.append((piece, piece.why or "it is on the meta device, and has no values"))
        elif piece.claimed.shape == piece.shape and _is_right(piece, live, reader):
            right.append(piece)
        elif is_narrower(reader.entry.dtype, live.dtype) and piece.bits is None and not piece.is_alike:
            types = f"the job has {live.dtype}, the checkpoint {reader.entry.dtype}"
            unknown.append((piece, f"{types}, and {AS_HASHED}: what it is rounded to is not known"))
        else:
            wrong.append(piece)
    return Sorted(tuple(right), tuple(wrong), tuple(unknown))


def _is_right(piece: Piece, live: Live, reader: Reader) -> bool:
    assert piece.claimed is not None, "the caller has looked"
    if reader.is_held(piece.claimed, piece.digest):
        return True
    narrow = reader.entry.dtype
    if piece.bits is None or not is_narrower(narrow, live.dtype):
        return False
    mine, theirs = (cast(bits, live.dtype, narrow) for bits in (piece.bits, reader.bits(piece.claimed)))
    return mine is not None and theirs is not None and np.array_equal(mine, theirs)


def _nothing_wrong(outcome: Outcome, live: Live, entry: Tensor, found: Sorted) -> Outcome:
    if found.unknown:
        why = found.unknown[0][1]
        same = [one.rank for one, reason in found.unknown if reason == why]
        return outcome.became(
            "not-compared", f"{named_ranks(same)}: {why}", ranks=ranks_of(p for p, _ in found.unknown)
        )
    if live.absent:
        why = f"the dump has no {named_ranks(live.absent)}; what the others hold is what the checkpoint has"
        return outcome.became("not-compared", why, ranks=live.absent)
    if live.dtype != entry.dtype:
        why = f"{live.dtype} in the job, {entry.dtype} in the checkpoint, the values are equal after the cast"
        return outcome.became("cast", why)
    return outcome


def _something_wrong(
    outcome: Outcome, live: Live, entry: Tensor, dump: Dump, search: Search, reader: Reader, found: Sorted
) -> Outcome:
    """Return what the shards are that are not what they claim."""
    wrong, ranks = found.wrong, ranks_of(found.wrong)
    but = _but(found)
    if bad := [piece for piece in wrong if piece.claimed is not None and piece.claimed.shape != piece.shape]:
        first = bad[0]
        what = f"rank {first.rank} has {list(first.shape)}, its part is {list(first.claimed.shape)}"  # type: ignore[union-attr]
        return outcome.became("other", f"{what}{but}", ranks=ranks)
    if all(piece.is_alike for piece in wrong) and any(math.prod(piece.shape) > 1 for piece in wrong):
        does = "hold" if len(ranks) > 1 else "holds"
        what = f"{named_ranks(ranks)} {does} a single number throughout, the checkpoint does not"
        return outcome.became("other", what + but, NeverLoaded(), ranks=ranks)
    parts = search.regions(live, wrong, reader)
    outcome = replace(outcome, parts=tuple(sorted(parts.items())))
    if len(parts) == len(wrong) and (named := name_places(live, parts, dump)):
        placed = outcome.became("permuted", named.why + but, named.explanation, ranks=ranks)
        return replace(placed, cause=named.cause, fix=named.fix)
    if name := _other_name(live, wrong, entry, search):
        words = f"{holding(wrong, live)} the checkpoint's {printable(name)}{but}"
        if not any(name.endswith(tied) for tied in live.tied):
            return outcome.became("moved", words, ranks=ranks)
        return outcome.became("other", words, OneSidedTie(of_job=True), ranks=ranks)
    if step := search.step_of(live, wrong, entry):
        what = f"{in_words(wrong, live)} {'have' if len(ranks) > 1 else 'has'} what {step.path} has{but}"
        return outcome.became("stale", what, ValuesOfAnotherStep(step.path.name, of_job=True), ranks=ranks)
    if narrow := _through(live, wrong, entry):
        what = f"the job has {live.dtype} values that were rounded to {narrow} on the way{but}"
        return outcome.became("cast", what, NarrowedOnTheWay(narrow, live.dtype), ranks=ranks)
    return outcome.became("other", _counted(live, wrong, reader, parts) + but, ranks=ranks)


def _but(found: Sorted) -> str:
    """Say which ranks are right, and which are not known."""
    some = f"; {named_ranks(ranks_of(found.right))} {DIFFERENT[len(found.right) > 1]}" if found.right else ""
    unknown = ranks_of(piece for piece, _ in found.unknown)
    return some + (f"; {named_ranks(unknown)} not compared" if unknown else "")


def _other_name(live: Live, wrong: Sequence[Piece], entry: Tensor, search: Search) -> str:
    """Return whose values shards have, where all have those of one other tensor."""
    names = {search.other_name(live, piece, entry.name) for piece in wrong}
    return names.pop() if len(names) == 1 else ""


def _through(live: Live, wrong: Sequence[Piece], entry: Tensor) -> str:
    """Return the narrower type through which all shards' values went."""
    for narrow in NARROW if live.dtype in WIDE and entry.dtype == live.dtype else ():
        turned = Reader(entry, live.dtype, live.index_shape, through=narrow)
        if all(piece.claimed and turned.is_held(piece.claimed, piece.digest) for piece in wrong):
            return narrow
    return ""


def _counted(live: Live, wrong: Sequence[Piece], reader: Reader, parts: Mapping[int, object]) -> str:
    """Say how many elements differ, and where, as far as the dump shows it."""
    for piece in wrong:
        if piece.bits is not None and piece.claimed is not None:
            differs = reader.bits(piece.claimed) != piece.bits
            at = piece.claimed.flat_ids(reader.shape)[differs][0]
            first = index_of(int(at), reader.shape)
            what = f"{int(differs.sum()):,} of {counted(differs.size, 'element')} on rank {piece.rank} differ"
            others = (
                f"; so on {named_ranks(ranks_of(one for one in wrong if one is not piece))}" if len(wrong) > 1 else ""
            )
            return f"{what}, the first at {first}{others}"
    some = f"; {named_ranks(sorted(parts))} {'have' if len(parts) > 1 else 'has'} other parts of it" if parts else ""
    return f"{holding(wrong, live)} other values, how many is not known: {AS_HASHED}{some}"
