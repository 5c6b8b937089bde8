"""The parts that judges use: factors, terms, rounding and orders, each with what it finds and what looks like it."""

from __future__ import annotations

import doctest
import pkgutil
from fractions import Fraction
from importlib import import_module

import numpy as np
import pytest

import shardviz.relate
from shardviz.relate.casts import cast, is_cut_off, is_made, line_between, rounded, rounding_between, through, values_of
from shardviz.relate.factors import (
    coefficient_of,
    common_factor,
    factor_at_largest,
    factor_of,
    factors_of_rows,
    ratio_near,
    scale_between,
    whole_multiple,
)
from shardviz.relate.orders import features, matches, nearest, orders_of_slices, places_of
from shardviz.relate.relations import Rounded, Scaled
from shardviz.relate.tolerance import EPSILON, above_noise, near_ratio, rounding_of_sums
from shardviz.relate.values import blocks, constant_of, error_of, part_of

MODULES = [module.name for module in pkgutil.iter_modules(shardviz.relate.__path__, "shardviz.relate.")]


def drawn(shape: tuple[int, ...] = (40, 6), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


# Factors.


def test_a_sum_in_place_of_a_mean_is_a_ratio_and_an_error_of_a_hundredth_is_none() -> None:
    wanted = drawn()
    assert scale_between(wanted * 3, wanted, 1e-9) == 3
    assert scale_between(wanted / 3, wanted, 1e-9) == pytest.approx(1 / 3)
    assert scale_between(wanted + 0.01 * drawn(seed=1), wanted, 1e-9) is None


def test_a_factor_that_is_no_ratio_is_itself() -> None:
    wanted = drawn()
    assert scale_between(wanted * 0.8713, wanted, 1e-9) == pytest.approx(0.8713)


def test_a_negative_factor_is_one_too() -> None:
    wanted = drawn()
    assert scale_between(-wanted, wanted, 1e-9) == -1


@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_values_that_are_not_finite_have_no_factor(spoiled: float) -> None:
    wanted = drawn()
    held = wanted * 2
    held[3, 1] = spoiled
    assert factor_of(held, wanted) is None
    assert factor_of(wanted, held) is None
    assert scale_between(held, wanted, 1.0) is None
    assert whole_multiple(held, wanted, 1.0) == 0


def test_zeros_have_no_factor() -> None:
    assert factor_of(drawn(), np.zeros((40, 6))) is None
    assert common_factor([(np.zeros(3), np.zeros(3)), (np.zeros(3), np.zeros(3))]) is None


def test_ranks_share_one_factor_and_two_factors_are_not_one() -> None:
    first, second = drawn(seed=1), drawn(seed=2)
    assert common_factor([(first * 2, first), (second * 2, second)]) == pytest.approx(2)
    shared = common_factor([(first * 2, first), (second * 4, second)])
    assert shared is not None
    assert 2 < shared < 4  # which verifies on neither


def test_how_near_a_factor_must_be_to_a_ratio_is_relative_to_it() -> None:
    near = near_ratio(EPSILON["bfloat16"])
    assert ratio_near(1 / 3 + 0.001, 64, near) == Fraction(1, 3)
    assert ratio_near(0.0205, 8, near) is None
    assert ratio_near(1 / 64 + 0.005, 64, near) != Fraction(1, 64)


def test_a_vector_that_was_added_three_times_is_counted_and_half_of_it_is_not() -> None:
    bias = np.broadcast_to(drawn((6,), seed=3), (40, 6))
    assert whole_multiple(3 * bias, bias, 1e-9) == 3
    assert whole_multiple(-bias, bias, 1e-9) == -1
    assert whole_multiple(0.5 * bias, bias, 1e-9) == 0
    assert whole_multiple(3 * bias + 0.01, bias, 1e-9) == 0


def test_each_row_has_its_own_factor_and_a_row_of_zeros_says_nothing() -> None:
    wanted = drawn()
    own = np.linspace(1, 2, 40)[:, None]
    assert np.allclose(factors_of_rows(wanted * own, wanted), own)
    wanted[5] = 0
    assert factors_of_rows(wanted * own, wanted) is None


def test_an_outlier_does_not_move_the_factor_that_is_read_off_the_largest() -> None:
    wanted = np.array([1.0, 2.0, 100.0])
    assert factor_at_largest(np.array([7.0, 4.0, 200.0]), wanted) == 2
    assert np.isnan(factor_at_largest(np.zeros(2), np.zeros(2)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_stored_tensor_times_a_number_is_made_of_the_other_and_one_wrong_element_is_enough(dtype: str) -> None:
    wide = drawn((300, 1000))
    own, new = (cast(values.view(np.uint64), "float64", dtype) for values in (wide, wide * 1.75))
    assert is_made(new, [own], dtype, lambda values: values * 1.75, 2 * EPSILON[dtype])
    spoiled = new.copy()
    spoiled[299, 999] ^= 1 << 6
    assert not is_made(spoiled, [own], dtype, lambda values: values * 1.75, 2 * EPSILON[dtype])


def test_a_third_checkpoint_on_the_line_of_two_is_made_of_them_and_one_beside_it_is_not() -> None:
    base, end = drawn(seed=1), drawn(seed=2)
    held = [bits(base), bits(base + 2 * (end - base)), bits(end)]
    room = 6 * EPSILON["float32"]
    assert is_made(held[1], [held[0], held[2]], "float32", lambda first, last: first + 2 * (last - first), room)
    assert not is_made(held[1], [held[0], held[2]], "float32", lambda first, last: first + 1.9 * (last - first), room)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_stored_tensor_that_was_multiplied_or_shifted_says_by_what_and_another_tensor_nothing(dtype: str) -> None:
    wide = drawn((300, 40))
    own, halved, other = (
        cast(values.view(np.uint64), "float64", dtype) for values in (wide, wide / 2, drawn((300, 40), 9))
    )
    shifted = cast((values_of(own, dtype) + 1).view(np.uint64), "float64", dtype)
    assert line_between(own, halved, dtype) == Scaled(0.5)
    assert line_between(own, shifted, dtype).number == pytest.approx(1, rel=0.01)
    assert line_between(own, other, dtype) is None
    assert line_between(own, own, dtype) is None


def test_one_number_everywhere_shows_neither_a_factor_nor_an_offset() -> None:
    assert line_between(bits(np.ones(40)), bits(np.full(40, 3.0)), "float32") is None
    assert line_between(bits(drawn()), bits(np.ones((40, 6))), "float32") is None


# Terms.


def test_the_coefficient_of_an_added_tensor_is_solved_for_with_the_scale_of_the_rest() -> None:
    part, term = drawn(seed=1), drawn(seed=2)
    assert coefficient_of([2 * (part + 0.5 * term)], [part], [term]) == pytest.approx(0.5)


def test_of_a_multiple_of_what_is_wanted_nothing_can_be_solved() -> None:
    part = drawn(seed=1)
    assert coefficient_of([2 * part], [part], [3 * part]) is None
    assert coefficient_of([np.ones(1)], [np.ones(1)], [np.ones(1)]) is None


# Rounding.


def test_values_that_went_through_bfloat16_are_told_from_values_that_were_cut_off() -> None:
    wide = bits(drawn())
    narrowed = through(wide, "float32", "bfloat16", "float32")
    assert not np.array_equal(narrowed, wide)
    assert not np.array_equal(narrowed, wide & np.uint32(0xFFFF0000))
    assert np.array_equal(through(narrowed, "float32", "bfloat16", "float32"), narrowed)


def test_the_type_that_values_went_through_is_named_and_exact_values_name_none() -> None:
    wide, types = bits(drawn()), ("bfloat16", "float16")
    for narrow in types:
        back = through(wide, "float32", narrow, "float32")
        assert rounding_between(wide, "float32", back, "float32", types) == Rounded(narrow)
    assert rounding_between(wide, "float32", wide, "float32", types) is None
    tiny = (np.linspace(1, 2, 64, dtype=np.float32) * np.float32(1e-9)).view(np.uint32)
    for filled in (np.zeros_like(tiny), np.resize(np.array([0.0, -0.0], np.float32), 64).view(np.uint32)):
        assert rounding_between(tiny, "float32", filled, "float32", types) is None
    nearly_one = (1 + np.linspace(0, 1e-5, 64, dtype=np.float32)).view(np.uint32)
    ones = np.ones(64, np.float32).view(np.uint32)
    assert rounding_between(nearly_one, "float32", ones, "float32", types) is None
    double = drawn().view(np.uint64)
    twice = through(double, "float64", "bfloat16", "float16")
    assert rounding_between(double, "float64", twice, "float16", types) == Rounded("bfloat16")


def test_upper_halves_are_cut_off_and_rounded_ones_are_not() -> None:
    wide = bits(drawn())
    assert is_cut_off(wide, (wide >> 16).astype(np.uint16), 16)
    assert not is_cut_off(wide, cast(wide, "float32", "bfloat16"), 16)


def test_rounding_keeps_what_a_dtype_has() -> None:
    assert rounded(np.array([np.inf, -0.0, 65504.0, 1e6]), "float16").tolist() == [np.inf, -0.0, 65504.0, np.inf]
    assert np.isnan(rounded(np.array([np.nan]), "bfloat16")).all()
    assert rounded(np.float64(1.00390625), "bfloat16").shape == ()
    assert values_of(np.array([[0x3F80]], np.uint16), "bfloat16").tolist() == [[1.0]]


# Orders.


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_in_another_order_are_found_and_a_changed_element_is_not_overlooked(dim: int) -> None:
    before = bits(drawn((600, 500)))
    order = np.random.default_rng(1).permutation(before.shape[dim])
    after = before.take(order, dim)
    orders = orders_of_slices(before, after)
    assert orders is not None
    assert np.array_equal(orders[dim], order)
    after[17, 3], after[18, 3] = after[18, 3], after[17, 3]
    assert orders_of_slices(before, after) is None


def test_equal_slices_keep_their_order_and_a_repeated_one_is_no_order() -> None:
    before = np.array([[1, 2], [3, 4], [1, 2]], np.uint32)
    assert [order.tolist() for order in orders_of_slices(before, before)] == [[0, 1, 2], [0, 1]]
    assert orders_of_slices(before, before[[0, 0, 1]]) is not None  # rows 0 and 2 are alike
    assert orders_of_slices(before, before[[1, 1, 0]]) is None


def test_places_are_those_of_the_dim_along_which_most_slices_are_found() -> None:
    whole = drawn((8, 6))
    dim, places = places_of(whole[:, [4, 1, 0]], whole, 1e-9)
    assert (dim, places.tolist()) == (1, [4, 1, 0])
    assert places_of(np.ones((2, 6)), np.ones((8, 6)), 1e-9) is None  # which of the slices, nobody can tell
    assert places_of(whole[:, :3], whole[:3], 1e-9) is None


def test_too_many_slices_are_not_compared_with_each_other() -> None:
    rows = np.zeros((2100, 2))
    assert matches(rows, np.zeros((2100, 1)), 0.0) is None


def test_features_find_rows_whose_elements_are_in_another_order_among_thousands() -> None:
    rows = drawn((2000, 16))
    order = np.random.default_rng(1).permutation(2000)
    shuffled = rows[order][:, ::-1]
    assert np.array_equal(nearest(features(shuffled), features(rows), [1e-9])[0], order)
    assert (nearest(features(drawn((50, 16), seed=9)), features(rows), [1e-9])[0] == -1).all()


# How far values may be off.


def test_one_row_of_many_does_not_hide_in_the_error_and_a_row_near_zero_does_not_alarm() -> None:
    wanted = drawn((600, 8))
    held = wanted.copy()
    held[7] = wanted[8]
    assert error_of(held, wanted) > 0.5
    quiet = wanted.copy()
    quiet[7] = 1e-9
    off = quiet.copy()
    off[7] = 2e-9
    assert error_of(off, quiet) < 1e-6


def test_numbers_whose_squares_vanish_are_compared_by_their_size() -> None:
    tiny = np.full((4, 4), 1e-200)
    assert error_of(tiny * (1 + 1e-12), tiny) < 1e-9
    assert error_of(tiny * 2, tiny) == 1
    assert error_of(tiny, tiny * 0) == np.inf


def test_nan_must_meet_nan() -> None:
    wanted = np.array([1.0, np.nan, 3.0])
    assert error_of(np.array([1.0, np.nan, 3.0]), wanted) == 0
    assert error_of(np.array([1.0, 2.0, 3.0]), wanted) == np.inf
    assert error_of(np.array([np.nan, np.nan, 3.0]), wanted) == np.inf


def test_what_is_allowed_is_between_a_rounding_and_what_hides_everything() -> None:
    assert above_noise(0.0, 1e-3, 0.25) == 1e-3
    assert above_noise(0.01, 1e-3, 0.25) == 0.04
    assert above_noise(1.0, 1e-3, 0.25) == 0.25
    assert rounding_of_sums(EPSILON["bfloat16"], 1 << 10) == rounding_of_sums(EPSILON["bfloat16"], 1)


# Arrays.


def test_a_region_of_several_ranges_is_read_in_its_order() -> None:
    from shardviz.layout.region import Region

    whole = np.arange(24).reshape(4, 6)
    region = Region((((2, 4), (0, 1)), ((4, 6), (0, 2))))
    assert np.array_equal(part_of(whole, region), whole.ravel()[region.flat_ids((4, 6))])
    assert part_of(whole, Region(((), ((0, 6),)))).shape == (0, 6)


def test_blocks_are_views_that_make_up_the_whole() -> None:
    for shape in ((3, 1 << 19), (1 << 19,), (), (0, 4), (1 << 12, 1 << 8)):
        whole = np.ones(shape)
        assert sum(block.size for block in blocks(whole)) == whole.size
        assert all(np.shares_memory(block, whole) for block in blocks(whole) if block.size)


def test_one_number_everywhere_is_a_constant_and_one_element_is_not() -> None:
    assert constant_of(np.full((20, 3), 2.5)) == 2.5
    assert np.isnan(constant_of(np.full(20, np.nan)))
    assert constant_of(np.array([5.0])) is None
    late = np.zeros(20)
    late[-1] = 1
    assert constant_of(late) is None
