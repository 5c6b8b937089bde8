"""What is said of NaN and infinity beside finite values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.relate.values import farthest
from tests.check.steps import WANTED, Step, by_tp, on_all

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def with_one(number: float) -> NDArray[np.float64]:
    values = WANTED.copy()
    values[1, 2] = number
    return values


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_says_where_and_not_how_far(tmp_path: Path, number: float) -> None:
    (found,), _ = Step(tmp_path).add("w", "grad", on_all(with_one(number))).check()
    assert found.summary == (
        "the gradient is NaN or infinite in 1 of 16 elements on rank 0, the first at [1, 2]; the unsharded "
        "model's are finite"
    )


def test_a_logged_value_that_is_not_finite_is_told_beside_the_right_one(tmp_path: Path) -> None:
    (found,), _ = Step(tmp_path).add("loss", "scalar", on_all(math.nan), 4.0).check()
    assert found.summary == "the value is nan on rank 0; the unsharded model's is 4"


@pytest.mark.parametrize("pair", [(math.nan, 1.0), (math.inf, -math.inf)])
def test_copies_of_which_one_is_not_finite_are_told_apart_without_a_number(
    tmp_path: Path, pair: tuple[float, float]
) -> None:
    first, second = map(with_one, pair)
    found, _ = Step(tmp_path).add("w", "grad", by_tp(first, second)).check()
    assert len(found) == 1
    assert "up to" not in found[0].summary


def test_numbers_that_are_alike_are_no_distance_apart() -> None:
    numbers = np.array([math.nan, math.inf, -math.inf, 0.0, 2.0])
    assert farthest(numbers, numbers * [1, 1, 1, -1, 1]) == 0
    assert farthest(numbers, np.append(numbers[:4], 2.5)) == 0.5
    assert farthest(numbers, np.zeros(5)) == math.inf
