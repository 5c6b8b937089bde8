"""Rows that loaders pad, models that put the sequence first, and modules that run in part on each rank."""

from types import SimpleNamespace

import numpy as np
import pytest

from shardviz.check.step.jobs.gradients import frozen_in_one_job
from shardviz.check.step.jobs.other_steps import is_filled_batch, later_steps_of, steps_of
from shardviz.check.step.jobs.rows import Rows, rows_of, rows_of_jobs, rows_without_padding
from shardviz.check.step.jobs.rows_of_steps import moved_by, with_other_steps
from shardviz.check.step.trace.calls import is_pipeline, parted_modules
from shardviz.check.step.trace.traces import Kept, OfRank, Weight
from shardviz.dump.records.step import GivenRecord
from shardviz.explain.step.batches import (
    DifferentBatch,
    DrawnAlike,
    NormalizedByOwnRows,
    OwnOrder,
    RowsPairedOtherwise,
    SharedRows,
    WholeBatchPerRank,
)
from shardviz.layout.mesh import parse_mesh

ROWS = [[5, 9, 7], [5, 6, 8, 9, 7], [5, 8, 7], [5, 9, 9, 6, 7, 8, 9, 7]]
PADDING = 0


def call(*numbers, pad=PADDING):
    """Return what a collator makes of rows: all as long as the longest."""
    rows = [ROWS[number] for number in numbers]
    longest = max(map(len, rows))
    padded = np.array([row + [pad] * (longest - len(row)) for row in rows], np.float64)
    return Kept.of(padded.shape, padded, "int64")


def given(*calls):
    labels = Kept.of((1,), np.ones(1), "int64")
    return SimpleNamespace(calls_of_batch={("batch", 0): list(calls), ("batch", 1): [labels]})


def rows_given(whole, *of_ranks):
    ranks = dict(enumerate(of_ranks))
    return rows_without_padding(whole, ranks, parse_mesh(f"dp={len(of_ranks)}"))


def test_rows_that_ranks_pad_to_their_own_lengths_are_those_of_the_batch():
    rows = rows_given(given(call(0, 1, 2, 3)), given(call(0), call(1)), given(call(2), call(3)))
    assert rows.problem == ""
    assert "padded to lengths of their own: 3, 5, 8" in rows.not_joined


def test_the_same_rows_on_all_ranks_are_named_though_padded():
    rows = rows_given(given(call(0, 1, 2, 3)), given(call(0, 1)), given(call(0, 1)))
    assert "ranks 0-1 rows 0-1; no rank was given rows 2-3" in rows.problem


def test_rows_whose_padding_also_stands_in_them_are_not_compared():
    rows = rows_given(given(call(0, 1, 2, 3, pad=9)), given(call(0, 1, pad=9)), given(call(0, 1, pad=9)))
    assert rows.problem == ""
    assert rows.not_joined


def test_rows_of_one_length_are_not_looked_at_again():
    assert rows_given(given(call(1)), given(call(1)), given(call(1))) is None


def test_micro_batches_of_unequal_lengths_are_padded_rows_too_and_what_the_first_module_gets_is_no_batch():
    def of_job(own, *of_ranks):
        ranks = dict(enumerate(of_ranks))
        return SimpleNamespace(
            ranks=ranks, first_module="pos", mesh=parse_mesh(f"dp={len(ranks)}"), is_of_one=own, batches=list
        )

    one = of_job(True, given(call(0), call(1, 2, 3)))
    two = of_job(False, given(call(0), call(1)), given(call(2), call(3)))
    for each in (*one.ranks.values(), *two.ranks.values()):
        each.batch, each.counts, each.records = [], {"pos": 1}, ()  # calls of unequal lengths are not joined
    assert "padded to lengths of their own: 3, 5, 8" in rows_of_jobs(one, two).not_joined


def job(*steps):
    """Return a job of two ranks: what each is given in each step."""
    ranks = {rank: SimpleNamespace(given=of_rank) for rank, of_rank in enumerate(zip(*steps, strict=True))}
    return SimpleNamespace(name="a job", steps_before=0, records=ranks)


