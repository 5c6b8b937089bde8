import pytest

from shardviz.dump.costs import timeline
from shardviz.dump.records.step import StageRecord
from shardviz.errors import ShardvizError


def gpipe(num_ranks, num_microbatches):
    forward = [(number, False) for number in range(num_microbatches)]
    backward = [(number, True) for number in range(num_microbatches)]
    return {rank: [StageRecord(rank, *one) for one in forward + backward] for rank in range(num_ranks)}


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 4), (2, 1), (4, 8), (3, 5)])
def test_the_bubble_of_gpipe_is_that_of_the_formula(num_ranks, num_microbatches):
    times = timeline(gpipe(num_ranks, num_microbatches))
    assert times.length == 3 * (num_microbatches + num_ranks - 1)
    assert times.bubble == pytest.approx(times.formula)
    assert times.formula == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))


def test_a_stage_waits_for_what_it_needs():
    begins = {rank: [begin for _, begin in passes] for rank, passes in timeline(gpipe(2, 2)).begins.items()}
    assert begins == {0: [0, 1, 5, 7], 1: [1, 2, 3, 5]}


def test_a_pipeline_with_a_rank_missing_is_reported_and_not_waited_for():
    schedules = gpipe(3, 2)
    del schedules[1]
    with pytest.raises(ShardvizError, match="rank 0 ran stage 0 on micro-batch 0 before its inputs"):
        timeline(schedules)
