"""A local tensor's ids and values in their smallest form: ranges, runs, lists or a digest.

Of weights that only some ranks hold rounded to a narrower dtype, that is a digest once rounded.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardviz.dump.arrays import ID_NONE, hash_of
from shardviz.layout.region import Ranges, region_of
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.tensors import IdRun, Stamp
    from shardviz.live.claims.local import Local

MAX_RANGES = 4096
MAX_RUNS = 4096


def ids_of(values: torch.Tensor, last: int) -> NDArray[np.int64]:
    """Return values as ids: 0 for zero, `ID_NONE` for anything but whole numbers up to `last`."""
    if not values.is_floating_point():
        wide = values.to(torch.int64).cpu().numpy()
        return np.where((wide >= 0) & (wide <= last), wide, ID_NONE)
    numbers = values.to(torch.float64).cpu().numpy()
    whole = np.isfinite(numbers) & (numbers >= 0) & (numbers <= last) & (np.floor(numbers) == numbers)
    return np.where(whole, numbers, ID_NONE).astype(np.int64)


def as_ranges(ids: NDArray[np.int64], stamp: Stamp, shape: Sequence[int]) -> tuple[Ranges, ...] | None:
    """Write ids as index ranges in each dim.

    Args:
        shape: The shape that indices refer to: the tensor's own, or its number of elements if it is held flat.

    Returns:
        The ranges; None if the ids are not the product of one list of indices per dim, or if the ranges are too many.
    """
    region = region_of(ids, shape, stamp.first)
    return region.dims if region is not None and max(map(len, region.dims), default=0) <= MAX_RANGES else None


def as_runs(ids: NDArray[np.int64]) -> tuple[IdRun, ...] | None:
    """Write ids in memory order as runs `(first, step, count)`; None for more than `MAX_RUNS`."""
    flat = ids.ravel()
    steps = np.diff(flat)
    bends = np.flatnonzero(np.diff(steps)) + 2
    if len(bends) > 2 * MAX_RUNS:
        return None
    runs: list[IdRun] = []
    start = 0
    for end in [*bends.tolist(), len(flat)]:
        # A bend belongs to the run before it; a lone element joins the next run.
        if end - start == 1 and end < len(flat):
            continue
        if end > start:
            runs.append((int(flat[start]), int(flat[start + 1] - flat[start]) if end - start > 1 else 0, end - start))
            start = end
    return tuple(runs) if len(runs) <= MAX_RUNS else None


def nested(values: torch.Tensor) -> Any:
    """Return values as nested lists for JSON; values that are not finite become strings."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return _json_value(values.detach().cpu().tolist())


def _json_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def as_numpy(values: torch.Tensor) -> NDArray[np.generic]:
    """Return values as a numpy array; bfloat16 and float8 become float32, which holds them exactly."""
    is_unknown = values.dtype == torch.bfloat16 or (values.is_floating_point() and values.dtype.itemsize == 1)
    wide = values.float() if is_unknown else values
    array: NDArray[np.generic] = wide.detach().cpu().numpy()
    return array


def digest(values: torch.Tensor) -> str:
    """Return 16 hex digits of the BLAKE2b hash of a tensor's dtype, shape and numbers."""
    local = values.detach().cpu().contiguous()
    flat = local.as_strided((local.numel(),), (1,))  # a single element may have any stride
    stored = flat.view(torch.uint8).numpy() if local.numel() else np.empty(0, np.uint8)
    return hash_of(stored, str(local.dtype).removeprefix("torch."), local.shape)


WIDE = (torch.float32, torch.float64)
NARROW = (torch.bfloat16, torch.float16)


def rounded_copies(locals_: Iterable[Local]) -> list[tuple[str, str, str]]:
    """Return names, narrower dtype and rounded digest of weights that only some ranks rounded.

    Every rank calls this.
    """
    wide = {
        local.name: local.values.detach()
        for local in locals_
        if local.role == "param" and local.values.dtype in WIDE and not local.values.is_meta and local.values.numel()
    }
    mine = {name: dtype for name, values in wide.items() if (dtype := _narrow(values)) is not None}
    narrow: dict[str, set[torch.dtype | None]] = {}
    for wide_names, of_rank in of_all_ranks((set(wide), mine)):
        for name in wide_names:
            narrow.setdefault(name, set()).add(of_rank.get(name))
    names = {name: dtypes - {None} for name, dtypes in narrow.items() if len(dtypes) == 2 and None in dtypes}
    return [
        (name, dtype_name(dtype), blake2b(bits_of_tensor(wide[name].to(dtype)).tobytes(), digest_size=8).hexdigest())
        for name, dtypes in names.items()
        for dtype in dtypes
        if name in wide and dtype is not None
    ]


def _narrow(values: torch.Tensor) -> torch.dtype | None:
    """Return the first narrower dtype that holds all values exactly; a few are tried first."""
    for dtype in NARROW:
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in (values.reshape(-1)[:64], values)):
            return dtype
    return None


def sources_of(ids: NDArray[np.int64], stamps: Iterable[Stamp]) -> tuple[str, ...]:
    """Return the stamped tensors that ids are of, in the model's order; none if some are no ids, or there twice.

    Example:
        sources_of(np.array([1, 9]), [Stamp("q", "param", (8,), "float32", first=1), ...])  # ("q", "k")
    """
    if not ids.size or ids.min() <= 0 or len(np.unique(ids)) < ids.size:
        return ()
    first = sorted((stamp.first, stamp.name) for stamp in stamps if not stamp.tied_to)
    of = np.unique(np.searchsorted([at for at, _ in first], ids.ravel(), side="right") - 1)
    return tuple(first[at][1] for at in of)
