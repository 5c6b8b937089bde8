"""Four times the input takes about four times as long, whatever a user does with a dump or a checkpoint."""

from functools import partial

import pytest

from tests.gauges.growth import dumps, stored
from tests.gauges.growth.cases import Input
from tests.gauges.growth.measure import growth_of

SMALL = (
    Input("tensors with a finding each", 16, (dumps.apart,), ("check",)),
    Input("tensors in one finding", 16, (dumps.alike,), ("html",)),
    Input("gradients, all halved", 16, (dumps.gradients_halved,), ("check",)),
    Input("modules of a trace, half wrong", 100, (dumps.trace_found,), ("check",)),
    Input("modules of two jobs", 16, (dumps.job, dumps.job_found), ("diff",)),
    Input("keys renamed", 32, (stored.keys, stored.keys_renamed), ("diff",)),
    Input("ranks of a plan", 128, (stored.planned_ranks,), ("show",)),
)
"""A small form of what `make gauges` measures, in a few seconds; loops of what is slow show at these sizes, too."""


@pytest.mark.parametrize("small", SMALL, ids=lambda small: small.name)
def test_work_grows_with_its_input_and_not_with_its_square(small, tmp_path):
    (use,) = small.uses
    growth = growth_of(f"{small.name}: {use}", partial(small.prepared, tmp_path, use), small.size, runs=2)
    assert not growth.is_too_fast, str(growth)


def _pairs(numbers):
    return sum(one == other for one in numbers for other in numbers)


def test_a_quadratic_loop_is_seen():
    growth = growth_of("pairs", lambda size: partial(_pairs, range(size)), 40, runs=2)
    assert growth.ratio_of_seconds > 8
    assert growth.is_too_fast


def test_a_quadratic_table_is_seen():
    growth = growth_of("table", lambda size: lambda: [[0] * size for _ in range(size)], 150, runs=1)
    assert growth.ratio_of_bytes > 6
    assert growth.is_too_fast


def test_a_loop_that_grows_with_its_input_passes():
    growth = growth_of("sort", lambda size: lambda: sorted(range(size, 0, -1), key=str), 20_000, runs=2)
    assert not growth.is_too_fast, str(growth)


def test_a_fixed_cost_hides_no_growth_for_good_and_noise_fails_nothing():
    """A ratio that is too large at first is taken again at larger sizes, and counts only if it stays."""
    sizes = []

    def made(size):
        sizes.append(size)
        # At size 1,000 and 4,000 as if something had disturbed the larger one; from 2,000 on linear.
        return partial(_pairs, range(30 if size in (8, 1000) else 300 if size == 4000 and len(sizes) < 4 else 60))

    assert not growth_of("disturbed", made, 1000, runs=1).is_too_fast
    assert 8000 in sizes


def test_work_that_fails_says_so():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        growth_of("broken", lambda size: lambda: 1 // 0, 10)
