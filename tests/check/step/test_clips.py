"""Ranks that clip gradients by norms of their own, from what a job's trace says of the calls."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from shardviz.check.step.jobs import gradients as clips_module
from shardviz.check.step.jobs.gradients import clips_of, own_norms, with_own_clips, with_round_norms
from shardviz.dump.records.step import ClipRecord
from shardviz.explain.step.scales import ClippedByOwnNorms, ScaledBackward, ScaledInStep
from shardviz.explain.step.two_jobs import DifferentClips
from shardviz.explain.step.whole_step import UnexplainedBackward


def job(*norms, limit=0.5):
    """Return a job whose ranks clipped once each, by the given norms; those of None did not clip."""
    clips = [() if norm is None else (ClipRecord(norm, limit),) for norm in norms]
    records = {rank: SimpleNamespace(clips=of_rank) for rank, of_rank in enumerate(clips)}
    return SimpleNamespace(records=records, ranks={}, weights=lambda role: {})


def test_norms_that_differ_are_each_ranks_own():
    cause = own_norms(job(4.5, 25.25))
    assert cause == ClippedByOwnNorms(("4.5 on rank 0", "25.25 on rank 1"), 0.5, False)


def test_clipped_gradients_that_are_multiples_have_the_cause_of_the_others():
    scaled = ScaledInStep(of_all=True).finding("a", (0, 1), "the gradient is 0.658 times the other", kind="wrong-scale")
    unexplained = UnexplainedBackward().finding("b", (0, 1), "the gradient is off")
    (clipped,) = with_own_clips([unexplained, scaled], job(4.5, 4.7))
    assert clipped.tensors == ("b", "a")
    assert clipped.explanation == ClippedByOwnNorms(("4.5 on rank 0", "4.7 on rank 1"), 0.5, False)
    assert with_own_clips([unexplained, scaled], job(4.5, 4.5)) == [unexplained, scaled]


def parts(*clips):
    """Return a job whose ranks clipped once each, by a norm of which each has a part."""
    made = job(*(1.0 for _ in clips))
    for rank, clip in enumerate(clips):
        made.records[rank].clips = (clip,)
    return made


@pytest.mark.parametrize(("order", "whole"), [(2, 5.0), (1, 7.0), (None, 4.0)])
def test_norms_of_parts_are_one_norm(order, whole):
    sharded = parts(ClipRecord(3.0, 0.5, (0, 1), order), ClipRecord(4.0, 0.5, (0, 1), order))
    assert own_norms(sharded) is None
    clips = clips_of(job(2 * whole), sharded)
    assert clips is not None
    assert clips.before == 0.5


def test_norms_of_parts_of_which_some_lack_or_over_one_axis_alone_are_no_whole_norm():
    assert clips_of(job(5.0), parts(ClipRecord(3.0, 0.5, (0, 1)))) is None
    rows = [
        ClipRecord(norm, 0.5, ranks) for norm, ranks in ((3.0, (0, 1)), (4.0, (0, 1)), (8.0, (2, 3)), (6.0, (2, 3)))
    ]
    cause = own_norms(parts(*rows))
    assert cause is not None
    assert cause.norms == ("5 on rank 0", "5 on rank 1", "10 on rank 2", "10 on rank 3")


def calling(*clips):
    """Return a job of two ranks that make these calls, each with a norm and a limit."""
    made = job(1.0, 1.0)
    for record in made.records.values():
        record.clips = tuple(ClipRecord(*clip) for clip in clips)
    return made


@pytest.mark.parametrize(
    ("calls", "after", "unmet"),
    [
        ([(0.0, 0.2), (1.5, 1.0)], 5, 0.2),
        ([(0.0, 0.2)], 7.5, 0.2),
        ([], 7.5, None),
        ([(1.5, 0.2)], 1, None),
        ([(1.5, 0.2), (0.0, 0.2)], 1, 0.2),
    ],
)
def test_a_call_that_finds_no_gradients_clips_nothing(calls, after, unmet):
    clips = clips_of(job(1.5, limit=0.2), calling(*calls))
    assert clips is not None
    assert math.isclose(clips.after, after, rel_tol=1e-5)
    assert clips.unmet == unmet


@pytest.mark.parametrize("calls", [[(1.5, 0.2), (0.2, 0.1)], [(math.inf, 0.2)], [(1.5, 0.0)]])
def test_jobs_that_clip_twice_or_by_no_number_are_not_compared_by_their_norms(calls):
    assert clips_of(job(1.5, limit=0.2), calling(*calls)) is None
    assert clips_of(calling(), calling((0.0, 1.0))) is None


WANTED = np.array([[0.6, 0.8], [1.2, 1.6]])
"""A gradient whose norm is the root of 5."""


@pytest.mark.parametrize(
    ("norm", "factor", "limits"),
    [
        (1.0, 3.7, ("1 in the other job", "3.7 in this one")),
        (0.2, 5.0, ("0.2 in the other job", "1 in this one")),
        (5**0.5, 5.0, None),
    ],
)
def test_a_factor_of_gradients_whose_norm_is_round_comes_from_clipping(norm, factor, limits, monkeypatch):
    gradient = SimpleNamespace(wanted=WANTED * norm / 5**0.5)
    alike = SimpleNamespace(gradients=(gradient,), factor=factor)
    monkeypatch.setattr(clips_module, "multiplied", lambda evidence: alike)
    monkeypatch.setattr(clips_module, "nearness", lambda gradients: 1e-6)
    finding = ScaledBackward(factor, None, "unseen").finding("a", (0, 1), "it is multiplied")
    cause = with_round_norms(None, finding, None).explanation
    assert cause == (finding.explanation if limits is None else DifferentClips(limits, is_seen=False))
    both = clips_of(job(1.5, limit=0.2), job(1.5, limit=0.2))
    assert with_round_norms(None, finding, both).explanation == finding.explanation


@pytest.mark.parametrize("norms", [(4.5, 4.5), (4.5, 4.5000001), (0.1, 0.2), (4.5, None), (None, None)])
def test_one_norm_or_none_that_clips_is_no_cause(norms):
    assert own_norms(job(*norms)) is None
