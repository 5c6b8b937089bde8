"""Healthy pairs: right programs of random sizes, meshes, styles and dtypes give no alarm. Two hundred at night."""

from functools import cache

import pytest

from tests.bugs.pairs.drawn import DTYPES, KINDS, drawn
from tests.bugs.pairs.running import reports_on
from tests.bugs.running import lines_of
from tests.lanes import nightly

NUM_PAIRS = 200


@cache
def reports():
    return dict(reports_on([(pair.source, pair.mesh) for pair in map(drawn, range(NUM_PAIRS))]))


@nightly
@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_a_right_program_gives_no_alarm(seed):
    report, pair = reports()[seed], drawn(seed)
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
