"""Healthy pairs: right programs of random sizes, meshes, styles and dtypes give no alarm. Two hundred at night."""

from functools import cache

import pytest

from tests.bugs.pairs.drawn import DTYPES, KINDS, drawn
from tests.bugs.pairs.running import reports_on
from tests.bugs.running import lines_of
from tests.lanes import at_night

NUM_PAIRS = 200
DAILY = (2, 25, 57)
"""Tensor parallel by hand in bfloat16, FSDP2 in float64, experts in bfloat16: on two ranks or three."""


@cache
def reports(*seeds):
    pairs = [drawn(seed) for seed in seeds]
    return {seeds[at]: report for at, report in reports_on([(pair.source, pair.mesh) for pair in pairs])}


@pytest.mark.parametrize("seed", [*DAILY, *at_night(seed for seed in range(NUM_PAIRS) if seed not in DAILY)])
def test_a_right_program_gives_no_alarm(seed):
    alike = DAILY if seed in DAILY else tuple(seed for seed in range(NUM_PAIRS) if seed not in DAILY)
    report, pair = reports(*alike)[seed], drawn(seed)
    assert not isinstance(report, str), f"{pair.name} on {pair.mesh}: {report}"
    said = "\n".join(line for line in lines_of(report) if line)
    assert report.findings == (), f"{pair.name} on {pair.mesh} in {pair.dtype}:\n{said}"


def test_pairs_are_of_all_kinds_and_dtypes_and_always_the_same():
    pairs = [drawn(seed) for seed in range(NUM_PAIRS)]
    assert {(pair.name, pair.dtype) for pair in pairs} == {
        (kind.program.name, dtype) for kind in KINDS for dtype in DTYPES
    }
    assert len({pair.source for pair in pairs}) == NUM_PAIRS
    assert all(2 <= pair.num_ranks <= 8 for pair in pairs)
    assert drawn(7) == drawn(7)
