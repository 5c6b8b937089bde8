"""What is said of NaN and infinity beside finite values."""

from __future__ import annotations

import math

import numpy as np

from shardviz.relate.values import farthest


def test_numbers_that_are_alike_are_no_distance_apart() -> None:
    numbers = np.array([math.nan, math.inf, -math.inf, 0.0, 2.0])
    assert farthest(numbers, numbers * [1, 1, 1, -1, 1]) == 0
    assert farthest(numbers, np.append(numbers[:4], 2.5)) == 0.5
    assert farthest(numbers, np.zeros(5)) == math.inf
