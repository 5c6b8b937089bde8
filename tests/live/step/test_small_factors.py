"""One gradient that is a hundredth too large is found in bfloat16, and the same program without that is quiet."""

from functools import cache

from tests.bugs.pairs.running import reports_on
from tests.bugs.places.later.small import FAULTS

MESH = "dp=1,tp=2"


@cache
def both():
    fault = FAULTS[0]
    sources = [fault.source(narrow=True), fault.program.source(narrow=True)]
    return dict(reports_on([(source, MESH) for source in sources]))


def test_a_hundredth_too_much_of_one_gradient_is_found_in_bfloat16():
    (found,) = both()[0].findings
    assert (found.kind, found.tensor) == ("wrong-scale", "layers.1.mlp.up.weight")
    assert "1.0" in found.summary
    assert "its module's own input and output gradient" in found.summary


def test_the_same_program_with_right_gradients_is_quiet():
    assert both()[1].findings == ()
