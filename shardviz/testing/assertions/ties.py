"""Weights that alone are wrong and are one tensor under several names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.explain.testing.assertions import AllRanksDiffer, TiedWeightChangedTwice, WeightTimesNumber
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.explain.finding import Finding
    from shardviz.live.capture.locals import Local

EXPLAINED = (AllRanksDiffer, WeightTimesNumber)


def with_ties(findings: Sequence[Finding], weights: Sequence[Local]) -> list[Finding]:
    """Explain weights that are wrong on all ranks if they are one tensor, and all others are right.

    Every rank calls this.

    Args:
        findings: What differs.
        weights: This rank's part of the model's parameters and buffers.
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