def rows(length, *checksums):
    return GivenRecord(((len(checksums), length),), (checksums,))


@pytest.mark.parametrize(("lengths", "is_named"), [((8, 8), True), ((8, 16), False)])
def test_later_rows_are_compared_if_all_ranks_have_one_length(lengths, is_named):
    first = rows(8, 1, 2), rows(8, 3, 4)
    one = job(first, (rows(8, 5, 6), rows(8, 7, 8)))
    two = job(first, (rows(lengths[0], 5, 6), rows(lengths[1], 7, 9)))
    assert (later_steps_of(one, two).departure is not None) == is_named


FIRST = rows(8, 1, 2), rows(8, 3, 4)
"""A step of two ranks with two rows each."""


def weighted(weights, *checksums):
    """Return rows that come with a weight each, by the checksum of that."""
    return GivenRecord(((len(checksums), 8), (len(weights),)), (checksums, weights))


@pytest.mark.parametrize(
    ("whole", "ranks", "expected"),
    [
        (
            (5, 6),
            ((5, 6), (1, 2)),
            "it has 4 different rows and the other job 2 of these; rank 1 is given rows of step 1",
        ),
        ((5, 6, 7), ((5, 7), (6, 1)), "rank 1 is given rows of step 1 again"),
        ((5, 6), ((5,), (6,)), ""),
        ((5, 6, 7), ((5,), (6,)), "the rows of step 2: the jobs have unequal numbers of rows there"),
        ((5, 6), ((5, 6), (7, 8)), "the rows of step 2: the jobs have unequal numbers of rows there"),
        ((5, 6), ((5,), (7,)), "rows that the other job does not have"),
    ],
)
def test_a_last_batch_that_is_filled_up_is_named_and_a_shorter_one_is_not(whole, ranks, expected):
    one = job((rows(8, 1, 2, 3, 4),), (rows(8, *whole),))
    later = later_steps_of(one, job(FIRST, tuple(rows(8, *of_rank) for of_rank in ranks)))
    texts = [*later.gaps, *([later.departure.sentence] if later.departure is not None else [])]
    assert expected in "".join(texts)
    assert bool(texts) == bool(expected)


@pytest.mark.parametrize(("weight", "is_named"), [(9, True), (0, False)])
def test_rows_that_fill_up_a_batch_with_a_weight_of_zero_are_no_difference(weight, is_named):
    one = job((weighted((9, 9, 9, 9), 1, 2, 3, 4),), (weighted((9, 9, 9), 5, 6, 7),))
    first = weighted((9, 9), 1, 2), weighted((9, 9), 3, 4)
    two = job(first, (weighted((9, 9), 5, 7), weighted((9, weight), 6, 1)))
    assert (later_steps_of(one, two).departure is not None) == is_named


@pytest.mark.parametrize(("later", "is_filled"), [((5, 6, 7, 8), True), ((5, 6), False)])
def test_whole_batches_per_rank_are_told_from_a_batch_that_is_filled_up_by_later_steps(later, is_filled):
    one = job((rows(8, 1, 2),), (rows(8, *later),))
    assert is_filled_batch(one, job(FIRST, (rows(8, 5, 6), rows(8, 7, 8)))) == is_filled


