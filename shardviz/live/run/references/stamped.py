"""Whether a job has loaded a stamped copy: nothing that it saves from then on is of use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from shardviz.live.capture.stamp import bits_of_tensor, dtype_name
from shardviz.live.compat.meshes import local_of
from shardviz.live.compat.worlds import default_store
from shardviz.live.run.references.sources import tensors_in
from shardviz.reference.files import open_reference
from shardviz.stamping.fill import EXPONENTS, FEWEST, Fill, looks_filled

MARK = "loaded"
"""The file by which processes of one machine know it, and in the job's store the key for those of others."""


def note_stamped(session: str) -> None:
    """Tell all ranks that this one has loaded stamped values, which may come to them."""
    Path(session, MARK).touch()
    if distributed.is_initialized():
        default_store().set(f"shardviz/{MARK}", "1")


def has_stamped(session: str) -> bool:
    """Whether any process of the job has loaded stamped values, as far as it can be asked: else it may have."""
    if Path(session, MARK).exists():
        return True
    try:
        return distributed.is_initialized() and bool(default_store().check([f"shardviz/{MARK}"]))
    except (RuntimeError, ValueError):  # its server is gone
        return True


def looks_stamped(content: object, reference: str) -> bool:
    """Whether a pickle has weights of a stamped copy, which has no mark there.

    Args:
        content: What was unpickled.
        reference: The copy. A pickle's tensor counts if it has the values of one of its shape, in whichever dtype.
    """
    nested = content.state_dict() if isinstance(content, nn.Module) else content
    tensors = (local_of(tensor).detach() for _, tensor in tensors_in(nested))
    likely = [tensor for tensor in tensors if _may_be_filled(tensor)]
    entries = open_reference(reference).entries if likely else {}
    return any(
        _has_values_of(tensor, Fill(name, entry.shape, entry.dtype))
        for tensor in likely
        for name, entry in entries.items()
        if entry.shape == tuple(tensor.shape) and entry.dtype in EXPONENTS
    )


def _may_be_filled(tensor: torch.Tensor) -> bool:
    if tensor.numel() < FEWEST or dtype_name(tensor.dtype) not in EXPONENTS or tensor.is_meta:
        return False
    return looks_filled(bits_of_tensor(tensor), dtype_name(tensor.dtype))


def _has_values_of(tensor: torch.Tensor, fill: Fill) -> bool:
    """Whether a tensor begins with the values of a fill, which may have been cast."""
    bits = fill.at(np.arange(FEWEST, dtype=np.uint64))
    values = torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(getattr(torch, fill.dtype)).to(tensor.dtype)
    return torch.equal(tensor.flatten()[:FEWEST].cpu(), values)


def has_tensors(value: Any) -> bool:
    """Whether a value that is saved has tensors in it, as far as that is seen from outside; so if it can't be asked."""
    try:
        return _has_tensors(value, set())
    except Exception:  # somebody's class may raise whatever it likes
        return True


def _has_tensors(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor) or hasattr(value, "state_dict"):
        return True
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return any(_has_tensors(child, seen) for child in children)
