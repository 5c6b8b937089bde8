"""What two jobs' traces are laid side by side by: samples, meshes of process groups, the pace of learning rates."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.check.step.jobs.gradients import trained_in_one_job
from shardviz.check.step.jobs.optimizers import pace_of
from shardviz.check.step.jobs.rows import rows_of
from shardviz.check.step.jobs.starts import OtherWeight, coarsest_of, other_weights, repeated_weight
from shardviz.check.step.jobs.whole_job import mesh_of_groups
from shardviz.check.step.rules.all_gradients import ranks_of
from shardviz.check.step.trace.traces import JobTrace, Kept, Weight, in_both, joined
from shardviz.dump.arrays import kept_indices, strides_between, strides_for
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RankRecord
from shardviz.dump.records.tensors import Body, TensorRecord
from shardviz.dump.records.trace import of_value
from shardviz.explain.step.batches import DifferentBatch, SharedRows
from shardviz.explain.step.scales import ScaledBackward
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.layout.notation import parse
from shardviz.layout.region import Region

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


def sample(values, most):
    strides = strides_for(values.shape, most)
    parts = (slice(kept_indices(size, one).start, None, one) for size, one in zip(values.shape, strides, strict=True))
    return Kept.of(values.shape, values[tuple(parts)], "float64")


@given(SHAPES, st.integers(1, 500))
def test_a_sample_is_bounded_and_its_strides_are_known_from_its_shape(shape, most):
    values = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    one = sample(values, most)
    assert 0 < one.values.size <= most
    assert strides_between(shape, one.values.shape) is not None
    assert np.array_equal(one.values, values[np.ix_(*one.at)])


@given(st.integers(1, 4), st.integers(1, 6), st.integers(16, 400))
def test_a_sampled_part_lies_where_the_whole_has_it(parts, rows, most):
    whole = np.random.default_rng(0).normal(size=(64 * parts, 5 * rows))
    for number in range(parts):
        region = Region((((64 * number, 64 * number + 64),), ((0, 5 * rows),)))
        pair = in_both(sample(whole, most), sample(whole[64 * number : 64 * number + 64], most), region)
        assert pair is not None
        assert np.array_equal(*pair)


def test_a_part_of_which_all_is_kept_is_compared_where_the_whole_is_sampled():
    whole = np.random.default_rng(0).normal(size=(64, 8))
    pair = in_both(sample(whole, 100), sample(whole[32:], 1000), Region((((32, 64),), ((0, 8),))))
    assert pair is not None
    assert pair[0].size >= 25
    assert np.array_equal(*pair)


def test_micro_batches_are_joined_along_their_rows():
    whole = np.random.default_rng(0).normal(size=(8, 3))
    one = joined([sample(whole[:4], 100), sample(whole[4:], 100)])
    assert np.array_equal(one.values, whole)
    assert joined([sample(whole[:4], 100), None]) is None
    assert joined([sample(whole[:4], 100), sample(whole[:4, :2], 100)]) is None


def test_groups_that_cross_are_a_mesh():
    groups = [("dp", (0, 2)), ("dp", (1, 3)), ("tp", (0, 1)), ("tp", (2, 3))]
    assert mesh_of_groups(groups, 4) == Mesh(("dp", "tp"), (2, 2))
    assert mesh_of_groups([*groups, ("other", (0, 1, 2))], 4) == Mesh(("dp", "tp"), (2, 2))


def test_groups_of_one_name_are_divided_among_axes():
    groups = [("of_2", ranks) for ranks in ((0, 1), (0, 2), (1, 3), (2, 3))]
    assert mesh_of_groups(groups, 4) == Mesh(("of_2", "of_2_2"), (2, 2), (0, 2, 1, 3))
    pairs = [(rank, rank + step) for step in (1, 2, 4) for rank in range(8) if not rank & step]
    cube = mesh_of_groups([("of_2", ranks) for ranks in pairs], 8)
    assert cube is not None
    assert cube.shape == (2, 2, 2)
    assert mesh_of_groups(groups[:2], 4) is None


def test_groups_of_one_kind_leave_an_axis_without_groups():
    pairs = [("cp", (0, 1)), ("cp", (2, 3))]
    assert mesh_of_groups(pairs, 4) == Mesh(("of_2", "cp"), (2, 2))
    assert mesh_of_groups([*pairs, ("tp", (0, 1)), ("tp", (2, 3))], 4) == Mesh(("of_2", "cp"), (2, 2))


def test_groups_that_do_not_divide_the_ranks_are_none():
    assert mesh_of_groups([("dp", (0, 1))], 4) is None
    assert mesh_of_groups([], 4) is None


def test_rounding_on_a_gpu_may_be_that_of_tf32():
    values = np.ones((2, 2))
    assert Kept.of((2, 2), values, "float32", "cuda:0").tolerance > 10 * Kept.of((2, 2), values, "float32").tolerance
    assert Kept.of((2, 2), values, "float64", "cuda:0").tolerance == Kept.of((2, 2), values, "float64").tolerance


def test_values_of_another_shape_are_no_sample():
    assert Kept.of((2, 2), np.ones((4, 2)), "float32") is None
    assert Kept.of((2, 2), np.ones(4), "float32") is None


def weights(*parts, layouts=(None, None, None, None)):
    made = [Kept.of(values.shape, values, "float64") for values in parts]
    return {rank: Weight((64,), layout, part) for rank, (part, layout) in enumerate(zip(made, layouts, strict=False))}


def test_rows_elsewhere_are_a_permutation_and_numbers_drawn_later_are_not():
    drawn = np.random.default_rng(0).normal(size=80)
    layout = parse("[64/dp]").layout(Mesh(("dp",), (4,)))
    whole = weights(drawn[:64])[0]
    for parts, is_permuted in (
        ((drawn[32:64], drawn[:32]), True),  # two ranks' shards are exchanged
        ((drawn[:16], drawn[:16], drawn[32:48], drawn[48:64]), True),  # one rank has another's
        ((drawn[16:32], drawn[32:48], drawn[48:64], drawn[64:80]), False),  # a tensor less was drawn before it
    ):
        own = dict(zip(range(4), np.split(np.concatenate(parts), 4), strict=True))
        ranks = weights(*own.values(), layouts=(layout,) * 4)
        ((other,), count) = other_weights({"b": whole}, {"b": ranks}, {})
        assert (other.name, other.is_permuted, count) == ("b", is_permuted, 1)


def test_rows_elsewhere_are_named_where_a_rank_has_none():
    drawn = np.random.default_rng(0).normal(size=6)
    layout = parse("[6/dp]").layout(Mesh(("dp",), (4,)))
    parts = (drawn[2:4], drawn[:2], drawn[4:], drawn[6:])
    ranks = {rank: Weight((6,), layout, Kept.of(part.shape, part, "float64")) for rank, part in enumerate(parts)}
    whole = Weight((6,), None, Kept.of((6,), drawn, "float64"))
    ((other,), _) = other_weights({"b": whole}, {"b": ranks}, {})
    assert other.is_permuted


def test_a_weight_that_differs_is_named_by_what_it_is_of_the_other_jobs():
    first, second, drawn = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32).astype(np.float64)
    layout = parse("[8/dp, 4]").layout(Mesh(("dp",), (2,)))

    def other(values):
        parts = {rank: Kept.of((4, 4), part, "float32") for rank, part in enumerate(np.split(values, 2))}
        ranks = {rank: Weight((8, 4), layout, part) for rank, part in parts.items()}
        full = {
            name: Weight((8, 4), None, Kept.of((8, 4), of, "float32")) for name, of in (("a", first), ("b", second))
        }
        ((found,), _) = other_weights(full, {"a": ranks}, {})
        return found.holds, found.order, found.rounded

    assert other(second) == ("b", "", "")
    assert other(first[::-1]) == ("", "dim 0 is reversed", "")
    assert other(first.astype(np.float16).astype(np.float64)) == ("", "", "float16")
    assert other(drawn) == ("", "", "")


@pytest.mark.parametrize(
    ("starts", "cause"),
    [
        ((0, 4, 8, 12), None),
        ((0, 4, 0, 4), SharedRows(("dp",))),
        ((0, 0, 8, 8), SharedRows(("fsdp",))),
        ((0, 2, 4, 6), SharedRows()),
        ((0, 0, 0, 0), SharedRows(("dp", "fsdp"))),
        ((0, 4, 8, 8), DifferentBatch(of_jobs=True)),
    ],
)
def test_rows_that_no_rank_was_given_are_explained_by_those_that_several_were(starts, cause):
    whole = np.random.default_rng(0).normal(size=(16, 3))
    batches = {rank: [sample(whole[start : start + 4], 100)] for rank, start in enumerate(starts)}
    rows = rows_of([sample(whole, 100)], batches, parse_mesh("dp=2,fsdp=2"))
    assert (rows.cause if rows.problem else None) == cause


def test_of_two_axes_that_may_be_left_out_none_is_named():
    whole = np.random.default_rng(0).normal(size=(8, 3))
    batches = {rank: [sample(whole[:4], 100)] for rank in range(4)}
    rows = rows_of([sample(whole, 100)], batches, parse_mesh("dp=2,tp=2"))
    assert rows.cause == DifferentBatch(of_jobs=True)
    assert "ranks 0-3 rows 0-3; no rank was given rows 4-7" in rows.problem


def test_rows_that_were_drawn_in_part_twice_are_no_overlapping_slices():
    whole = np.random.default_rng(0).normal(size=(8, 3))
    batches = {rank: [sample(whole[list(own)], 100)] for rank, own in enumerate(((0, 3, 5), (1, 3, 6)))}
    rows = rows_of([sample(whole, 100)], batches, parse_mesh("dp=2"))
    assert rows.cause == DifferentBatch(of_jobs=True)
    assert "rank 0 rows 0, 3, 5, rank 1 rows 1, 3, 6; no rank was given rows 2, 4, 7" in rows.problem


@pytest.mark.parametrize(
    ("shares", "problem", "not_joined"),
    [
        (((0, 4, 8), (1, 5, 9), (2, 6), (3, 7)), "", "rank 2 rows 2, 6, rank 3 rows 3, 7"),
        (((0, 4, 8), (1, 5, 9), (2, 6, 0), (3, 7, 1)), "rows 0-1 of the other job's 10 were given to several", ""),
    ],
)
def test_unequal_shares_of_all_rows_are_right_and_rows_of_several_ranks_are_named(shares, problem, not_joined):
    whole = np.random.default_rng(0).normal(size=(10, 3))
    batches = {rank: [sample(whole[list(share)], 100)] for rank, share in enumerate(shares)}
    rows = rows_of([sample(whole, 100)], batches, parse_mesh("dp=4"))
    assert rows.problem.startswith(problem)
    assert bool(rows.problem) == bool(problem)
    assert rows.not_joined.endswith(not_joined)


@pytest.mark.parametrize(("padding", "is_padding"), [(0.0, True), (None, False)])
def test_parts_that_are_padded_are_not_rows_of_another_batch(padding, is_padding):
    random = np.random.default_rng(0)
    whole = random.normal(size=(4, 14))
    more = random.normal(size=(4, 2)) if padding is None else np.full((4, 2), padding)
    parts = np.split(np.concatenate([whole, more], axis=1), 4, axis=1)
    rows = rows_of(
        [sample(whole, 100)], {rank: [sample(part, 100)] for rank, part in enumerate(parts)}, parse_mesh("cp=4")
    )
    assert bool(rows.not_joined) == is_padding
    assert bool(rows.problem) != is_padding


@pytest.mark.parametrize(
    ("factor", "runs", "ranks"), [(4, 2, 2), (8, 2, 4), (16, 4, 4), (2, 2, None), (4, 1, None), (6, 2, None)]
)
def test_a_factor_of_ranks_times_micro_batches_is_told_from_other_factors(factor, runs, ranks):
    gradient = SimpleNamespace(mesh=parse_mesh("dp=2,tp=2"))
    assert ranks_of([gradient], Fraction(factor), runs) == ranks
    causes = [cause for cause, _ in ScaledBackward(Fraction(factor), runs, "unseen", ranks=ranks).ways]
    assert causes[0].startswith(f"The loss is multiplied by the number of ranks, {ranks}") == bool(ranks)


def test_a_loss_that_no_trace_has_may_have_the_gradients_factor_too():
    def causes(factor, loss):
        ways = [cause for cause, _ in ScaledBackward(factor, loss=loss).ways]
        assert all(("multiplies the gradients after it" in cause) == bool(loss) for cause in ways[-1:])
        return [cause.partition("; or something")[0] for cause in ways]

    unseen = causes(Fraction(16), "unseen")
    assert unseen[0].endswith("it is a sum where the other job's is a mean, over 16 elements")
    assert unseen[1:] == causes(Fraction(16), "")
    assert causes(Fraction(1, 16), "unseen")[0].endswith("a mean where the other job's is a sum, over 16 elements")
    assert causes(Fraction(3, 2), "unseen") == causes(Fraction(3, 2), "")
    assert causes(0.7071, "unseen") == causes(0.7071, "")


@pytest.mark.parametrize(
    ("gradient", "of_reference", "names"),
    [(1.0, {"head"}, ["body"]), (0.0, {"head"}, []), (1.0, {"head", "body"}, []), (1.0, set(), [])],
)
def test_a_weight_that_only_this_job_trains_is_named(gradient, of_reference, names):
    """Zeros are what DDP leaves of an unused parameter, and a job without gradients has not come to its step."""
    parts = {"head": np.ones(4), "body": np.full(4, gradient)}
    parts = {name: Weight((4,), None, Kept.of((4,), values, "float64")) for name, values in parts.items()}
    job = JobTrace(None, {0: SimpleNamespace(weights=lambda role, moment: parts.items())})
    weights = SimpleNamespace(params=parts, grads={name: parts[name] for name in of_reference})
    assert [finding.tensor for finding in trained_in_one_job(weights, job)] == names


@pytest.mark.parametrize(
    ("parts", "is_repeated"), [("one", True), ("right", False), ("zeros", False), ("whole", False)]
)
def test_a_part_that_all_ranks_drew_alike_is_found(parts, is_repeated):
    whole = np.random.default_rng(0).normal(size=(8, 4))
    held = {
        "one": [whole[:4] + 1] * 2,
        "right": [whole[:4], whole[4:]],
        "zeros": [0 * whole[:4]] * 2,
        "whole": [whole + 1] * 2,
    }[parts]
    weights = {rank: Weight(part.shape, None, Kept.whole(part)) for rank, part in enumerate(held)}
    others = [OtherWeight("up", 0, 1.0, is_permuted=False)]
    full = {"up": Weight(whole.shape, None, Kept.whole(whole))}
    assert bool(repeated_weight(others, full, {"up": weights})) == is_repeated


@pytest.mark.parametrize(
    ("name", "coarsest"),
    [(of_value("step", 3), "float32"), (of_value("up", 3), "float32"), ("up: output 0", "bfloat16")],
)
def test_a_step_is_as_coarse_as_what_modules_make_and_not_as_what_a_line_tries(name, coarsest):
    bodies = tuple(Body("activation", "step", (2,), (2,), dtype) for dtype in ("float32", "bfloat16"))
    tensors = TensorRecord("up: input 0", 0), TensorRecord(name, 1)
    record = RankRecord(SCHEMA, 0, 1, "", bodies=bodies, tensors=tensors)
    assert coarsest_of([SimpleNamespace(records={0: record})]) == coarsest


WARM_UP = [0.02, 0.04, 0.06, 0.08, 0.1, 0.08, 0.06, 0.04, 0.02]


def options_of(rates):
    return [{"up.weight": {"lr": f"{rate:.6g}"}, "down.weight": {"lr": f"{rate / 2:.6g}"}} for rate in rates]


@pytest.mark.parametrize(
    ("wanted", "given", "pace"),
    [
        (WARM_UP, WARM_UP[::2], (2, False)),
        (WARM_UP, WARM_UP[::2] + [0.01] * 4, (2, False)),
        (WARM_UP, WARM_UP[::4], (4, False)),
        (WARM_UP, [rate for rate in WARM_UP for _ in range(2)][:9], (2, True)),
        (WARM_UP, [rate for rate in WARM_UP for _ in range(3)][:9], (3, True)),
        (WARM_UP, [0.02, 0.04, 0.06, 0.07, 0.1], None),
        (WARM_UP, [0.02, 0.06], None),
        (WARM_UP, [0.02, *(2 * rate for rate in WARM_UP[1:])], None),
        (WARM_UP, [0.02] * 9, None),
        ([0.1] * 9, [0.1] * 9, None),
        ([0.1] * 4 + [0.01] * 5, [0.1] * 4 + [0.02] * 5, None),
    ],
)
def test_a_schedule_that_runs_faster_or_slower_is_told_from_another_one(wanted, given, pace):
    assert pace_of(options_of(wanted), options_of(given)) == pace