def new(*checksums):
    """Return rows of a model that is new in this step, as after a load."""
    return GivenRecord(((len(checksums), 8),), (checksums,), is_of_new_model=True)


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ((9, 10, 11, 12), ((5, 6), (7, 8)), ", 4 rows earlier in its order (it goes on at row 4 after 8 were read"),
        ((9, 10, 11, 12), ((1, 2), (3, 4)), ", 8 rows earlier in its order"),
        ((9, 10, 11, 12), ((7, 8), (9, 10)), ", 2 rows earlier in its order"),
        ((9, 10, 11, 12), ((5, 6), (9, 10)), ""),
        ((9, 10, 11, 12), ((5, 6), (7, 20)), ""),
        ((9, 10, 11, 5), ((5, 6), (7, 8)), ""),
    ],
)
def test_by_how_many_rows_a_later_step_is_off_is_said(there, here, words):
    """Rows that are not one run in the other job's order, or that it has twice, say nothing."""
    one = job((rows(8, 1, 2, 3, 4),), (rows(8, 5, 6, 7, 8),), (new(*there),))
    two = job(FIRST, (rows(8, 5, 6), rows(8, 7, 8)), tuple(new(*of_rank) for of_rank in here))
    text = moved_by(one, steps_of(one), steps_of(two), 2, (8,))
    assert text == "" if not words else text.startswith(words)


@pytest.mark.parametrize(
    ("second", "is_own"),
    [
        (((3, 4), (7, 8), (11, 12)), False),  # as it should be
        (((5, 4), (1, 20), (12, 2)), True),
        (((13, 14), (15, 16), (17, 18)), False),  # other data
        (((7, 8), (3, 4), (11, 12)), False),  # no row comes twice
    ],
)
def test_a_rank_that_shuffles_for_itself_is_told_from_other_data(second, is_own):
    one = whole_job((rows(8, 1, 2, 3, 4),), (rows(8, 5, 6, 7, 8),), (rows(8, 9, 10, 11, 12),))
    first = ((1, 2), (5, 6), (9, 10))
    steps = [(rows(8, *own), rows(8, *other)) for own, other in zip(first, second, strict=True)]
    found = with_other_steps(Rows(problem="rows differ"), one, whole_job(*steps))
    assert (found.cause == OwnOrder("rank 1")) == is_own
    assert ("rank 1 was given rows" in found.problem) == is_own


def whole_job(*steps):
    made = job(*steps)
    made.is_of_one = len(made.records) == 1
    made.ranks = {rank: calling("") for rank in made.records}
    return made


@pytest.mark.parametrize(
    ("shape", "dim"), [((16, 4, 8), 1), ((8, 4, 8), 1), ((4, 16, 8), 0), ((64, 8), 0), ((16, 4), 0), ((12, 4, 8), 0)]
)
def test_the_dim_of_the_batch_is_known_by_the_tokens(shape, dim):
    assert OfRank._dim_of_rows(SimpleNamespace(_given={(4, 16)}), shape, 0) == dim


def calling(*names):
    return SimpleNamespace(counts=dict.fromkeys(names, 1))


def test_modules_that_run_in_part_on_each_stage_are_not_one_call():
    stages = {0: calling("", "emb", "body", "body.0"), 1: calling("", "body", "body.1", "head")}
    assert is_pipeline(stages)
    assert parted_modules(stages) == {"", "body"}
    wrapped = {0: calling("", "inner", "inner.0"), 1: calling("", "inner", "inner.1")}
    assert parted_modules(wrapped) == {"", "inner"}


def test_ranks_with_experts_of_their_own_are_no_stages():
    ranks = {
        0: calling("", "mlp", "mlp.gate", "mlp.experts", "mlp.experts.0"),
        1: calling("", "mlp", "mlp.gate", "mlp.experts", "mlp.experts.1"),
    }
    assert not is_pipeline(ranks)
    assert parted_modules(ranks) == {"mlp.experts"}


def test_what_contains_a_module_that_one_rank_leaves_out_is_compared():
    ranks = {0: calling("", "a", "a.drop", "a.up"), 1: calling("", "a", "a.up")}
    assert parted_modules(ranks) == {""}


@pytest.mark.parametrize(
    ("gradients", "unknown", "names"), [({"head"}, (), ["body"]), ({"head"}, ("body",), []), (set(), (), [])]
)
def test_a_weight_that_only_the_other_job_trains_is_named(gradients, unknown, names):
    parts = {name: Weight((4,), None, Kept.of((4,), np.ones(4), "float64")) for name in ("head", "body")}
    own = {name: parts[name] for name in gradients}
    record = SimpleNamespace(held_back=(), not_checked=[(name, "why") for name in unknown])
    watched = SimpleNamespace(
        records={0: record},
        weights=lambda role: {name: {0: part} for name, part in (own if role == "grad" else parts).items()},
    )
    weights = SimpleNamespace(params=parts, grads=parts)
    assert [finding.tensor for finding in frozen_in_one_job(weights, watched)] == names


