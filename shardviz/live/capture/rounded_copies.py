"""Weights that only some ranks hold rounded to a narrower dtype, as digests once rounded."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardviz.live.capture.locals import Local

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
