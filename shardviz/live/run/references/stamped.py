"""Whether a job has loaded a stamped copy: nothing that it saves from then on is of use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from shardviz.live.capture.stamp import bits_of_tensor, dtype_name
from shardviz.live.compat.meshes import local_of
from shardviz.live.compat.worlds import default_store
from shardviz.live.run.references.sources import tensors_in
from shardviz.stamping.fill import EXPONENTS, FEWEST, looks_filled

MARK = "loaded"
"""The file by which processes of one machine know it, and in the job's store the key for those of others."""


def note_stamped(session: str) -> None:
    """Tell all ranks that this one has loaded stamped values, which may come to them."""
    Path(session, MARK).touch()
    if distributed.is_initialized():
        default_store().set(f"shardviz/{MARK}", "1")


def has_stamped(session: str) -> bool:
    """Whether any process of the job has loaded stamped values."""
    if Path(session, MARK).exists():
        return True
    return distributed.is_initialized() and bool(default_store().check([f"shardviz/{MARK}"]))


def looks_stamped(content: object) -> bool:
    """Whether a pickle's weights are those of a stamped copy, which has no mark there."""
    nested = content.state_dict() if isinstance(content, nn.Module) else content
    tensors = (local_of(tensor).detach() for _, tensor in tensors_in(nested))
    return any(
        looks_filled(bits_of_tensor(tensor), dtype_name(tensor.dtype))
        for tensor in tensors
        if tensor.numel() >= FEWEST and dtype_name(tensor.dtype) in EXPONENTS and not tensor.is_meta
    )


def has_tensors(value: Any) -> bool:
    """Whether a value that is saved has tensors in it, as far as that is seen from outside."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return isinstance(value, torch.Tensor) or hasattr(value, "state_dict") or any(map(has_tensors, children))
