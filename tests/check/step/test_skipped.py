"""Gradients of different weights that one reduction mixes."""

import numpy as np
import pytest

from tests.check.steps import MESH, Step

FIRST, SECOND = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[7.0, -1.0], [0.5, 4.0]])


@pytest.mark.parametrize(
    ("are_on_all", "cause"), [(True, "skipped-in-reduction"), (False, "mixed-layers"), (None, "mixed-layers")]
)
def test_weights_that_ranks_skip_are_told_from_those_of_other_stages(tmp_path, are_on_all, cause):
    mixed = (FIRST + SECOND) / 2
    step = Step(tmp_path)
    for name, wanted, place in (("a", FIRST, 0), ("b", SECOND, 1)):
        ranks = [rank for rank in MESH.ranks if MESH.coord_of(rank)[0] == place]
        step.add(name, "grad", dict.fromkeys(ranks, mixed), wanted)
        for rank in () if are_on_all is None else MESH.ranks if are_on_all else ranks:
            step.put(rank, name, "param", "initial", wanted)
    findings, _ = step.check()
    assert {finding.explanation.name for finding in findings if finding.kind == "wrong-value"} == {cause}
