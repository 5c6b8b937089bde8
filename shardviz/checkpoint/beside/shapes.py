"""A job's tensor whose shape is not the checkpoint's: padded, its dims exchanged, reshaped, or plain parts of it."""

from __future__ import annotations

import math
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.beside.reading import Reader
from shardviz.checkpoint.beside.words import AS_HASHED, ranks_of
from shardviz.layout.region import Region
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.beside.job import Live, Piece
    from shardviz.checkpoint.comparing.outcome import Outcome, Verdict
    from shardviz.checkpoint.tensor import Tensor

    Turn = Callable[[NDArray[Any]], NDArray[Any]]

MAX_PERMUTED = 4
"""Dims of a tensor whose dims are exchanged in every way."""

MAX_PADDED = 1 << 30
"""Elements of a tensor to which zeros are added."""


def of_another_shape(outcome: Outcome, live: Live, entry: Tensor) -> Outcome:
    """Return what became of a tensor that has another shape in the checkpoint.

    Raises:
        DumpError: The checkpoint cannot be read.
    """
    if all(piece.shard.layout is None for piece in live.pieces) and (dim := _odd_dim(live, entry)) is not None:
        return _of_plain_parts(outcome, live, entry, dim)
    best: tuple[Piece, ...] = ()
    for verdict, why, turn in _turns(live.shape, entry.shape):
        reader = Reader(entry, live.dtype, live.index_shape, turn)
        right = tuple(piece for piece in live.pieces if _is_right(piece, reader))
        if len(right) == len(live.pieces):
            return outcome.became(verdict, why)
        best = right if verdict == "padded" else best
    shapes = f"{live.dtype}{list(live.shape)} in the job, {entry.dtype}{list(entry.shape)} in the checkpoint"
    if best:
        others = ranks_of(piece for piece in live.pieces if piece not in best)
        why = f"{named_ranks(ranks_of(best))} the same as far as both go; of {named_ranks(others)} {AS_HASHED}"
        return outcome.became("padded", f"{shapes}: {why}", ranks=others)
    return outcome.became("other", shapes)


def _is_right(piece: Piece, reader: Reader) -> bool:
    return piece.claimed is not None and reader.is_held(piece.claimed, piece.digest)


def _turns(shape: tuple[int, ...], own: tuple[int, ...]) -> Iterator[tuple[Verdict, str, Turn]]:
    """Yield what may have made a checkpoint's tensor one of the job's shape."""
    odd = [dim for dim, pair in enumerate(zip(shape, own, strict=False)) if pair[0] != pair[1]]
    if len(shape) == len(own) and len(odd) == 1 and math.prod(shape) <= MAX_PADDED:
        (dim,) = odd
        yield "padded", _padded(dim, shape[dim], own[dim]), lambda whole: _resized(whole, dim, shape[dim])
    if len(shape) == len(own) <= MAX_PERMUTED:
        for axes in permutations(range(len(own))):
            if tuple(own[axis] for axis in axes) == shape:
                text = f"the checkpoint's dims are exchanged: permute({', '.join(map(str, axes))}) makes them the job's"
                yield "permuted", text, lambda whole, axes=axes: whole.transpose(axes)  # type: ignore[misc]
    if math.prod(shape) == math.prod(own):
        text = f"{list(own)} in the checkpoint is {list(shape)} in the job, in the same order"
        yield "permuted", text, lambda whole: whole.reshape(shape)


def _padded(dim: int, size: int, own: int) -> str:
    where = f"equal in the first {min(size, own):,} indices of dim {dim}"
    more = f"the job has {size - own:,} more, all zero" if size > own else f"the checkpoint has {own - size:,} more"
    return f"{where}; {more}"


def _resized(whole: NDArray[Any], dim: int, size: int) -> NDArray[Any]:
    """Return an array with zeros behind a dim's end, or without the indices that are too many."""
    if size <= whole.shape[dim]:
        return whole[((slice(None),) * dim + (slice(0, size),))]
    more = [(0, size - whole.shape[dim] if at == dim else 0) for at in range(whole.ndim)]
    return np.pad(whole, more)


def _odd_dim(live: Live, entry: Tensor) -> int | None:
    """Return the only dim in which plain tensors are shorter than the checkpoint's; None if they are not such parts."""
    if len(live.shape) != len(entry.shape):
        return None
    odd = [dim for dim, pair in enumerate(zip(live.shape, entry.shape, strict=True)) if pair[0] != pair[1]]
    is_part = len(odd) == 1 and 0 < live.shape[odd[0]] < entry.shape[odd[0]]
    return odd[0] if is_part and entry.shape[odd[0]] % live.shape[odd[0]] == 0 else None


def _of_plain_parts(outcome: Outcome, live: Live, entry: Tensor, dim: int) -> Outcome:
    """Return whether plain tensors are equal parts of the checkpoint's: the dump does not say which each should be."""
    reader, size = Reader(entry, live.dtype, entry.shape), live.shape[dim]
    parts = [_part(entry.shape, dim, at, size) for at in range(0, entry.shape[dim], size)]
    found = {piece: [part for part in parts if reader.is_held(part, piece.digest)] for piece in live.pieces}
    odd = ranks_of(piece for piece, own in found.items() if not own)
    shapes = f"plain {list(live.shape)} in the job, {list(entry.shape)} in the checkpoint"
    if odd:
        why = f"{shapes}: no equal part of it along dim {dim} is on {named_ranks(odd)}"
        return outcome.became("not-compared", why, ranks=odd)
    if len({part for own in found.values() for part in own}) < len(parts):
        return outcome.became("not-compared", f"{shapes}: not every part of it is on a rank")
    return outcome


def _part(shape: tuple[int, ...], dim: int, start: int, size: int) -> Region:
    return Region(tuple(((start, start + size),) if at == dim else ((0, own),) for at, own in enumerate(shape)))