DP = parse_mesh("dp=2")


def kept(values):
    return Kept.of(values.shape, np.asarray(values, np.float64), "float64")


PAIRS = np.array([[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [4, 5], [6, 7], [8, 9]])


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        (((0, 1, 4, 6), (2, 3, 5, 7)), ""),
        (((0, 2, 4, 6), (1, 3, 5, 7)), ""),
        (((0, 1, 4, 6), (2, 3, 6, 5)), "no rank was given rows 7"),
        (((0, 2, 4, 5), (0, 2, 6, 7)), "no rank was given rows 1, 3"),
    ],
)
def test_of_equal_rows_each_rank_was_given_another_if_there_are_enough(shares, problem):
    batches = {rank: [kept(PAIRS[list(share)])] for rank, share in enumerate(shares)}
    assert rows_of([kept(PAIRS)], batches, DP).problem.endswith(problem)
    assert bool(rows_of([kept(PAIRS)], batches, DP).problem) == bool(problem)


def test_equal_numbers_in_another_order_are_not_told_apart_unless_longer_rows_come_with_them():
    numbers, images = np.array([3, 1, 3, 1]), np.random.default_rng(0).normal(size=(4, 6))
    shares = ((0, 2), (1, 3))
    alone = rows_of([kept(numbers)], {rank: [kept(numbers[list(share)])] for rank, share in enumerate(shares)}, DP)
    assert "rows are equal" in alone.not_joined
    both = {rank: [kept(numbers[list(share)]), kept(images[list(share)])] for rank, share in enumerate(shares)}
    rows = rows_of([kept(numbers), kept(images)], both, DP)
    assert rows.order is not None
    assert rows.order.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize(("begin", "cause"), [(0, WholeBatchPerRank()), (2, DifferentBatch(of_jobs=True))])
def test_a_rank_with_all_rows_beside_one_with_others_reads_whole_batches(begin, cause):
    data = np.random.default_rng(0).normal(size=(16, 3))
    batches = {0: [kept(data[begin : begin + 8])], 1: [kept(data[8:])]}
    assert rows_of([kept(data[:8])], batches, DP).cause == cause


def normalized(values):
    return (values - values.mean(0)) / values.std(0)


@pytest.mark.parametrize("step", ["run", "stride"])
@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (normalized, NormalizedByOwnRows()),
        (lambda rows: 2 * normalized(rows) + 1, NormalizedByOwnRows()),
        (lambda rows: np.sort(rows, 1), DifferentBatch(of_jobs=True)),
        (lambda rows: rows**3, DifferentBatch(of_jobs=True)),
        (lambda rows: rows + np.arange(len(rows))[:, None], DifferentBatch(of_jobs=True)),
        (lambda rows: 2 * rows + 1, NormalizedByOwnRows(is_own=False)),
    ],
)
def test_rows_that_each_rank_scales_and_shifts_were_normalized_by_its_own(make, cause, step):
    data = np.random.default_rng(3).normal(2.0, 3.0, (12, 5))
    shares = [data[:6], data[6:]] if step == "run" else [data[::2], data[1::2]]
    parts = {rank: [kept(make(share))] for rank, share in enumerate(shares)}
    assert rows_of([kept(normalized(data))], parts, DP).cause == cause


@pytest.mark.parametrize("factors", [(2, 1), (2, 2), (0.5, 3)])
def test_rows_that_are_only_scaled_were_not_normalized(factors):
    data = np.random.default_rng(3).normal(2.0, 3.0, (12, 5))
    parts = {rank: [kept(factor * data[6 * rank : 6 * rank + 6])] for rank, factor in enumerate(factors)}
    assert rows_of([kept(data)], parts, DP).cause == DifferentBatch(of_jobs=True)


