"""Four times the input takes about four times as long, whatever a user does with a dump or a checkpoint."""

from functools import partial

import pytest

from tests.gauges.growth import dumps, stored
from tests.gauges.growth.cases import Input, findings_of_one_tensor, tensors_of_one_finding
from tests.gauges.growth.measure import Growth, growth_of
from tests.lanes import at_night

SMALL = (
    (Input("tensors with a finding each", (dumps.apart,)), "check", 16),
    *at_night(
        [
            (Input("keys renamed", (stored.keys, stored.keys_renamed)), "diff", 16),
            (Input("gradients, all halved", (dumps.gradients_halved,)), "check", 16),
        ]
    ),
)
"""A small form of what `make gauges` measures, in a few seconds; loops of what is slow show at these sizes, too."""


@pytest.mark.parametrize(("small", "use", "size"), SMALL, ids=lambda part: getattr(part, "name", ""))
def test_work_grows_with_its_input_and_not_with_its_square(small, use, size, tmp_path):
    growth = growth_of(f"{small.name}: {use}", partial(small.prepared, tmp_path, use), size, enough=0)
    assert not growth.is_too_fast, str(growth)


@pytest.mark.parametrize("made", [findings_of_one_tensor, tensors_of_one_finding])
def test_findings_are_grouped_in_linear_time(made):
    growth = growth_of(made.__name__, made, 300, enough=0)
    assert not growth.is_too_fast, str(growth)


def _pairs(numbers):
    return sum(one == other for one in numbers for other in numbers)


def test_a_quadratic_loop_is_seen():
    growth = growth_of("pairs", lambda size: partial(_pairs, range(size)), 100, enough=0)
    assert growth.ratio_of_seconds > 8
    assert growth.is_too_fast


def test_a_quadratic_table_is_seen():
    growth = growth_of("table", lambda size: lambda: [[0] * size for _ in range(size)], 60, enough=0)
    assert growth.ratio_of_bytes > 6
    assert growth.is_too_fast


def test_a_loop_that_grows_with_its_input_passes():
    growth = growth_of("sort", lambda size: lambda: sorted(range(size, 0, -1), key=str), 10_000, enough=0)
    assert not growth.is_too_fast, str(growth)


def test_what_starting_costs_hides_no_quadratic_loop():
    sizes = (8, 100, 400)
    seconds, peaks = (1.0 + 1e-5 * size**2 for size in sizes), (1000 + size for size in sizes)
    growth = Growth("started", sizes, tuple(seconds), tuple(peaks))
    assert growth.ratio_of_seconds == pytest.approx(4 * (400 + 8) / (100 + 8))
    assert growth.ratio_of_bytes == pytest.approx(4)


def test_inputs_are_doubled_until_the_work_takes_long_enough():
    growth = growth_of("sum", lambda size: lambda: sum(range(1000 * size)), 10, enough=0.001)
    assert growth.sizes[1] > 10


def test_noise_fails_nothing():
    """A ratio that is too large at first is taken again and at larger sizes, and counts only if it stays."""
    sizes = []

    def made(size):
        sizes.append(size)
        # At size 1,000 and 4,000 as if something had disturbed the larger one; from 2,000 on linear.
        return partial(_pairs, range({4000: 400, 8000: 140}.get(size, 70) if size > 8 else 1))

    assert not growth_of("disturbed", made, 1000, enough=0).is_too_fast
    assert 8000 in sizes


def test_work_that_fails_says_so():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        growth_of("broken", lambda size: lambda: 1 // 0, 10)
