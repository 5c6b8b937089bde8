"""Rows that ranks exchange are looked up among the unsharded model's."""

import numpy as np
import pytest

from shardviz.check.step.lines.exchanges import is_reordered, rows_in

RNG = np.random.default_rng(1)
GIVEN = np.repeat(RNG.standard_normal((5, 4)), 2, axis=0)  # each token goes to two experts
MADE = RNG.standard_normal((10, 3))
CAME = {0: np.array([3, 1, 0, 8]), 1: np.array([2, 9, 4, 7, 6, 5])}


def rows(of, places):
    return {rank: of[own] for rank, own in places.items()}


def test_rows_are_found_at_their_first_place_and_others_are_not():
    assert rows_in(GIVEN[[3, 9]], GIVEN).tolist() == [2, 8]
    assert rows_in(GIVEN[[3]] * (1 + 1e-13), GIVEN).tolist() == [2]
    assert rows_in(GIVEN[[3]] * 1.001, GIVEN).tolist() == [-1]
    assert rows_in(GIVEN[:0], GIVEN).tolist() == []
    assert rows_in(GIVEN[:2], GIVEN[:0]).tolist() == [-1, -1]


def test_rows_that_are_sent_back_as_they_came_are_in_order():
    assert not is_reordered(rows(GIVEN, CAME), rows(MADE, CAME), GIVEN, MADE)


def test_rows_that_stay_sorted_are_out_of_order():
    left = {rank: np.sort(own) for rank, own in CAME.items()}
    assert is_reordered(rows(GIVEN, CAME), rows(MADE, left), GIVEN, MADE)


@pytest.mark.parametrize("wrong", [{0: np.array([3, 1, 0, 7]), 1: CAME[1]}, {0: CAME[0]}, {0: CAME[0][:3], 1: CAME[1]}])
def test_rows_that_are_others_than_came_are_no_matter_of_order(wrong):
    assert not is_reordered(rows(GIVEN, CAME), rows(MADE, wrong), GIVEN, MADE)
