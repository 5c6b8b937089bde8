"""Whether a probe's step has a loss that the unsharded model does not know.

A probe may have a `step` and no `loss`: then the unsharded model's is the mean square of the output. It is the step's
too if the step returns that of what its model returned, right or wrong. Of another loss nothing can be compared that
comes after the output.

The loss of a whole batch is a weighted mean of the losses of its parts if every part divides by a count of its own:
tokens, labels that are not ignored. Its gradients then are the mean of the parts' gradients with the same weights,
which no loss over pairs of rows has, wherever its value lies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from shardviz.dump.records.trace import NO_MEAN
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.compat.meshes import whole_of
from shardviz.live.step.batch import part_of
from shardviz.live.step.step import loss_of
from shardviz.relate.tolerance import ROUNDINGS_OF_ONE, ROUNDINGS_OF_STEP, SINGLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from shardviz.dump.records.trace import StepAnswer
    from shardviz.live.step.batch import Batch, Setting
    from shardviz.live.step.step import StepResult
    from shardviz.live.step.unsharded.step import UnshardedStep


LOSS = (
    "the step's loss, gradients and logged values compared with the unsharded model's: the probe has a step and no "
    "loss(model, batch), and the step returns another number than the mean square of the model's output, which stands "
    "in for the loss; define loss"
)
INPUT = (
    "the step: the probe has a step and no loss(model, batch), and the step calls the model with something else than "
    "its batch, which the unsharded model is called with; define loss"
)


def with_own_loss(
    probe: ModuleType, step: StepResult, reference: UnshardedStep, judge: Callable[[UnshardedStep], StepAnswer]
) -> UnshardedStep:
    """Return the reference with notes if the step has its own loss. Every rank calls this.

    Args:
        judge: Says what the sharded step has of a reference's values.
    """
    if not hasattr(probe, "step") or hasattr(probe, "loss") or not _has_different_loss(step, reference):
        return reference
    forward = replace(reference, has_own_loss=True)
    if judge(forward).is_called_otherwise:
        return replace(forward, is_called_otherwise=True, notes=(INPUT,))
    return replace(forward, notes=(*(reference.whole or reference).notes, LOSS))


def _has_different_loss(step: StepResult, reference: UnshardedStep) -> bool:
    """Whether a sharded step's loss is another one than the mean square. Every rank calls this."""
    of_all = of_all_ranks((float(whole_of(step.loss)), _squares(step), _squares(step, torch.float64)))
    losses = [loss for loss, *_ in of_all]
    loss_ways = [(loss, ways) for loss, *ways in of_all if ways[0]]
    near = max(SINGLE, ROUNDINGS_OF_ONE * reference.precision)

    def are(actual: Sequence[float], expected: Sequence[float]) -> bool:
        return bool(np.allclose(actual, expected, rtol=near, atol=0.0, equal_nan=True))

    if not np.all(np.isfinite(losses)) or are([float(np.mean(losses))], [float(whole_of(reference.step.loss))]):
        return False
    own_losses = [loss for loss, _ in loss_ways]
    candidates = [losses_of_way for way in (0, 1) for losses_of_way in _losses([ways[way] for _, ways in loss_ways])]
    return not loss_ways or not any(are(own_losses, expected) for expected in candidates)


def _losses(of_all: Sequence[Sequence[float]]) -> Iterator[list[float]]:
    """Yield what ranks may return, made of the mean squares of each one's outputs."""
    yield [float(np.mean([np.mean(squares) for squares in of_all]))] * len(of_all) if of_all else []
    yield [float(np.mean(squares)) for squares in of_all]
    yield [squares[-1] for squares in of_all]


def _squares(step: StepResult, dtype: torch.dtype | None = None) -> list[float]:
    """Return the mean squares of this rank's outputs, in their own dtype or in another.

    Of a narrow output a step may compute either.
    """
    if step.output is None:
        return []
    outputs = [output.detach().to(dtype or output.dtype) for output in step.observation.outputs if output.ndim]
    return [float(whole_of(output.square().mean())) for output in outputs]


def is_weighted_mean(probe: ModuleType, setting: Setting, precision: float) -> bool:
    """Return whether weights with sum 1 turn the parts' losses and gradients into the batch's.

    Args:
        precision: The relative precision of the narrowest dtype in the step.
    """
    parts = setting.parts
    whole = _loss_and_gradients(probe, setting.build(), setting.batch)
    batches = (part_of(setting.batch, number, parts, setting.dim) for number in range(parts))
    columns = [_loss_and_gradients(probe, setting.build(), batch) for batch in batches]
    ones = whole.norm().expand(parts + 1)
    stacked = torch.cat((torch.stack([*columns, whole], 1), ones[None]))
    matrix, target = stacked[:, :-1], stacked[:, -1:]
    weights = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
    off = (matrix @ weights - target).norm() / target.norm().clamp(min=1e-30)
    near = max(SINGLE, ROUNDINGS_OF_STEP * precision)
    return bool(off <= near) and bool((weights >= -near).all()) and len(whole) > parts


def _loss_and_gradients(probe: ModuleType, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss and all gradients of it in a row, in float64 on the CPU."""
    torch.manual_seed(2)
    loss = loss_of(probe, model, batch)
    torch.autograd.backward(loss)
    parts = [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
    return torch.cat([part.detach().reshape(-1).double().cpu() for part in parts])


def why_apart(model: nn.Module, independent: bool | None) -> str:
    """Say why the mean over parts of the batch is not the loss of the whole batch.

    Args:
        independent: Whether the outputs of the parts are the whole batch's; None if that is not known.
    """
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    if any(isinstance(module, norms) and module.training for module in model.modules()):
        return "BatchNorm in training"
    if independent is False:
        return "the output of a row depends on its number or on other rows: on purpose, or counted from 0 on each rank"
    return f"{NO_MEAN}, but a sum, or it uses a sum, a variance or the other rows of the rank"