def test_two_rows_are_scaled_and_shifted_by_chance():
    random = np.random.default_rng(4)
    batches = {rank: [kept(random.normal(size=(2, 6)))] for rank in range(2)}
    assert rows_of([kept(random.normal(size=(4, 6)))], batches, DP).cause == DifferentBatch(of_jobs=True)


PROMPTS = np.array([[1, 2], [1, 2], [3, 4], [3, 4]])


def test_of_rows_that_come_twice_each_rank_may_have_one():
    both = {rank: [kept(PROMPTS[[0, 2]])] for rank in range(2)}
    rows = rows_of([kept(PROMPTS)], both, DP)
    assert (rows.problem, "rows are equal" in rows.not_joined) == ("", True)
    only_first = {rank: [kept(PROMPTS[[0, 1]])] for rank in range(2)}
    assert rows_of([kept(PROMPTS)], only_first, DP).problem


def test_equal_rows_are_told_apart_by_the_other_inputs_or_not_at_all():
    tokens, labels = PROMPTS[[0, 2, 0, 2]], np.arange(4)[:, None]
    shares = {0: (2, 3), 1: (1, 0)}
    given = {rank: [kept(tokens[list(share)]), kept(labels[list(share)])] for rank, share in shares.items()}
    assert "rows are equal" in rows_of([kept(tokens), kept(labels)], given, DP).not_joined


@pytest.mark.parametrize(("own", "cause"), [(True, RowsPairedOtherwise), (False, SharedRows)])
def test_masks_of_the_first_ranks_rows_are_told_from_rows_that_ranks_share(own, cause):
    ids, masks = np.random.default_rng(0).integers(0, 90, (8, 5)), np.random.default_rng(1).integers(0, 2, (8, 5, 5))
    whole = [Kept.of(values.shape, values.astype(np.float64), "int64") for values in (ids, masks)]
    batches = {}
    for rank in range(2):
        rows = slice(4 * rank, 4 * rank + 4) if own else slice(4)
        parts = ids[rows], masks[:4]
        batches[rank] = [Kept.of(part.shape, part.astype(np.float64), "int64") for part in parts]
    assert isinstance(rows_of(whole, batches, parse_mesh("dp=2")).cause, cause)


@pytest.mark.parametrize(
    ("shares", "cause"),
    [
        (((0, 1), (0, 1)), DrawnAlike(2)),
        (((0, 1), (2, 3)), DifferentBatch(of_jobs=True)),
        (((2, 3), (2, 3)), DifferentBatch(of_jobs=True)),
    ],
)
def test_draws_of_the_first_rows_on_all_ranks_are_named(shares, cause):
    """The images are mixed with noise that the ranks draw, so that their rows are no rows of one process's."""
    random, times = np.random.default_rng(7), np.array([42.0, 67.0, 76.0, 14.0])
    batches = {rank: [kept(random.normal(size=(2, 6))), kept(times[list(own)])] for rank, own in enumerate(shares)}
    assert rows_of([kept(random.normal(size=(4, 6))), kept(times)], batches, DP).cause == cause


@pytest.mark.parametrize(
    "counted",
    [np.tile(np.arange(4.0), 2), np.arange(8.0), np.array([0.0, 5, 9, 14, 19, 24, 29, 33]), np.tile(np.eye(4), (2, 1))],
    ids=["positions of each row", "positions", "where packed rows begin", "kinds"],
)
def test_what_all_ranks_count_alike_is_not_drawn(counted):
    """Rows differ for another reason, and the positions of a rank's rows are those of the first rows."""
    random = np.random.default_rng(7)
    batches = {rank: [kept(random.normal(size=(4, 6))), kept(counted[:4])] for rank in range(2)}
    cause = rows_of([kept(random.normal(size=(8, 6))), kept(counted)], batches, DP).cause
    assert cause == DifferentBatch(of_jobs=True)
