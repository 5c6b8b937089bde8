"""Whether the loss of a whole batch is a weighted mean of the losses of its parts.

It is where every part divides by a count of its own: tokens, labels that are not ignored. Its gradients then are the
mean of the parts' gradients with the same weights, which no loss over pairs of rows has, wherever its value lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardviz.live.step.batch import part_of
from shardviz.live.step.step import loss_of
from shardviz.relate.tolerance import ROUNDINGS_OF_STEP, SINGLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import nn

    from shardviz.live.step.batch import Batch


def is_weighted_mean(
    probe: ModuleType, build: Callable[[], nn.Module], batch: Batch, parts: int, dim: int, precision: float
) -> bool:
    """Return whether one set of weights that sum to 1 gives the whole batch's loss and gradients from the parts'.

    Args:
        probe: The probe, for its loss.
        build: Builds the model, with the same values every time.
        batch: The whole batch.
        parts: The number of its parts.
        dim: The dim of the batch that has the rows.
        precision: The relative precision of the narrowest dtype in the step.
    """
    whole = _loss_and_gradients(probe, build(), batch)
    columns = [_loss_and_gradients(probe, build(), part_of(batch, number, parts, dim)) for number in range(parts)]
    ones = whole.norm().expand(parts + 1)
    stacked = torch.cat((torch.stack([*columns, whole], 1), ones[None]))
    matrix, wanted = stacked[:, :-1], stacked[:, -1:]
    weights = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution
    off = (matrix @ weights - wanted).norm() / wanted.norm().clamp(min=1e-30)
    near = max(SINGLE, ROUNDINGS_OF_STEP * precision)
    return bool(off <= near) and bool((weights >= -near).all()) and len(whole) > parts


def _loss_and_gradients(probe: ModuleType, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss and all gradients of it in a row, in float64 on the CPU."""
    torch.manual_seed(2)
    loss = loss_of(probe, model, batch)
    torch.autograd.backward(loss)
    parts = [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
    return torch.cat([part.detach().reshape(-1).double().cpu() for part in parts])
