"""Rows of a batch that each rank's loader pads to the longest of them, as a collator does: they are told without it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.starts import Rows, rows_of
from shardviz.check.step.trace.traces import Kept, joined_along
from shardviz.groups import the_only
from shardviz.text import join_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.trace.traces import OfRank
    from shardviz.layout.mesh import Mesh

    Calls = list[Kept]


def rows_without_padding(whole: OfRank, ranks: Mapping[int, OfRank], mesh: Mesh) -> Rows | None:
    """Return which rows of a job of one process ranks were given, if some were padded to lengths of their own.

    Returns:
        None if all were padded to one length, or cut into parts of one length.
    """
    whole_calls, calls = whole.calls_of_batch, {rank: own.calls_of_batch for rank, own in ranks.items()}
    uneven: set[int] = set()
    for key in (key for key in whole_calls if calls and all(key in own for own in calls.values())):
        wanted, given = whole_calls[key], {rank: own[key] for rank, own in calls.items()}
        tensors = [*wanted, *(tensor for of_rank in given.values() for tensor in of_rank)]
        if not all(tensor.is_whole and len(tensor.shape) == 2 for tensor in tensors):
            continue
        longest = max(tensor.shape[1] for tensor in tensors)
        lengths = {tensor.shape[1] for of_rank in given.values() for tensor in of_rank}
        if len(lengths) == 1 and longest % min(lengths) == 0:
            continue
        uneven |= lengths
        padding = _padding_of(tensors)
        if padding is None:
            continue
        every = _joined(wanted, longest, padding)
        if every is None or len(np.unique(every.values, axis=0)) < len(every.values):
            continue
        of_ranks = {rank: _joined(own, longest, padding) for rank, own in given.items()}
        rows = rows_of([every], {rank: [own] for rank, own in of_ranks.items() if own is not None}, mesh)
        return rows if rows.problem else Rows(not_joined=_text(uneven))
    return Rows(not_joined=_text(uneven)) if uneven else None


def _text(lengths: set[int]) -> str:
    return f"ranks were given rows padded to lengths of their own: {join_numbers(lengths)}"


def _padding_of(tensors: Sequence[Kept]) -> float | None:
    """Return the number that rows are filled up with: the only one that stands at the end of rows and nowhere else."""
    ends = {float(number) for tensor in tensors for number in tensor.values[:, -1]}
    return the_only({number for number in ends if all(_only_ends(tensor, number) for tensor in tensors)})


def _only_ends(tensor: Kept, number: float) -> bool:
    is_number = tensor.values == number
    return not np.any(is_number[:, :-1] & ~is_number[:, 1:])


def _joined(calls: Calls, length: int, padding: float) -> Kept | None:
    """Return all rows of a tensor, filled up to a length."""
    filled = []
    for tensor in calls:
        count, own_length = tensor.shape
        values = np.pad(tensor.values, ((0, 0), (0, length - own_length)), constant_values=padding)
        filled.append(replace(tensor, shape=(count, length), at=(tensor.at[0], np.arange(length)), values=values))
    return joined_along(0, filled)
