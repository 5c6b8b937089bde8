"""What is done to the values of all ranks together is measured again, and nothing is of values that are right."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.relate.measures import (
    WrongResults,
    axes_of_size,
    columns_of,
    factor_of_all,
    factors_of_ranks,
    factors_of_slices,
    has_wanted_numbers,
    is_nearer,
    is_of_other_parts,
    is_right_with,
    is_shared_with,
    lost_slices,
    mixed_over,
    moved_slices,
    owner_of,
    ratio_of,
    reduction_among_holders,
    reduction_of,
    vector_added,
    weights_between,
)
from shardviz.relate.sides import Rounding, Sides
from tests.lanes import cases

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Values = Mapping[int, NDArray[np.float64]]

MESH = parse_mesh("dp=2,tp=2")
ROWS = Layout(MESH, (8, 6), (("tp",), ()))
SEEDS = st.integers(0, 2**32 - 1)


def sides(seed: int, role: str = "grad") -> Sides:
    """Return random values of which every rank holds what it should: rows over tp, copies over dp."""
    wanted = np.random.default_rng(seed).normal(size=ROWS.shape)
    regions = dict(ROWS.regions())
    held = {
        rank: wanted[np.ix_(*(np.arange(*ranges[0]) for ranges in region.dims))] for rank, region in regions.items()
    }
    rounding = Rounding(2.0**-23, wanted.size, 1.0)
    return Sides(
        name="w", role=role, mesh=MESH, claimed=ROWS, wanted=wanted, values=held, regions=regions, rounding=rounding
    )


def with_held(right: Sides, held: Values) -> Sides:
    own = {name: getattr(right, name) for name in ("name", "role", "mesh", "claimed", "wanted", "regions", "rounding")}
    return Sides(values=held, **own)


def each(right: Sides, change: object) -> Sides:
    return with_held(right, {rank: change(rank, values) for rank, values in right.values.items()})  # type: ignore[operator]


@cases(20)
@given(SEEDS)
def test_nothing_is_measured_of_values_that_are_right(seed: int) -> None:
    right = sides(seed)
    assert (right.wrong, right.copies_differ_along, right.farthest) == ((), (), 0.0)
    assert ratio_of(right) == factor_of_all([right]) == 1
    assert (factors_of_ranks(right), reduction_of(right), mixed_over(right), lost_slices(right)) == (
        {},
        None,
        None,
        None,
    )
    assert [owner_of(right, rank) for rank in right.ranks] == [None] * 4
    assert right.holders == ((0, 2), (1, 3))
    assert (right.is_split("tp"), right.is_split("dp"), right.has_group("tp")) == (True, False, True)


@cases(20)
@given(SEEDS, st.sampled_from([Fraction(2), Fraction(1, 4), Fraction(3, 2)]))
def test_one_ratio_of_all_ranks_is_told_from_a_number_of_each(seed: int, ratio: Fraction) -> None:
    right = sides(seed)
    scaled = each(right, lambda _, values: values * float(ratio))
    assert (ratio_of(scaled), factor_of_all([scaled, scaled])) == (ratio, pytest.approx(float(ratio)))
    own = each(right, lambda rank, values: values * (1.37 + rank))
    assert ratio_of(own) is factor_of_all([own]) is None
    assert factors_of_ranks(own) == pytest.approx({rank: 1.37 + rank for rank in range(4)})


@cases(20)
@given(SEEDS, st.sampled_from(["sum", "mean"]), st.sampled_from([1, 2]))
def test_terms_of_a_reduction_name_it_with_the_ratio_that_is_left(seed: int, kind: str, left: int) -> None:
    right, noise = sides(seed), np.random.default_rng(seed + 1).normal(size=(4, 6))
    scale = left * (0.5 if kind == "sum" else 1.0)
    terms = each(right, lambda rank, values: values * scale + (noise if rank < 2 else -noise))
    found = reduction_of(terms)
    # a sum is twice the mean, and half as much is left of it: the one that leaves nothing is meant
    assert found in ((kind, ("dp",), Fraction(left)), ("mean" if kind == "sum" else "sum", ("dp",), Fraction(1)))
    assert (reduction_among_holders(terms) == kind) is (left == 1)


@cases(20)
@given(SEEDS)
def test_parts_that_were_reduced_as_copies_are_told_from_parts(seed: int) -> None:
    right = sides(seed)
    total = right.wanted[:4] + right.wanted[4:]
    assert mixed_over(each(right, lambda *_: total)) == ("tp", "sum")
    assert mixed_over(each(right, lambda *_: total / 2)) == ("tp", "mean")
    assert mixed_over(each(right, lambda *_: total / 3)) is None


@cases(20)
@given(SEEDS, st.sampled_from([-1, 1, 3]))
def test_a_vector_is_found_among_others_if_every_row_has_it(seed: int, times: int) -> None:
    right, vectors = sides(seed), np.random.default_rng(seed + 2).normal(size=(5, 6))
    assert vector_added(each(right, lambda _, values: values + times * vectors[3]), vectors) == (3, times)
    first_row_alone = each(right, lambda _, values: np.concatenate([values[:1] + vectors[3], values[1:]]))
    assert vector_added(first_row_alone, vectors) is None


@cases(20)
@given(SEEDS)
def test_what_is_merely_near_where_rounding_allows_much_is_no_vector_no_factor_and_no_other_part(seed: int) -> None:
    draw = np.random.default_rng(seed + 4)
    right, vectors = replace(sides(seed), noise=0.2), draw.choice([-1.0, 1.0], size=(1, 6))
    assert 0.7 < right.tolerance < 1
    signs = draw.choice([-1.0, 1.0], size=(4, 6))
    for error, is_told in ((0.7, False), (0.1, True)):
        added = replace(right, values={rank: held + vectors[0] + error * signs for rank, held in right.values.items()})
        assert vector_added(added, vectors) == ((0, 1) if is_told else None)
    for error, is_told in ((0.6, False), (0.02, True)):
        scaled = replace(right, values={rank: 1.2 * held + error * signs for rank, held in right.values.items()})
        assert (factor_of_all([scaled]) is not None) is is_told
    others = {rank: right.wanted_of(rank ^ 1) for rank in range(4)}
    moved = replace(right, values={rank: due + 0.1 * signs for rank, due in others.items()})
    between = replace(right, values={rank: (due + right.wanted_of(rank)) / 2 for rank, due in others.items()})
    assert 0 in moved.wrong
    assert is_nearer(moved, 0, others[0])
    assert not between.wrong or not is_nearer(between, between.wrong[0], others[between.wrong[0]])


@cases(20)
@given(SEEDS)
def test_parts_and_slices_at_the_wrong_place_are_found(seed: int) -> None:
    right = sides(seed)
    exchanged = with_held(right, {rank: right.values[rank ^ 1] for rank in range(4)})
    assert [owner_of(exchanged, rank) for rank in range(4)] == [1, 0, 1, 0]
    turned = each(right, lambda _, values: values[::-1])
    assert all(has_wanted_numbers(moved, 1) for moved in (right, exchanged, turned))
    assert not has_wanted_numbers(each(right, lambda _, values: values * 1.01), 1)
    assert not has_wanted_numbers(each(right, lambda _, values: values * np.nan), 1)
    assert moved_slices(turned, 1, 0) == {4: 7, 5: 6, 6: 5, 7: 4}
    assert moved_slices(turned, 1, 1) == {}
    lost = each(right, lambda rank, values: np.where((np.arange(4) == 2)[:, None] & (rank % 2 == 1), 0, values))
    assert lost_slices(lost) == (0, [6])
    assert lost_slices(each(lost, lambda rank, values: right.values[rank] if rank == 1 else values)) is None


@cases(20)
@given(SEEDS)
def test_weights_of_summands_are_found_unless_one_is_made_of_the_others(seed: int) -> None:
    right, parts = sides(seed), list(np.random.default_rng(seed + 3).normal(size=(3, *ROWS.shape)))
    held = columns_of(right, [2.0 * parts[0] - parts[2]], 1).ravel()
    assert weights_between(columns_of(right, parts, 1), held) == pytest.approx([2.0, 0.0, -1.0])
    assert weights_between(columns_of(right, [*parts, parts[0] + parts[1]], 1), held) is None
    assert weights_between(columns_of(right, parts, 1), held * np.nan) is None


@cases(20)
@given(SEEDS)
def test_slices_with_a_factor_and_an_offset_each_are_told_from_one_factor(seed: int) -> None:
    right = sides(seed, "output")
    factors = np.array([[0.5], [1.5], [2.0], [3.0]])
    own = each(right, lambda rank, values: values * factors + rank)
    assert factors_of_slices(own, 1, (0,)) == pytest.approx(factors.ravel())
    assert factors_of_slices(right, 1, (0,)) is None
    assert factors_of_slices(each(right, lambda _, values: values**3), 1, (0,)) is None


@cases(20)
@given(SEEDS)
def test_values_of_another_tensor_are_found_without_comparing_each_with_each(seed: int) -> None:
    layers = [sides(seed + number) for number in range(4)]
    first, second = layers[:2]
    # one stage of a pipeline has the first layer, the other the second, and what they hold was averaged
    mean = {rank: (first.values[rank] + second.values[rank]) / 2 for rank in (0, 1)}
    stages = with_held(first, mean), with_held(second, {rank + 2: values for rank, values in mean.items()})
    known = WrongResults([*stages, *(each(layer, lambda _, values: values + 1) for layer in layers[2:])])
    assert known.near(stages[0], "dp") == [stages[1]]
    assert is_shared_with(*stages, "dp")
    assert not is_shared_with(stages[0], with_held(second, {2: mean[0] + 1, 3: mean[1]}), "dp")


@cases(20)
@given(SEEDS)
def test_uses_of_a_tied_weight_are_right_together_or_lie_elsewhere(seed: int) -> None:
    right, other = sides(seed), sides(seed + 1)
    use = each(right, lambda rank, values: values - other.values[rank])
    assert is_right_with(use, [other])
    assert not is_right_with(use, [other, other])
    assert is_of_other_parts(with_held(right, {rank: other.values[rank ^ 1] for rank in range(4)}), other)
    assert not is_of_other_parts(with_held(right, dict(other.values)), other)


def test_the_fewest_axes_of_a_size_are_named() -> None:
    mesh = parse_mesh("a=2,b=3,c=6,d=1")
    assert axes_of_size(mesh, 6) == [("c",)]
    assert axes_of_size(mesh, 12) == [("a", "c")]
    assert axes_of_size(mesh, 1) == axes_of_size(mesh, 5) == []
