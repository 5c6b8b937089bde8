"""What a step shows before any number is compared: it raised, or a shape contradicts its claim."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.check.step.words import WHAT, finding_of
from shardviz.explain.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump


def check_raised(dump: Dump) -> Iterator[Finding]:
    """Yield what the sharded model raised where the unsharded one ran."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, record in dump.files.ranks.items():
        for pair in record.raised:
            found.setdefault(pair, []).append(rank)
    for (what, error), ranks in found.items():
        yield Finding(
            "raised",
            "error",
            "",
            tuple(ranks),
            f"the sharded model's {what} raises where the unsharded model's does not: {error}",
            cause="The model's code, or torch, cannot run this sharding: a training step on this mesh would raise too",
            fix=_fix_of(error),
        )


FIXES = (
    (
        re.compile(r"mixed torch\.Tensor and DTensor"),
        "make the plain tensor a DTensor (distribute_tensor, with Replicate() where all ranks have it), or compute on "
        "the local tensors of both",
    ),
    (
        re.compile(r"sharding (strategy|rule|prop)", re.IGNORECASE),
        "redistribute its inputs to Replicate() before this operation, or compute it on local tensors by local_map",
    ),
    (
        re.compile(
            r"\b(sizes?|shapes?|divisible|divide|dimensions?|mat1 and mat2|out of (range|bounds))\b", re.IGNORECASE
        ),
        "read the exception and its line; where a size does not divide, choose one that the axis divides",
    ),
)
"""The fix by what an exception speaks of; the first that fits counts."""


def _fix_of(error: str) -> str:
    """Return what to do about an exception."""
    return next((fix for words, fix in FIXES if words.search(error)), "read the exception and its line")


def check_result_shape(one: Compared) -> Finding | None:
    """Return the finding where a result has another shape than the unsharded model's, or than its own label gives."""
    if one.claimed is None or one.claimed.flat:
        return None
    what, held, due = WHAT[one.role], list(one.claimed.shape), list(one.wanted.shape)
    if held != due:
        sentence = f"the {what} is {held} over all ranks, {one.whose} is {due}"
        return finding_of(one, "wrong-shape", sentence, _of_sizes(one, held, due))
    wrong = [rank for rank, values in one.values.items() if values.shape != one.regions[rank].shape]
    if not wrong:
        return None
    rank = min(wrong)
    shapes = list(one.values[rank].shape), list(one.regions[rank].shape)
    sentence = f"the {what} is {shapes[0]} on rank {rank}, where its placements give {shapes[1]}"
    return finding_of(one, "wrong-shape", sentence, FALSE_LABEL, ranks=wrong)


FALSE_LABEL = (
    "Its label was put on without looking at the data, as DTensor.from_local does",
    "label it by the placements that its local shape has",
)


def _of_sizes(one: Compared, held: list[int], due: list[int]) -> tuple[str, str]:
    """Return the cause and the fix of a result that is larger or smaller than the unsharded model's."""
    sizes = {axis: one.mesh.axis_size(axis) for axis in one.mesh.axes if one.mesh.axis_size(axis) > 1}
    for dim, (own, wanted) in enumerate(zip(held, due, strict=False)):
        larger = [axis for axis, size in sizes.items() if own == wanted * size and len(held) == len(due)]
        smaller = [axis for axis, size in sizes.items() if own * size == wanted and len(held) == len(due)]
        if larger:
            axes = " or ".join(larger)
            return (
                f"Dim {dim} is {own}, {axes}={sizes[larger[0]]} times {wanted}: parts that are copies along {axes} "
                "were put side by side as if they were different parts",
                f"gather dim {dim} over {axes} once, or not at all where every rank along {axes} has all of it",
            )
        if smaller:
            return _of_parts(one, dim, smaller, own, wanted)
    return (
        "The sharded model returns another tensor than the unsharded one, or another part of it",
        "return the same tensor from both; whole_output(output, mesh) in the probe can put parts in order",
    )


def _of_parts(one: Compared, dim: int, axes: list[str], own: int, wanted: int) -> tuple[str, str]:
    """Return the cause and the fix of a result whose dim is as large as one part of it along some axis."""
    size, among = one.mesh.axis_size(axes[0]), " or ".join(axes)
    split = [axis for axis in axes if one.claimed is not None and axis in one.claimed.chains[dim]]
    if split:
        return (
            f"Dim {dim} is split over {split[0]}, and its parts make {own} together, 1/{size} of {wanted}: each rank "
            "took its part of what was its part already, as where BATCH_AXES or a sampler splits the batch and the "
            "step splits it again; or each returns only some of its part",
            f"split dim {dim} over {split[0]} once, and return all of a rank's part",
        )
    return (
        f"Dim {dim} is {own}, and {among}={size} parts of it would be {wanted}: it is split along {among} and labelled "
        "as whole",
        f"gather dim {dim} over {among}, or label it as split over {among}",
    )
