"""Tensors that were rewritten while the model was sharded, which is not a disorder: not checked, for a step to judge.

A buffer that every rank computes again (rotary frequencies, a mask) has no ids left, and the same numbers everywhere.
A plain tensor that is zero on some ranks and whole on others is either a term of a sum that one rank adds, as the bias
of a row-wise layer, or a copy that was never written: the ids do not show which.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.values.numbers import flat_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case
    from shardviz.layout.mesh import Coord


def check_recomputed(case: Case) -> Iterator[NotChecked]:
    """Yield a buffer that every rank computed again: it has no order to check."""
    if _is_whole_in_shape(case) and _is_computed_alike(case, case.ids):
        why = "every rank computes it again after the model is filled, with equal results: a step compares its values"
        yield NotChecked(case.name, why, "order")


def check_redrawn(case: Case) -> Iterator[NotChecked]:
    """Yield a tensor that was written on every rank once it was sharded, so that only its own values can be judged.

    They are compared as copies and as shards, and by a step. Where only some ranks have lost their ids, or values are
    not finite, it is `foreign`.
    """
    if not case.dump.files.run.reference and _is_written_everywhere(case) and _has_finite_values(case):
        why = (
            "the order of its elements: drawn, loaded or computed once the model was filled with ids, on every rank, "
            "so that none are left; copies and shards are compared by value"
        )
        yield NotChecked(case.name, why, "order")


def _is_written_everywhere(case: Case) -> bool:
    """Whether no rank has ids: other values everywhere, or one number in a model whose other weights were drawn."""
    if not case.ids and "values" not in case.dump.without_ids.values():
        return False
    coords = [coord for coord, shard in case.shards.items() if 0 not in shard.body.local_shape]
    numbers = set().union(*(_numbers(case, coord) for coord in coords))
    if numbers == {-1}:
        return case.claimed is not None or case.tensor.role == "param"
    drawn = "values" in case.dump.without_ids.values() and case.tensor.role == "param"
    return len(numbers) == 1 and case.numel > 1 and drawn


def _numbers(case: Case, coord: Coord) -> set[int]:
    """Return the ids that a coordinate has, no more than two of them."""
    if coord in case.ids:
        ids = case.ids[coord]
        return {int(ids.min()), int(ids.max())}
    dims = case.regions[coord].dims
    first = np.ravel_multi_index([ranges[0][0] for ranges in dims], case.shape) if dims else 0
    last = np.ravel_multi_index([ranges[-1][1] - 1 for ranges in dims], case.shape) if dims else 0
    return {int(first) + 1, int(last) + 1, *({0} if any(len(set(ranges)) > 1 for ranges in dims) else ())}


def _has_finite_values(case: Case) -> bool:
    """Whether the model's own values were captured, and none of those in the dump is NaN or infinite."""
    initial = case.dump.find("initial", case.tensor.role, case.name)
    if initial is None:
        return False
    values = (flat_values(shard) for shard in initial.shards.values())
    return all(isinstance(number, float | int) and math.isfinite(number) for of in values for number in of or ())


def check_zeros(case: Case) -> Iterator[NotChecked]:
    """Yield a plain tensor that is zero on some ranks and whole on the others."""
    if _is_whole_in_shape(case) and case.regions and not any(map(np.any, case.ids.values())):
        ranks = sorted(map(case.rank, case.ids))
        why = (
            f"{len(ranks):,} of {len(case.shards):,} ranks hold only zeros (rank {ranks[0]} first) where the others "
            "hold all of it: terms of a sum, or copies that were never written"
        )
        yield NotChecked(case.name, why, "values")


def _is_whole_in_shape(case: Case) -> bool:
    """Whether it is a plain tensor of its whole shape on every rank, and some values are not its ids."""
    if case.claimed is not None or case.absent or not case.ids:
        return False
    return all(shard.body.local_shape == case.shape for shard in case.shards.values())


def _is_computed_alike(case: Case, ids: Mapping[Coord, NDArray[np.int64]]) -> bool:
    """Whether all ranks have equal numbers, not all of them ids, in the stamped model and in the original one."""
    first = next(iter(ids.values()))
    initial = case.dump.find("initial", "buffer", case.name)
    alike = all(np.array_equal(first, other) for other in ids.values())
    if case.regions or not alike or not np.any(first == -1):
        return False
    if initial is None:  # a captured job has the stamped model only, whose other values a dump does not tell apart
        return case.tensor.role == "buffer" and not case.dump.files.run.reference
    index = initial.index(case.name)
    digests = {shard.digest(index) for shard in initial.shards.values()}
    return len(digests) == 1 and "" not in digests
