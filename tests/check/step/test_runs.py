"""Sketches of two runs' tensors, side by side."""

import numpy as np

from shardviz.check.step.runs import Pair
from shardviz.dump.arrays import sketch
from shardviz.dump.records.trace import SketchRecord


def test_a_tensor_times_a_number_is_told_from_another_one():
    values, other = np.random.default_rng(0).normal(size=(2, 500))
    first, twice, second = (
        SketchRecord("x", "output", "float64", (500,), sketch(each)) for each in (values, 2 * values, other)
    )
    assert abs(Pair(first, twice).factor - 2) < 1e-9
    assert Pair(first, second).factor is None
