"""Verdicts on one tensor of a job and a checkpoint, with the ranks and rows that differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import Case
from shardviz.check.order.rules.places import check_places
from shardviz.checkpoint.comparing.equality import can_cast
from shardviz.checkpoint.comparing.one_tensor.changes import through_types
from shardviz.checkpoint.comparing.one_tensor.orders import MAX_PERMUTED
from shardviz.checkpoint.live_job.reading import Reader
from shardviz.errors import DumpError, ShardvizError
from shardviz.explain.checkpoints.conversion import NarrowedOnTheWay, OneSidedTie
from shardviz.explain.checkpoints.files import NeverLoaded, ValuesOfAnotherStep
from shardviz.groups import in_groups, the_only
from shardviz.layout.region import Region, index_of
from shardviz.relate.casts import cast, is_narrower
from shardviz.relate.values import padded_to
from shardviz.text import counted, listed, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardviz.checkpoint.comparing.equality import Turn
    from shardviz.checkpoint.comparing.outcome import Outcome, Verdict
    from shardviz.checkpoint.live_job.compare import Search
    from shardviz.checkpoint.live_job.job import JobShard, JobTensor
    from shardviz.checkpoint.records import Tensor
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding


MAX_PADDED = 1 << 30
"""Elements of a tensor to which zeros are added."""

AS_HASHED = "the dump has hashes of the job's values only"
DIFFERENT = ("matches the checkpoint", "match the checkpoint")


@dataclass(frozen=True)
class ShardVerdicts:
    """A tensor's shards: right, wrong or unknown, judged by their hashes.

    Attributes:
        right: Those that are what they claim.
        wrong: Those that are something else.
        unknown: Those that nothing is known of, with why.
    """

    right: tuple[JobShard, ...]
    wrong: tuple[JobShard, ...]
    unknown: tuple[tuple[JobShard, str], ...]


def judge(outcome: Outcome, live: JobTensor, saved: Tensor, dump: Dump, search: Search) -> Outcome:
    """Return what became of a tensor that both have.

    Args:
        saved: What the checkpoint has, or what is made of it.
        search: Where shards are looked for that are not what they claim.
    """
    try:
        if not can_cast(live.dtype, saved.dtype):
            why = f"it is {live.dtype} and {saved.dtype}, and how one is rounded to the other is not known"
            return outcome.became("not-compared", why)
        if live.shape != saved.shape:
            return of_another_shape(outcome, live, saved)
        reader = Reader(saved, live.dtype, live.index_shape)
        pieces = sort_pieces(live, reader)
        if not pieces.wrong:
            return _judge_right_shards(outcome, live, saved, pieces)
        return _judge_wrong_shards(outcome, live, saved, dump, search, reader, pieces)
    except DumpError as error:
        return outcome.failed(error)


def sort_pieces(live: JobTensor, reader: Reader) -> ShardVerdicts:
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
    return ShardVerdicts(tuple(right), tuple(wrong), tuple(unknown))


def _is_right(piece: JobShard, live: JobTensor, reader: Reader) -> bool:
    assert piece.claimed is not None, "the caller has looked"
    if reader.is_held(piece.claimed, piece.digest):
        return True
    narrow = reader.entry.dtype
    if piece.bits is None or not is_narrower(narrow, live.dtype):
        return False
    held, expected = (cast(bits, live.dtype, narrow) for bits in (piece.bits, reader.bits(piece.claimed)))
    return held is not None and expected is not None and np.array_equal(held, expected)


def _judge_right_shards(outcome: Outcome, live: JobTensor, saved: Tensor, pieces: ShardVerdicts) -> Outcome:
    if pieces.unknown:
        why = pieces.unknown[0][1]
        same = [one.rank for one, reason in pieces.unknown if reason == why]
        return outcome.became(
            "not-compared", f"{named_ranks(same)}: {why}", ranks=ranks_of(p for p, _ in pieces.unknown)
        )
    if live.absent:
        why = f"the dump has no {named_ranks(live.absent)}; the other ranks match the checkpoint"
        return outcome.became("not-compared", why, ranks=live.absent)
    if live.dtype != saved.dtype:
        why = f"{live.dtype} in the job, {saved.dtype} in the checkpoint; the values are equal after the cast"
        return outcome.became("cast", why)
    return outcome


def _judge_wrong_shards(
    outcome: Outcome, live: JobTensor, saved: Tensor, dump: Dump, search: Search, reader: Reader, pieces: ShardVerdicts
) -> Outcome:
    """Explain shards that are not what they claim."""
    wrong, ranks = pieces.wrong, ranks_of(pieces.wrong)
    but = _other_shards_text(pieces)
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
    if len(parts) == len(wrong):
        why, there = name_places(live, parts, dump)
        if there is None:
            return outcome.became("permuted", why + but, ranks=ranks)
        fix = f"{there.fix}; if the job is right, write the checkpoint again" if there.fix else ""
        placed = outcome.became("permuted", why + but, there.explanation, ranks=ranks)
        return replace(placed, cause=there.cause, fix=fix)
    if name := the_only({search.other_name(live, piece, saved.name) for piece in wrong}):
        words = f"{holders_text(wrong, live)} the checkpoint's {printable(name)}{but}"
        if not any(name.endswith(tied) for tied in live.tied):
            return outcome.became("moved", words, ranks=ranks)
        return outcome.became("other", words, OneSidedTie(of_job=True), ranks=ranks)
    if step := search.step_of(live, wrong, saved):
        what = f"{in_words(wrong, live)} {'have' if len(ranks) > 1 else 'has'} what {step.path} has{but}"
        return outcome.became("stale", what, ValuesOfAnotherStep(step.path.name, of_job=True), ranks=ranks)
    if narrow := _narrower_dtype(live, wrong, saved):
        what = f"the job's {live.dtype} values were rounded to {narrow} on the way{but}"
        return outcome.became("cast", what, NarrowedOnTheWay(narrow, live.dtype), ranks=ranks)
    return outcome.became("other", _difference_text(live, wrong, reader, parts) + but, ranks=ranks)


def _other_shards_text(pieces: ShardVerdicts) -> str:
    """Say which ranks are right, and which are not known."""
    some = f"; {named_ranks(ranks_of(pieces.right))} {DIFFERENT[len(pieces.right) > 1]}" if pieces.right else ""
    unknown = ranks_of(piece for piece, _ in pieces.unknown)
    return some + (f"; {named_ranks(unknown)} not compared" if unknown else "")


def _narrower_dtype(live: JobTensor, wrong: Sequence[JobShard], saved: Tensor) -> str:
    """Return the narrower type through which all shards' values went."""
    for narrow in through_types(live.dtype, live.dtype) if saved.dtype == live.dtype else ():
        turned = Reader(saved, live.dtype, live.index_shape, through=narrow)
        if all(piece.claimed and turned.is_held(piece.claimed, piece.digest) for piece in wrong):
            return narrow
    return ""


