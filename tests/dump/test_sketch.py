"""Sixteen numbers of a tensor: how far two tensors are apart, and whether one is the other times a number."""

import numpy as np
import pytest

from shardviz.dump.arrays import MAX_SKETCHED, NUMBERS_OF_A_SKETCH, apart, sketch

SIZES = [40, 3000, MAX_SKETCHED, 5 * MAX_SKETCHED + 3]


def drawn(size, seed=0):
    return np.random.default_rng(seed).normal(size=size)


@pytest.mark.parametrize("size", SIZES)
def test_equal_tensors_are_not_apart_and_those_in_another_order_are(size):
    values = drawn(size)
    assert apart(sketch(values), sketch(values.copy())) == 0.0
    assert apart(sketch(values), sketch(np.roll(values, 1))) > 0.5
    assert apart(sketch(values.reshape(-1, 1)), sketch(values)) == 0.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("noise", [1e-6, 1e-2])
def test_the_distance_of_tensors_is_that_of_their_numbers_to_a_factor_of_three(size, noise):
    values = drawn(size)
    moved = values + noise * drawn(size, 1)
    true = np.linalg.norm(moved - values) / np.linalg.norm(values)
    assert true / 3 < apart(sketch(values), sketch(moved)) < 3 * true


def test_rows_exchanged_are_apart_where_their_norms_and_means_are_equal():
    values = drawn((4, 8))
    assert apart(sketch(values), sketch(values[::-1])) > 0.5


def test_nothing_is_kept_of_numbers_that_are_not_finite():
    values = drawn(20)
    values[3] = np.nan
    assert sketch(values) == ()
    assert apart(sketch(values), sketch(drawn(20))) == float("inf")
    assert len(sketch(np.array(3.0))) == NUMBERS_OF_A_SKETCH
    assert sketch(np.where(np.tri(20) > 0, 0.0, np.finfo(np.float64).min)) == ()  # what cannot be added up
    assert len(sketch(np.full(20, 1e100))) == NUMBERS_OF_A_SKETCH
    assert apart(sketch(np.zeros((0, 3))), sketch(np.zeros((0, 3)))) == 0.0
