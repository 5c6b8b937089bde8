"""The unsharded model's gradient of every micro-batch, so that a check can say how often each of them counts.

A step that runs the model several times over parts of its batch accumulates their gradients. Micro-batch j is the j-th
part of every rank's rows. Only gradients are kept, under the names that `dump.records.step.of_micro_batch` gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shardviz.dump.records.step import of_micro_batch
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.locals import local_tensors
from shardviz.live.step.batch import part_of
from shardviz.live.step.running import tensors_in
from shardviz.live.step.step import gradients, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import nn

    from shardviz.live.capture.locals import Local
    from shardviz.live.step.batch import Batch
    from shardviz.live.step.step import StepResult
    from shardviz.live.step.unsharded.step import UnshardedStep

MAX_PARTS = 16
"""Of a step with more micro-batches than this, none is looked at alone."""

MAX_ELEMENTS = 1 << 20
"""No more elements than this are kept of all gradients of all micro-batches."""


def gradients_of_micro_batches(
    probe: ModuleType,
    build: Callable[[], nn.Module],
    batch: Batch,
    parts: int,
    step: StepResult,
    reference: UnshardedStep,
) -> list[Local]:
    """Return the unsharded model's gradient of each micro-batch. Every rank calls this.

    Args:
        probe: The probe, for its loss.
        build: Builds the model, with the same values every time.
        batch: The whole batch.
        parts: The number of equal parts that the ranks share.
        step: The sharded step, whose runs of the model are its micro-batches.
        reference: The unsharded model after its step.

    Returns:
        The gradients; none where the step ran the model once, over parts of unequal size, or with a loss of its own.
    """
    count = max(of_all_ranks(sum(output.ndim > 0 for output in step.seen.outputs)))
    rows = {len(tensor) for tensor in tensors_in(batch) if tensor.ndim}
    size = sum(one.numel() for one in reference.model.parameters()) * count
    if (
        reference.has_own_loss
        or not 1 < count <= MAX_PARTS
        or size > MAX_ELEMENTS
        or any(number % (parts * count) for number in rows)
    ):
        return []
    found = []
    for number in range(count):
        model = reference.mode(build())
        for rank in range(parts):
            torch.manual_seed(2)
            own = part_of(part_of(batch, rank, parts), number, count)
            torch.autograd.backward(loss_of(probe, model, own) / parts)
        found += [
            replace(one, name=of_micro_batch(one.name, number), role="activation")
            for one in gradients(list(local_tensors(model)))
        ]
    return found
