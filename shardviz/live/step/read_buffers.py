"""Buffers that a model's forward reads in training: changing them changes its output."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from shardviz.live.claims.registry import unwrapped
from shardviz.live.compat.modules import clean_name
from shardviz.live.step.running import tensors_in
from shardviz.live.step.step import loss_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from torch import nn

    from shardviz.live.claims.local import Local
    from shardviz.live.step.batch import Batch

SEED = 2
MAX_BUFFERS = 16
"""Of more buffers that a step changes it is not looked at which ones are read."""


def read_buffers(probe: ModuleType, model: nn.Module, before: Sequence[Local], batch: Batch) -> list[str]:
    """Return the buffers of an unsharded model that its step changed and its forward reads; it is left as it is.

    Statistics that a forward only keeps, as those of a BatchNorm in training, may differ between ranks. What it reads
    makes each rank's model another one.

    Args:
        model: The model after its step.
    """
    old = {local.name: local.values for local in before if local.role == "buffer"}
    buffers = {clean_name(name): buffer for name, buffer in unwrapped(model).named_buffers()}
    changed = {
        name: buffer
        for name, buffer in buffers.items()
        if buffer.is_floating_point() and name in old and not torch.equal(old[name].to(buffer.dtype), buffer)
    }
    if not 0 < len(changed) <= MAX_BUFFERS:
        return []
    buffers_before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    try:
        expected = _returned(probe, model, buffers, buffers_before, batch)
        if not all(math.isfinite(number) for numbers in expected for number in numbers):
            return []
        return [
            name
            for name in changed
            if _returned(probe, model, buffers, _moved(buffers_before, name), batch) != expected
        ]
    except Exception:  # the probe's loss does not run alone: nothing is known
        return []
    finally:
        _set(buffers, buffers_before)


def _moved(buffers_before: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Return buffers, one of them with its elements moved far enough that they come in another order."""
    values = buffers_before[name]
    step = torch.arange(values.numel(), dtype=values.dtype, device=values.device).view(values.shape) % 7 + 1
    return {**buffers_before, name: values + step * (1 + values.abs().max())}


def _returned(
    probe: ModuleType,
    model: nn.Module,
    buffers: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    batch: Batch,
) -> list[list[float]]:
    """Return the loss, and the outputs of the model, with some values of its buffers."""
    _set(buffers, values)
    outputs: list[list[float]] = []

    def keep(_module: nn.Module, _inputs: object, output: object) -> None:
        outputs.extend(tensor.detach().double().flatten().tolist() for tensor in tensors_in(output))

    handle = model.register_forward_hook(keep)
    try:
        torch.manual_seed(SEED)
        with torch.no_grad():
            return [*outputs, [float(loss_of(probe, model, batch))]]
    finally:
        handle.remove()


def _set(buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])