def _difference_text(live: JobTensor, wrong: Sequence[JobShard], reader: Reader, parts: Mapping[int, object]) -> str:
    """Say how many elements differ, and where, as far as the dump shows it."""
    for piece in wrong:
        if piece.bits is not None and piece.claimed is not None:
            differs = reader.bits(piece.claimed) != piece.bits
            at = piece.claimed.flat_ids(reader.shape)[differs][0]
            first = index_of(int(at), reader.shape)
            what = f"{int(differs.sum()):,} of {counted(differs.size, 'element')} on rank {piece.rank} differ"
            others = (
                f"; likewise on {named_ranks(ranks_of(one for one in wrong if one is not piece))}"
                if len(wrong) > 1
                else ""
            )
            return f"{what}, the first at {first}{others}"
    some = f"; {named_ranks(sorted(parts))} {'have' if len(parts) > 1 else 'has'} other parts of it" if parts else ""
    return f"{holders_text(wrong, live)} other values, how many is not known: {AS_HASHED}{some}"


def of_another_shape(outcome: Outcome, live: JobTensor, saved: Tensor) -> Outcome:
    """Return what became of a tensor that has another shape in the checkpoint.

    Raises:
        DumpError: The checkpoint cannot be read.
    """
    if all(piece.shard.layout is None for piece in live.pieces) and (dim := _odd_dim(live, saved)) is not None:
        return _of_plain_parts(outcome, live, saved, dim)
    best: tuple[JobShard, ...] = ()
    for verdict, why, turn in _turns(live.shape, saved.shape):
        reader = Reader(saved, live.dtype, live.index_shape, turn)
        right = tuple(
            piece for piece in live.pieces if piece.claimed is not None and reader.is_held(piece.claimed, piece.digest)
        )
        if len(right) == len(live.pieces):
            return outcome.became(verdict, why)
        best = right if verdict == "padded" else best
    shapes = f"{live.dtype}{list(live.shape)} in the job, {saved.dtype}{list(saved.shape)} in the checkpoint"
    if best:
        others = ranks_of(piece for piece in live.pieces if piece not in best)
        why = f"{named_ranks(ranks_of(best))} the same as far as both go; of {named_ranks(others)} {AS_HASHED}"
        return outcome.became("padded", f"{shapes}: {why}", ranks=others)
    return outcome.became("other", shapes)


def _turns(shape: tuple[int, ...], stored: tuple[int, ...]) -> Iterator[tuple[Verdict, str, Turn]]:
    """Yield what may have made a checkpoint's tensor one of the job's shape."""
    odd = [dim for dim, pair in enumerate(zip(shape, stored, strict=False)) if pair[0] != pair[1]]
    if len(shape) == len(stored) and len(odd) == 1 and math.prod(shape) <= MAX_PADDED:
        (dim,) = odd
        cut = (*(slice(None),) * dim, slice(shape[dim]))
        yield "padded", _padded(dim, shape[dim], stored[dim]), lambda whole: padded_to(whole, shape)[cut]
    if len(shape) == len(stored) <= MAX_PERMUTED:
        for axes in permutations(range(len(stored))):
            if tuple(stored[axis] for axis in axes) == shape:
                text = f"the checkpoint's dims are exchanged: permute({', '.join(map(str, axes))}) makes them the job's"
                yield "permuted", text, lambda whole, axes=axes: whole.transpose(axes)  # type: ignore[misc]
    if math.prod(shape) == math.prod(stored):
        text = f"{list(stored)} in the checkpoint is {list(shape)} in the job, in the same order"
        yield "permuted", text, lambda whole: whole.reshape(shape)


