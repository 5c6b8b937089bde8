"""Norms that ranks may have clipped by: of several that are near, the nearest one is named."""

from types import SimpleNamespace

import numpy as np
import pytest

from shardviz.check.step.rules.all_gradients import norm_over
from shardviz.check.step.update import reasons
from shardviz.explain.step.scales import ClippedByParts, NormOverWrongAxes
from shardviz.layout.mesh import parse_mesh

NORMS = [
    ("the sum over shard of each rank's own", 14.14107, ()),
    ("the root of the sum of squares over replicate and shard of each rank's own", 14.14214, ("replicate", "shard")),
]


def of_norms(monkeypatch, factor, norms):
    """Return why everything is multiplied by a factor if all gradients have a norm of 10."""
    monkeypatch.setattr(reasons, "norms_of_parts", lambda gradients: iter(norms))
    mesh, wanted = parse_mesh("replicate=2,shard=2"), np.array([6.0, 8.0])
    gradient = SimpleNamespace(name="weight", mesh=mesh, wanted=wanted, is_split=lambda axis: axis == "shard")
    return reasons.by_norm_of_copies([gradient], {0: factor, 1: factor}, "the step")


@pytest.mark.parametrize("order", [1, -1])
def test_the_nearest_of_two_norms_is_named(monkeypatch, order):
    exact = of_norms(monkeypatch, 10 / 14.14214, NORMS[::order])
    assert "the root of the sum of squares over replicate and shard" in exact.clause
    assert isinstance(exact.explanation, NormOverWrongAxes)
    other = of_norms(monkeypatch, 10 / 14.14107, NORMS[::order])
    assert "the sum over shard of each rank's own" in other.clause
    assert isinstance(other.explanation, ClippedByParts)


def test_a_factor_that_no_norm_explains_has_no_such_reason(monkeypatch):
    assert of_norms(monkeypatch, 0.5, NORMS) is None
    assert of_norms(monkeypatch, 1.0, [("the norm", 10.0, ())]) is None


@pytest.mark.parametrize(("split", "copied"), [(("up", "norm"), None), (("up",), "norm"), ((), "up")])
def test_squares_that_are_summed_over_an_axis_count_the_copies_along_it(split, copied):
    mesh = parse_mesh("dp=2,tp=2")
    gradients = [
        SimpleNamespace(name=name, mesh=mesh, is_split=lambda axis, name=name: axis == "tp" and name in split)
        for name in ("up", "norm")
    ]
    cause = norm_over(("tp",), gradients)
    assert cause == (NormOverWrongAxes(copied, "tp", "", "") if copied else None)
