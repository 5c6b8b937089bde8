"""Tensors as a recorder of lines reads them: which it can keep, their numbers and where they lie in memory."""

from __future__ import annotations

from typing import Any

import torch

from shardviz.live.capture.locals import of_tensor
from shardviz.live.step.running import tensors_in


def tensors_kept(tensors: Any, *, wait: bool = True) -> list[torch.Tensor]:
    """Return the tensors in some arguments that can be kept; functional collectives among them are waited for."""
    tensors_kept = []
    for tensor in tensors_in(tensors):
        if hasattr(tensor, "trigger_wait"):
            if wait:
                tensor.trigger_wait()
            tensor = tensor.elem  # type: ignore[attr-defined]
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta):
            tensors_kept.append(tensor)
    return tensors_kept


def has_memory(local: torch.Tensor) -> bool:
    """Whether a tensor can be read; FSDP2 frees the storage of whole weights that it has split again."""
    return hasattr(local, "trigger_wait") or not local.numel() or local.untyped_storage().nbytes() > 0


def real_of(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor, of complex numbers as pairs: what relates real numbers relates those too."""
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local


def storage_of(tensor: torch.Tensor) -> int:
    """Return where the storage of this rank's part of a tensor begins; the tensor's identity if it has no memory."""
    local = of_tensor("", "activation", tensor).values
    if hasattr(local, "trigger_wait"):  # a DTensor's own part may be waited for, too
        local = local.elem  # type: ignore[attr-defined]
    return local.untyped_storage().data_ptr() or id(tensor)
