"""Where an output has the dims that the batch is split along, worked out from shapes: not every model keeps them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

Shape = tuple[int, ...]


def output_dims(shape: Shape, whole: Shape | None, batch: Shape, counts: Mapping[int, int]) -> dict[int, int | None]:
    """Return the dim of an output for every dim that the batch is split along; None if it has none.

    It is where the parts together have the unsharded model's size. An output that has that size already was gathered,
    or, as a mean over a sequence does, has lost the dim.

    Args:
        shape: The output's shape on this rank.
        whole: The unsharded model's, if it has one.
        batch: The shape of this rank's part of the batch, which tells dims apart that have as many parts.
        counts: The number of parts of each dim of the batch.
    """
    if shape == whole:
        return dict.fromkeys(counts)
    dims: dict[int, int | None] = {dim: None for dim, parts in counts.items() if parts == 1}
    counts = {dim: parts for dim, parts in counts.items() if parts > 1}
    for dim, parts in sorted(counts.items()):
        if whole is None:
            dims[dim] = dim if len(shape) > dim else None
            continue
        smaller = [at for at, (one, all_of_it) in enumerate(zip(shape, whole, strict=False)) if one != all_of_it]
        fitting = [at for at in smaller if at not in dims.values() and shape[at] * parts == whole[at]]
        if fitting:
            size = batch[dim] if dim < len(batch) else None
            dims[dim] = min(fitting, key=lambda at: (shape[at] != size, at != dim, at))
        else:
            dims[dim] = next(iter(smaller), 0) if len(counts) == 1 else None  # sizes that do not fit are a finding
    return dims


def merged_dims(shape: Shape, whole: Shape, batch: Shape, counts: Mapping[int, int]) -> str:
    """Say that an output has two split dims of the batch in one, as flattened tokens are; empty if it has not."""
    counts = {dim: parts for dim, parts in counts.items() if parts > 1}
    is_all = math.prod(shape) * math.prod(counts.values()) == math.prod(whole)
    if not is_all or len(counts) < 2 or None not in output_dims(shape, whole, batch, counts).values():
        return ""
    dims = " and ".join(str(dim) for dim in sorted(counts))
    return f"the output: the batch is split along dims {dims}, which {list(shape)} has merged into one"
