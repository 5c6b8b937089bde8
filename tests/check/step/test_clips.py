"""Ranks that clip gradients by norms of their own, from what a job's trace says of the calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardviz.check.step.jobs.clips import own_norms
from shardviz.dump.records.step import ClipRecord
from shardviz.explain.step.scales import ClippedByOwnNorms


def job(*norms, limit=0.5):
    """Return a job whose ranks clipped once each, by the given norms; those of None did not clip."""
    clips = [() if norm is None else (ClipRecord(norm, limit),) for norm in norms]
    records = {rank: SimpleNamespace(clips=of_rank) for rank, of_rank in enumerate(clips)}
    dump = SimpleNamespace(files=SimpleNamespace(ranks=records))
    return SimpleNamespace(job=SimpleNamespace(dump=dump, ranks={}))


def test_norms_that_differ_are_each_ranks_own():
    cause = own_norms(job(4.5, 25.25))
    assert cause == ClippedByOwnNorms(("4.5 on rank 0", "25.25 on rank 1"), 0.5, False)


@pytest.mark.parametrize("norms", [(4.5, 4.5), (4.5, 4.5000001), (0.1, 0.2), (4.5, None), (None, None)])
def test_one_norm_or_none_that_clips_is_no_cause(norms):
    assert own_norms(job(*norms)) is None
