"""Checkpoints that a job read into tensors which are gone: no living tensor has them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardviz.errors import DumpError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import cast_bits, stored_slice
from shardviz.live.capture.stamp import bits_of_tensor
from shardviz.live.run.references.sources import Loaded
from shardviz.reference.names import matched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardviz.live.capture.locals import Local
    from shardviz.live.run.references.choosing import Candidate
    from shardviz.live.run.references.sources import Source


def discarded_on_all_ranks(
    sources: Sequence[Source], locals_: Sequence[Local], of_all: Mapping[str, list[Candidate]]
) -> dict[Path, set[str]]:
    """Return which of a model's tensors every rank read into tensors that are gone.

    A tensor that lives may be an average of weights or a second model, and so may one that has the same values. Every
    rank calls this.

    Args:
        sources: What values may be compared with.
        locals_: The model's tensors on this rank.
        of_all: What any rank knows of each of them, the same on all ranks.
    """
    mine: dict[Path, set[str]] = {}
    for source in sources:
        copies = source.copies if isinstance(source, Loaded) else {}
        names = matched([local.name for local in locals_], copies).names
        if names and all(copies[name]() is None for name in names.values()):
            largest = max((local for local in locals_ if local.name in names), key=lambda local: local.values.numel())
            if not _is_alive(
                largest, [candidate for candidate in of_all.get(largest.name, []) if candidate.path == source.path]
            ):
                mine[source.path] = set(names)
    first, *of_more_ranks = of_all_ranks(mine)
    return {path: names for path, names in first.items() if all(path in of_rank for of_rank in of_more_ranks)}


def _is_alive(local: Local, stored: Sequence[Candidate]) -> bool:
    """Whether a tensor of this process has a checkpoint's values of a tensor or its shard."""
    try:
        stored_bits = [
            (bits, candidate.entry.dtype)
            for candidate in stored
            if (bits := stored_slice(local, candidate.entry)) is not None
        ]
        stored_bits += [(candidate.entry.bits, candidate.entry.dtype) for candidate in stored]
    except (DumpError, OSError):  # not readable here, so that nothing is known of it
        return True
    plain = [
        tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, nn.Parameter, DTensor)
    ]  # others run code
    tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in plain]
    return any(
        np.array_equal(cast_bits(bits, dtype, tensor.dtype), bits_of_tensor(tensor))
        for tensor in tensors
        for bits, dtype in stored_bits
        if not tensor.is_meta and tensor.is_floating_point() and tuple(tensor.shape) == bits.shape
    )
