"""Learning rates of two jobs, step by step: the same schedule at another pace, or another schedule."""

from __future__ import annotations

import pytest

from shardviz.check.step.jobs.optimizers import pace_of

WARM_UP = [0.02, 0.04, 0.06, 0.08, 0.1, 0.08, 0.06, 0.04, 0.02]


def options_of(rates):
    return [{"up.weight": {"lr": f"{rate:.6g}"}, "down.weight": {"lr": f"{rate / 2:.6g}"}} for rate in rates]


@pytest.mark.parametrize(
    ("wanted", "given", "pace"),
    [
        (WARM_UP, WARM_UP[::2], (2, False)),
        (WARM_UP, WARM_UP[::2] + [0.01] * 4, (2, False)),
        (WARM_UP, WARM_UP[::4], (4, False)),
        (WARM_UP, [rate for rate in WARM_UP for _ in range(2)][:9], (2, True)),
        (WARM_UP, [rate for rate in WARM_UP for _ in range(3)][:9], (3, True)),
        (WARM_UP, [0.02, 0.04, 0.06, 0.07, 0.1], None),
        (WARM_UP, [0.02, 0.06], None),
        (WARM_UP, [0.02, *(2 * rate for rate in WARM_UP[1:])], None),
        (WARM_UP, [0.02] * 9, None),
        ([0.1] * 9, [0.1] * 9, None),
        ([0.1] * 4 + [0.01] * 5, [0.1] * 4 + [0.02] * 5, None),
    ],
)
def test_a_schedule_that_runs_faster_or_slower_is_told_from_another_one(wanted, given, pace):
    assert pace_of(options_of(wanted), options_of(given)) == pace
