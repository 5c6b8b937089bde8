"""All explanations of a case, simplest first: labels, ranks, splits, orders, elements.

Tensors may be moved element by element: transposed around the split, or shifted by padding. If only some slices of a
dim are out of order, they are looked at alone: the experts of a stack, or the heads of a weight, may have been loaded
in two ways, one of which reorders.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import Case, Fit
from shardviz.check.order.infer.orders import explain_dims, name_order, transpositions
from shardviz.check.order.infer.ranks import explain_ranks
from shardviz.check.order.infer.splits import explain_flattened, explain_label, explain_splits
from shardviz.explain.placement.order import (
    Disorder,
    Interleaved,
    OddCopies,
    Padded,
    Rotary,
    Scrambled,
    Slices,
    Transposed,
    TransposedShards,
    WithoutStrides,
)
from shardviz.explain.placement.splits import PermutedRanks
from shardviz.layout.region import MAX_LAID_OUT
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord

    Ids = NDArray[np.int64]
    Index = tuple[Ids, ...]


SAMPLE = 64


def explain_elements(case: Case) -> Iterator[Fit]:
    """Yield transpositions and paddings that give every rank the ids it holds."""
    is_moved = False
    for fit in _element_moves(case):
        is_moved = True
        yield fit
    if not is_moved:
        yield from _without_strides(case)


def _element_moves(case: Case) -> Iterator[Fit]:
    claimed = case.claimed
    assert claimed is not None
    sizes = [(math.prod(shard.body.local_shape), claimed.region(coord).size) for coord, shard in case.shards.items()]
    if all(size == claimed_size for size, claimed_size in sizes):
        yield from _transposed(case)
        yield from _padding_shift(case)
        yield from explain_slices(case)
    if all(np.array_equal(case.local_ids(coord).T, case.claimed_ids(coord)) for coord in case.shards):
        words = "each shard transposed"
        yield Fit(TransposedShards(), f"the ranks hold {words}", words)


def _transposed(case: Case) -> Iterator[Fit]:
    for first, second, text, content in transpositions(case.shape):
        if _is_held_by_all(case, content):
            words = f"the tensor's own {text}"
            yield Fit(Transposed(first, second), f"the shards are those of {words}", words)
            return


def _is_held_by_all(case: Case, content: Callable[[Ids], Ids]) -> bool:
    """Whether every rank holds `content` of its claimed places; a sample is compared first."""
    for limit in (SAMPLE, None):
        for coord in case.shards:
            claimed = case.claimed_ids(coord).ravel()[:limit] - 1
            if not np.array_equal(content(claimed) + 1, case.local_ids(coord).ravel()[:limit]):
                return False
    return True


def _padding_shift(case: Case) -> Iterator[Fit]:
    """Zeros in front push the content along one dim; what does not fit any more is lost."""
    first = next((coord for coord in case.ids if np.any(case.ids[coord] > 0)), None)
    if first is None:
        return
    held, claimed = case.ids[first], case.claimed_ids(first).reshape(case.ids[first].shape)
    at = int(np.flatnonzero(held > 0)[0])
    moved = int(claimed.flat[at] - held.flat[at])
    for dim in range(len(case.shape)):
        stride = math.prod(case.shape[dim + 1 :])
        if moved > 0 and moved % stride == 0 and moved // stride < case.shape[dim]:
            by = moved // stride
            if all(_is_shifted(case, coord, dim, by) for coord in case.shards):
                words = f"dim {dim} moved up by {by}, with {by} zeros before it"
                yield Fit(Padded(), f"padding comes first: {words}", words)
                return


def _is_shifted(case: Case, coord: Coord, dim: int, by: int) -> bool:
    stride = math.prod(case.shape[dim + 1 :])
    claimed = case.claimed_ids(coord).ravel()
    padding = (claimed - 1) // stride % case.shape[dim] < by
    return np.array_equal(case.local_ids(coord).ravel(), np.where(padding, 0, claimed - by * stride))


def _without_strides(case: Case) -> Iterator[Fit]:
    """Yield a transposition of every shard whose elements were read in the order of its memory."""
    parts = [(case.local_ids(coord), case.claimed_ids(coord)) for coord in case.shards]
    if any(held_ids.shape != claimed_ids.shape for held_ids, claimed_ids in parts):
        return
    for first, second in combinations(range(len(case.shape)), 2):
        if all(
            np.array_equal(held_ids.ravel(), claimed_ids.swapaxes(first, second).ravel())
            for held_ids, claimed_ids in parts
        ):
            words = f"each shard's own transpose({first}, {second}), in the order of its memory"
            yield Fit(WithoutStrides(), f"the ranks hold {words}", words)
            return


MAX_LISTED = 6


def explain_slices(case: Case) -> Iterator[Fit]:
    """Explain slices of a dim that are out of order while other slices are in order."""
    shape = case.shape
    if len(shape) < 2 or any(np.any(ids <= 0) for ids in case.ids.values()):
        return
    claimed = np.concatenate([case.claimed_ids(coord).ravel() for coord in case.shards]) - 1
    present = np.concatenate([case.local_ids(coord).ravel() for coord in case.shards]) - 1
    places, held = np.unravel_index(claimed, shape), np.unravel_index(present, shape)
    for dim, size in enumerate(shape):
        wrong = np.unique(places[dim][claimed != present])
        if not np.array_equal(places[dim], held[dim]) or not 0 < len(wrong) < size:
            continue
        inside = np.isin(places[dim], wrong)
        named = _name_slices(shape, dim, tuple(at[inside] for at in places), tuple(at[inside] for at in held))
        if named is not None:
            words, undo = named
            text = f"in slices {listed(wrong.tolist(), MAX_LISTED)} of dim {dim}, {len(wrong)} of {size}, {words}"
            yield Fit(Slices(undo), f"{text}; the others are in order", text)
            return


def _name_slices(shape: tuple[int, ...], dim: int, places: Index, held: Index) -> tuple[str, str] | None:
    """Return the disorder of all slices, and how to undo it for one; None if no rule fits all."""
    inner = tuple(size for axis, size in enumerate(shape) if axis != dim)
    other_dims = tuple(axis for axis in range(len(shape)) if axis != dim)
    from_numbers, to_numbers = (np.ravel_multi_index([at[axis] for axis in other_dims], inner) for at in (places, held))
    for first, second, text, content in transpositions(inner):
        if np.array_equal(content(from_numbers), to_numbers):
            return f"each slice is transposed: its own {text}", f"slice.transpose({first}, {second})"
    for number, dim_number in enumerate(other_dims):
        order = _order(places, held, dim_number, shape[dim_number])
        if order is not None:
            cause, words = name_order(order, number)
            return f"each slice's {words}", cause.fix
    return None


def _order(places: Index, held: Index, dim: int, size: int) -> Ids | None:
    """Return the order of a dim's indices if it is complete and nothing else differs."""
    if any(not np.array_equal(places[axis], held[axis]) for axis in range(len(places)) if axis != dim):
        return None
    order = np.full(size, -1, np.int64)
    order[places[dim]] = held[dim]
    is_order = np.array_equal(order[places[dim]], held[dim]) and np.array_equal(np.sort(order), np.arange(size))
    return order if is_order else None


