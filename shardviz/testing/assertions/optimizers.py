"""Optimizers of a test that step other tensors than the parameters of the model under test."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardviz.checkpoint.records import MemoryTensor
from shardviz.explain.step.update import OptimizerOfOtherParameters
from shardviz.explain.testing.assertions import AllRanksDiffer
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import is_as_claimed
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardviz.explain.finding import Finding
    from shardviz.live.capture.locals import Local


def with_optimizer(findings: Sequence[Finding], weights: Sequence[Local]) -> list[Finding]:
    """Explain weights that are wrong on all ranks if an optimizer steps different tensors.

    Every rank calls this.

    Args:
        findings: What differs.
        weights: This rank's part of the model's parameters.
    """
    if not any(isinstance(one.explanation, AllRanksDiffer) for one in findings) or not _are_left_behind(weights):
        return list(findings)
    text = f"; an optimizer steps {len(weights)} other tensors, which have the values that the model still has"
    return [
        replace(one, kind="write-not-applied", sentence=one.sentence + text).because(OptimizerOfOtherParameters())
        if isinstance(one.explanation, AllRanksDiffer)
        else one
        for one in findings
    ]


def _are_left_behind(weights: Sequence[Local]) -> bool:
    """Whether an optimizer steps copies of the parameters instead. Every rank calls this."""
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]  # isinstance runs proxies' code
    stepped = [[one for group in optimizer.param_groups for one in group["params"]] for optimizer in optimizers]
    is_left = any(len(own) == len(weights) and all(map(_is_copy, own, weights)) for own in stepped)
    return all(of_all_ranks(is_left))


def _is_copy(stepped: torch.Tensor, weight: Local) -> bool:
    """Whether a tensor is not a model's parameter and has the values that it is a part of."""
    if isinstance(stepped, DTensor) or stepped.is_meta or stepped.data_ptr() == weight.values.data_ptr():
        return False
    return is_as_claimed(weight, MemoryTensor("", dtype_name(stepped.dtype), bits_of_tensor(stepped.detach())))
