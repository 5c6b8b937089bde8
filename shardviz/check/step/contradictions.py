"""What a step shows before any number is compared: it raised, or a shape contradicts its claim."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.check.step.words import WHAT, claimed_text
from shardviz.explain.losses import PaddingRead
from shardviz.explain.step import (
    CopiesSideBySide,
    DifferentOutput,
    MixedDtensor,
    PartLabeledWhole,
    ShardedModelRaises,
    SplitTwice,
    UncheckedLabel,
    UnevenShapes,
    UnsupportedSharding,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding


def check_raised(dump: Dump) -> Iterator[Finding]:
    """Yield the errors that only the sharded model raised."""
    ranks_by_error: dict[tuple[str, str], list[int]] = {}
    for rank, record in dump.files.ranks.items():
        for pair in record.raised:
            ranks_by_error.setdefault(pair, []).append(rank)
    for (what, error), ranks in ranks_by_error.items():
        yield _cause_of(error).finding(
            "",
            tuple(ranks),
            f"the sharded model's {what} raises, and the unsharded model's does not: {error}",
        )


CAUSES: tuple[tuple[re.Pattern[str], type[ShardedModelRaises]], ...] = (
    (re.compile(r"mixed torch\.Tensor and DTensor"), MixedDtensor),
    (re.compile(r"sharding (strategy|rule|prop)", re.IGNORECASE), UnsupportedSharding),
    (
        re.compile(
            r"\b(sizes?|shapes?|divisible|divide|dimensions?|mat1 and mat2|out of (range|bounds))\b", re.IGNORECASE
        ),
        UnevenShapes,
    ),
)
"""The cause by what an exception speaks of; the first that fits counts."""


def _cause_of(error: str) -> ShardedModelRaises:
    """Return why the sharded model raises an exception."""
    return next((cause() for words, cause in CAUSES if words.search(error)), ShardedModelRaises())


def check_result_shape(result: Compared) -> Finding | None:
    """Return the finding if a result's shape differs from the unsharded model's, or from the one its label gives."""
    if result.claimed is None or result.claimed.flat:
        return None
    what, held, due = WHAT[result.role], list(result.claimed.shape), list(result.wanted.shape)
    if held != due:
        sentence = f"the {what} is {held} over all ranks, {result.whose} is {due}"
        return _of_sizes(result, held, due).finding(
            result.name, tuple(sorted(result.values)), sentence, claimed=claimed_text(result)
        )
    wrong = [rank for rank, values in result.values.items() if values.shape != result.regions[rank].shape]
    if not wrong:
        return None
    rank = min(wrong)
    shapes = list(result.values[rank].shape), list(result.regions[rank].shape)
    sentence = f"the {what} is {shapes[0]} on rank {rank}; its placements give {shapes[1]}"
    return UncheckedLabel().finding(result.name, tuple(sorted(wrong)), sentence, claimed=claimed_text(result))


def _of_sizes(result: Compared, held: list[int], due: list[int]) -> Cause:
    """Return the cause of a result that is larger or smaller than the unsharded model's."""
    if padding := _padding_of(result, held, due):
        return padding
    sizes = {axis: result.mesh.axis_size(axis) for axis in result.mesh.axes if result.mesh.axis_size(axis) > 1}
    for dim, (length, wanted) in enumerate(zip(held, due, strict=False)):
        larger = [axis for axis, size in sizes.items() if length == wanted * size and len(held) == len(due)]
        smaller = [axis for axis, size in sizes.items() if length * size == wanted and len(held) == len(due)]
        if larger:
            return CopiesSideBySide(dim, length, " or ".join(larger), sizes[larger[0]], wanted)
        if smaller:
            return _of_parts(result, dim, smaller, length, wanted)
    return DifferentOutput()


def _padding_of(result: Compared, held: list[int], due: list[int]) -> Cause | None:
    """Return the cause of a result that is the unsharded model's and goes on behind it along one dim."""
    longer = [dim for dim, sizes in enumerate(zip(held, due, strict=False)) if sizes[0] > sizes[1]]
    is_one = len(held) == len(due) and len(longer) == 1 and result.role == "output"
    if not is_one or any(own < wanted for own, wanted in zip(held, due, strict=True)):
        return None
    cut = {rank: values[tuple(map(slice, due))] for rank, values in result.values.items()}
    is_whole = all(
        values.shape == result.wanted.shape and result.near(values, result.wanted) for values in cut.values()
    )
    dim = longer[0]
    if not is_whole or held[dim] % due[dim] == 0:  # copies side by side
        return None
    return PaddingRead(dim, due[dim], held[dim], is_returned=True)


def _of_parts(result: Compared, dim: int, axes: list[str], length: int, wanted: int) -> Cause:
    """Return the cause of a result whose dim is as large as one part of it along some axis."""
    size = result.mesh.axis_size(axes[0])
    split = [axis for axis in axes if result.claimed is not None and axis in result.claimed.chains[dim]]
    if split:
        return SplitTwice(dim, split[0], length, size, wanted)
    return PartLabeledWhole(dim, length, " or ".join(axes), size, wanted)