MAX_ELEMENTS = 1 << 26
"""A tensor with more elements is not looked at element by element once no rule over whole ranges fits."""

MAX_DIFFERENCES = 3

ROTATED = {"q", "k", "qk", "qkv", "wq", "wk", "wqkv", "query", "key", "attn", "attention"}
OTHER_ROWS = {"gate", "up", "down", "fc", "ff", "ffn", "mlp", "expert", "experts", "embed", "norm", "conv"}
"""Words of names: of rows that rotary embeddings turn, and of rows that they never do."""


def explain(case: Case) -> list[Fit]:
    """Return everything that explains what the ranks of a case hold, simplest first.

    Returns:
        At least one fit: `Scrambled`, with the first differences, if nothing else fits.
    """
    assert case.claimed is not None, "a plain tensor claims nothing"
    fits = _fits_of_ranges(case)
    if not fits or isinstance(fits[0].cause, PermutedRanks):
        fits = list(_odd_copies(case)) or fits
    if not fits and case.num_held <= MAX_ELEMENTS:
        fits = list(explain_elements(case))
    return fits or [_scrambled_fit(case)]


def _fits_of_ranges(case: Case) -> list[Fit]:
    assert case.claimed is not None
    fits = []
    if case.held is not None:
        fits.append(explain_label(case.claimed, case.held, case.dump.files.run.torch))
    elif not case.ids:
        fits += explain_flattened(case.claimed, case.regions, case.dump.files.mesh)
        if fits:
            return fits
    if not case.ids:
        fits += explain_ranks(case.claimed, case.regions)
        fits += explain_splits(case.claimed, case.regions)
        by_dims = list(explain_dims(case.claimed, case.regions, besides=fits))
        fits = by_dims + fits if _are_rows(by_dims, fits, case.claimed) else fits + by_dims
    if OTHER_ROWS & (words := set(re.split(r"[\W_\d]+", case.name.lower()))) and not ROTATED & words:
        fits = [replace(fit, cause=_without_heads(fit.cause)) for fit in fits]
    return fits


