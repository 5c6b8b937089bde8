"""Why weights are not a reference's: how they relate, ties, an optimizer of other tensors.

A weight of which all ranks differ may be rounded, in another order, or another weight's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch.distributed.tensor import DTensor

from shardviz.checkpoint.comparing.one_tensor.orders import name_change
from shardviz.checkpoint.records import MemoryTensor
from shardviz.explain.checkpoints.conversion import NarrowedOnTheWay
from shardviz.explain.step.update import OptimizerOfOtherParameters
from shardviz.explain.testing.assertions import (
    AllRanksDiffer,
    OtherOrderThanReference,
    TiedWeightChangedTwice,
    WeightTimesNumber,
)
from shardviz.explain.testing.transfers import SwappedTensors
from shardviz.layout.dtypes import HALVES
from shardviz.layout.notation import write
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import is_as_claimed
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name
from shardviz.live.run.references.values import living_optimizers
from shardviz.live.step.steppers import parameters_of
from shardviz.reference.lookup import bits_of
from shardviz.relate.casts import rounding_between
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.live.claims.local import Local

    Values = NDArray[np.float64]


WIDE = "float64"
"""The dtype of all values here, and of the bits that are compared."""


def related_weight(comparison: Compared, references: Mapping[str, Values]) -> Finding | None:
    """Return the finding for a weight whose values are the reference's, related to them in a way that has a name.

    Args:
        references: The reference's tensors of the same role, by name.
    """
    whole = _whole(comparison)
    if whole is None or not whole.size or np.ptp(whole) == 0:
        return None
    for cause, sentence in _relations(comparison, whole, references):
        claimed = write(comparison.claimed) if comparison.claimed else ""
        return cause.finding(comparison.name, tuple(comparison.reduced), sentence, claimed=claimed)
    return None


def _relations(comparison: Compared, whole: Values, references: Mapping[str, Values]) -> Iterator[tuple[Cause, str]]:
    """Yield what a whole tensor is of the reference's, with its cause, the surest first."""
    expected = comparison.wanted
    for name, values in references.items():
        if name != comparison.name and np.array_equal(values, whole):
            yield SwappedTensors(), f"it holds what the reference has as {printable(name)}"
    before, after = bits_of(expected + 0.0), bits_of(whole + 0.0)  # minus zero is zero
    for there, here, words in (
        (before, after, "it has the reference's values, rounded to"),
        (after, before, "the reference has its values, rounded to"),
    ):
        if rounding := rounding_between(there, WIDE, here, WIDE, HALVES):
            yield NarrowedOnTheWay(rounding.dtype, "the wider dtype"), f"{words} {rounding.dtype}"
    if order := name_change(before, after):
        yield OtherOrderThanReference(), f"the values are the reference's in another order: {order}"


def _whole(comparison: Compared) -> Values | None:
    """Return a tensor put together from all ranks; None if copies differ or a part of it is missing."""
    whole = np.full(comparison.wanted.size, np.nan)
    for rank, held in comparison.reduced.items():
        ids = comparison.regions[rank].flat_ids(comparison.wanted.shape).ravel()
        known = ~np.isnan(whole[ids])
        if not np.array_equal(whole[ids][known], held.ravel()[known]):
            return None
        whole[ids] = held.ravel()
    return None if np.isnan(whole).any() else whole.reshape(comparison.wanted.shape)


EXPLAINED = (AllRanksDiffer, WeightTimesNumber)


def with_ties(findings: Sequence[Finding], weights: Sequence[Local]) -> list[Finding]:
    """Explain weights that are wrong on all ranks if they are one tensor, and all others are right.

    Every rank calls this.
    """
    wrong = {finding.tensor for finding in findings}
    is_explained = all(isinstance(finding.explanation, EXPLAINED) for finding in findings)
    if not is_explained or not 1 < len(wrong) < len(weights):
        return list(findings)
    if not all(of_all_ranks(_is_one_tensor([local for local in weights if local.name in wrong]))):
        return list(findings)
    others = counted(len(weights) - len(wrong), "other tensor")
    text = f"; these {len(wrong)} names are those of one tensor, and the {others} of the model are right"
    return [
        replace(finding, sentence=finding.sentence + text).because(
            TiedWeightChangedTwice(len(wrong), isinstance(finding.explanation, WeightTimesNumber))
        )
        for finding in findings
    ]


def _is_one_tensor(weights: Sequence[Local]) -> bool:
    """Whether weights have one memory on this rank, or nothing of them is here."""
    places = {(local.values.data_ptr(), tuple(local.values.shape), local.values.stride()) for local in weights}
    return len(places) == 1


def with_optimizer(findings: Sequence[Finding], weights: Sequence[Local]) -> list[Finding]:
    """Explain weights that are wrong on all ranks if an optimizer steps different tensors.

    Every rank calls this.
    """
    if not any(isinstance(finding.explanation, AllRanksDiffer) for finding in findings) or not _are_left_behind(
        weights
    ):
        return list(findings)
    text = f"; an optimizer steps {len(weights)} other tensors, which have the values that the model still has"
    return [
        replace(finding, kind="write-not-applied", sentence=finding.sentence + text).because(
            OptimizerOfOtherParameters()
        )
        if isinstance(finding.explanation, AllRanksDiffer)
        else finding
        for finding in findings
    ]


def _are_left_behind(weights: Sequence[Local]) -> bool:
    """Whether an optimizer steps copies of the parameters instead. Every rank calls this."""
    stepped = [list(parameters_of(optimizer)) for optimizer in living_optimizers()]
    is_left = any(len(own) == len(weights) and all(map(_is_copy, own, weights)) for own in stepped)
    return all(of_all_ranks(is_left))


def _is_copy(stepped: torch.Tensor, weight: Local) -> bool:
    """Whether a tensor is not a model's parameter and has the values that it is a part of."""
    if isinstance(stepped, DTensor) or stepped.is_meta or stepped.data_ptr() == weight.values.data_ptr():
        return False
    return is_as_claimed(weight, MemoryTensor("", dtype_name(stepped.dtype), bits_of_tensor(stepped.detach())))