def _padded(dim: int, size: int, stored: int) -> str:
    where = f"equal in the first {min(size, stored):,} indices of dim {dim}"
    more = (
        f"the job has {size - stored:,} more, all zero"
        if size > stored
        else f"the checkpoint has {stored - size:,} more"
    )
    return f"{where}; {more}"


def _odd_dim(live: JobTensor, saved: Tensor) -> int | None:
    """Return the one dim that plain tensors split evenly; None if they aren't equal parts."""
    if len(live.shape) != len(saved.shape):
        return None
    odd = [dim for dim, pair in enumerate(zip(live.shape, saved.shape, strict=True)) if pair[0] != pair[1]]
    is_part = len(odd) == 1 and 0 < live.shape[odd[0]] < saved.shape[odd[0]]
    return odd[0] if is_part and saved.shape[odd[0]] % live.shape[odd[0]] == 0 else None


def _of_plain_parts(outcome: Outcome, live: JobTensor, saved: Tensor, dim: int) -> Outcome:
    """Judge whether plain tensors are equal parts of the saved one, in any order of ranks."""
    reader, size = Reader(saved, live.dtype, saved.shape), live.shape[dim]
    parts = [_part(saved.shape, dim, at, size) for at in range(0, saved.shape[dim], size)]
    parts_held = {piece: [part for part in parts if reader.is_held(part, piece.digest)] for piece in live.pieces}
    odd = ranks_of(piece for piece, held in parts_held.items() if not held)
    shapes = f"plain {list(live.shape)} in the job, {list(saved.shape)} in the checkpoint"
    if odd:
        why = f"{shapes}: no equal part of it along dim {dim} is on {named_ranks(odd)}"
        return outcome.became("not-compared", why, ranks=odd)
    if len({part for held in parts_held.values() for part in held}) < len(parts):
        return outcome.became("not-compared", f"{shapes}: not every part of it is on a rank")
    return outcome


def _part(shape: tuple[int, ...], dim: int, start: int, size: int) -> Region:
    return Region(tuple(((start, start + size),) if at == dim else ((0, own),) for at, own in enumerate(shape)))


def ranks_of(pieces: Iterable[JobShard]) -> tuple[int, ...]:
    """Return the ranks of some shards, rising."""
    return tuple(sorted({piece.rank for piece in pieces}))


def in_words(pieces: Sequence[JobShard], live: JobTensor) -> str:
    """Name shards by their ranks and claimed parts: `ranks 1, 3 in [2:4, 0:8]`; `all ranks`."""
    if len(pieces) == len(live.pieces) > 1:
        return f"all of {named_ranks(ranks_of(pieces))}"
    by_part = in_groups((piece.claimed, piece) for piece in pieces)
    texts = (f"{named_ranks(ranks_of(same))} in {part}" for part, same in by_part.items())
    return listed(texts)


def holders_text(pieces: Sequence[JobShard], live: JobTensor) -> str:
    """Name shards as what holds something."""
    return f"{in_words(pieces, live)} {'hold' if len(pieces) > 1 else 'holds'}"


def name_places(live: JobTensor, parts: Mapping[int, Region], dump: Dump) -> tuple[str, Finding | None]:
    """Say what ranks hold instead of what they claim, with the finding of a check of the job.

    Args:
        parts: Where the shards are found to be that are not what they claim, by rank.
    """
    claimed = live.dumped.claimed
    is_one = len(live.dumped.claims) == 1 and claimed is not None
    finding = next(iter(_findings(live, parts, dump)), None) if is_one else None
    if finding is None:
        texts = (f"rank {rank} has {part}" for rank, part in parts.items())
        return f"{listed(texts)} of the checkpoint's", None
    where = f"the job claims {finding.claimed}, and holds {finding.held} of the checkpoint"
    return f"{where}: {finding.summary}", finding


def _findings(live: JobTensor, parts: Mapping[int, Region], dump: Dump) -> list[Finding]:
    """Return what a check of the job says of shards that are somewhere else."""
    claimed = live.dumped.claimed
    assert claimed is not None, "the caller has looked"
    mesh = claimed.mesh
    shards = {mesh.coord_of(piece.rank): piece for piece in live.pieces if piece.rank in mesh}
    regions = {at: parts.get(piece.rank, piece.claimed) for at, piece in shards.items()}
    known_regions = {at: region for at, region in regions.items() if region is not None}
    records = {at: piece.shard for at, piece in shards.items()}
    case = Case(dump, live.dumped, live.name, mesh, claimed, records, known_regions, {})
    try:
        return list(check_places(case))
    except ShardvizError:  # too many elements to be counted
        return []