def _without_heads(cause: Disorder) -> Disorder:
    """Return the cause of an order whose rows are those of no head."""
    return Interleaved(cause.undo, or_if=cause.or_if) if isinstance(cause, Rotary) else cause


def _are_rows(by_dims: list[Fit], by_shards: list[Fit], claimed: Layout) -> bool:
    """Whether rows in another order are likelier than shards.

    No mesh or split gives the order of rotary pairs, and if the axes of a mesh were exchanged, a layout would say so.
    """
    causes = [fit.cause for fit in by_dims]
    is_numbering = bool(by_shards) and isinstance(by_shards[0].cause, PermutedRanks)
    if any(isinstance(cause, Rotary) for cause in causes):
        return True
    return is_numbering and claimed.mesh.ndim > 1 and any(isinstance(cause, Interleaved) for cause in causes)


def _odd_copies(case: Case) -> Iterator[Fit]:
    """Explain replicas at some positions of an axis if the other replicas are as claimed."""
    assert case.claimed is not None
    claimed = case.claimed
    in_order = {
        coord for coord, region in case.regions.items() if coord not in case.ids and region == claimed.region(coord)
    }
    for axis in claimed.replicate_axes:
        column = claimed.mesh.axis_index(axis)
        odd = sorted({coord[column] for coord in case.shards if coord not in in_order})
        right_positions = sorted({coord[column] for coord in case.shards} - set(odd))
        if odd and right_positions:
            fits = explain(case.only([coord for coord in case.shards if coord[column] in odd]))[0]
            where = f"{axis}={listed(odd)}"
            right = f"the copies on {axis}={listed(right_positions)} are in order"
            text = f"{right}, but not on {where}: {fits.sentence}"
            yield Fit(OddCopies(axis, right_positions[0]), text, f"on {where}: {fits.held}", details=fits.details)
            return


def _scrambled_fit(case: Case) -> Fit:
    differences = "; ".join(first_differences(case))
    text = f"scrambled: {differences}" if differences else "scrambled"
    return Fit(Scrambled(), "no known pattern fits", text, details=(text,) if differences else ())


def first_differences(case: Case) -> list[str]:
    """Return the first misplaced element of each of the first ranks that differ.

    Shards too large to be laid out are passed over.
    """
    assert case.claimed is not None
    lines: list[str] = []
    for coord, shard in sorted(case.shards.items(), key=lambda item: item[1].rank):
        size, own_size = case.claimed.region(coord).size, math.prod(shard.body.local_shape)
        if size != own_size:
            lines.append(f"rank {shard.rank} holds {own_size:,} elements of {size:,}")
        elif size <= MAX_LAID_OUT:
            claimed_ids, held_ids = case.claimed_ids(coord).ravel(), case.local_ids(coord).ravel()
            if len(wrong := np.flatnonzero(claimed_ids != held_ids)):
                at = int(wrong[0])
                claimed, held = case.index(int(claimed_ids[at]) - 1), _element_text(case, int(held_ids[at]))
                lines.append(f"rank {shard.rank} holds {held} where it claims {claimed}")
        if len(lines) == MAX_DIFFERENCES:
            break
    return lines


def _element_text(case: Case, element: int) -> str:
    if element > 0:
        return str(case.index(element - 1))
    if element < -1:
        name, at = case.owner(-1 - element)
        return f"element {at} of {name}"
    return "no id" if element else "zero"
