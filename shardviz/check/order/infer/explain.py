"""All explanations of a case, simplest first: labels, ranks, splits, then orders."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.elements import explain_elements
from shardviz.check.order.infer.fit import Fit
from shardviz.check.order.infer.orders import explain_dims
from shardviz.check.order.infer.ranks import explain_ranks
from shardviz.check.order.infer.splits import explain_flattened, explain_label, explain_splits
from shardviz.explain.placement.order import Interleaved, OddCopies, Rotary, Scrambled
from shardviz.explain.placement.splits import PermutedRanks
from shardviz.layout.region import MAX_LAID_OUT
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.order.case import Case
    from shardviz.explain.placement.order import Disorder
    from shardviz.layout.layout import Layout

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
            where = f"{axis}={listed(odd, MAX_DIFFERENCES)}"
            right = f"the copies on {axis}={listed(right_positions, MAX_DIFFERENCES)} are in order"
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
