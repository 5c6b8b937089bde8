"""Outputs with infinities: where both sides have the same ones, as masked logits do, the rest is compared."""

import numpy as np
import pytest

from shardviz.check.step.comparison import Compared, Rounding, _without_infinities
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh

MASKED = np.array([[1.0, 2.0, -np.inf, -np.inf], [3.0, 4.0, 5.0, -np.inf]])


def pair(change=lambda values: values):
    mesh = parse_mesh("tp=2")
    layout = Layout(mesh, MASKED.shape, ((), ("tp",)))
    regions = dict(layout.regions())
    values = {rank: MASKED[:, 2 * rank :][:, :2].copy() for rank in regions}
    values[1] = change(values[1])
    return _without_infinities(
        Compared(
            name="output",
            role="output",
            mesh=mesh,
            claimed=layout,
            wanted=MASKED,
            values=values,
            regions=regions,
            rounding=Rounding(2.0**-53, 4, 0.0),
            noise=0.0,
        )
    )


def test_the_same_infinities_are_right_and_the_rest_is_compared():
    assert pair().incomparable == ""
    assert pair().wrong == ()
    assert pair(lambda values: values + 1).wrong == (1,)  # minus infinity stays what it is


@pytest.mark.parametrize("other", [0.0, np.inf, np.nan])
def test_another_number_where_an_infinity_should_be_leaves_the_pair_as_it_is(other):
    assert "3 of 8 elements" in pair(lambda values: np.where(np.isfinite(values), values, other)).incomparable
