"""Values of one process's lines, with their rows in the order in which a sampler deals them out to ranks."""

from types import SimpleNamespace

import numpy as np
import pytest

from shardviz.check.step.jobs.line_values import OrderInCalls, RowsOfLines
from shardviz.check.step.jobs.rows import Rows
from shardviz.check.step.trace.traces import Kept

DEALT = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape)


def reordered(whole, *held):
    kept = {}
    for array in held:
        kept.setdefault(array.shape, []).append(Kept.whole(array))
    reorder = RowsOfLines(DEALT, 2, kept).reorder_of(Kept.whole(whole))
    return None if reorder is None else reorder(whole)


def test_rows_are_put_into_the_order_of_the_ranks_along_the_dim_that_has_them():
    batch, turned, joined, pairs = drawn(8, 3), drawn(3, 8), drawn(16, 3), drawn(8, 8)
    assert np.array_equal(reordered(batch, batch[::2]), batch[DEALT])
    assert np.array_equal(reordered(turned, turned[:, ::2]), turned[:, DEALT])
    of_joined = joined.reshape(8, 2, 3)
    assert np.array_equal(reordered(joined, of_joined[::2].reshape(8, 3)), of_joined[DEALT].reshape(16, 3))
    assert np.array_equal(reordered(pairs, pairs[::2][:, DEALT]), pairs[DEALT][:, DEALT])
    assert np.array_equal(reordered(pairs, pairs[::2, ::2]), pairs[DEALT][:, DEALT])


def test_a_value_that_is_wrong_is_known_by_its_shape_to_have_rows():
    whole = drawn(8, 3)
    assert np.array_equal(reordered(whole, 2 * whole[::2]), whole[DEALT])


def test_what_ranks_have_whole_or_count_by_themselves_stays_in_order():
    weight = drawn(8, 3)
    assert reordered(weight, weight, weight[::2]) is None
    assert reordered(weight, weight[:4]) is None
    assert reordered(2 * weight, weight, weight[::2]) is None
    assert reordered(np.arange(8.0), np.arange(4.0)) is None
    assert reordered(drawn(5), drawn(5)) is None


@pytest.mark.parametrize(
    ("order", "num_shares", "calls", "expected"),
    [
        ([0, 1, 4, 5, 2, 3, 6, 7], 2, (2, 2), ([0, 1, 2, 3], False)),
        ([0, 2, 4, 6, 1, 3, 5, 7], 2, (1, 1), ([0, 2, 4, 6, 1, 3, 5, 7], True)),
        ([0, 2, 4, 6, 1, 3, 5, 7], 2, (2, 2), ([0, 2, 1, 3], False)),
        ([0, 2, 5, 7, 1, 3, 4, 6], 2, (2, 2), None),
        ([0, 1, 2, 3, 4, 5, 6, 7], 2, (2, 2), None),
        ([0, 2, 4, 6, 1, 3, 5, 7], 2, (1, 2), None),
    ],
)
def test_calls_are_compared_if_ranks_have_the_same_rows_in_each_as_one_process(order, num_shares, calls, expected):
    def job(count):
        return SimpleNamespace(ranks={0: SimpleNamespace(calls_of_batch={("batch", 0): [None] * count})})

    found = OrderInCalls.of(Rows(np.array(order), num_shares=num_shares), *map(job, calls))
    if expected is None:
        assert found is None
    else:
        rows, has_one_loss = expected
        assert found.has_one_loss == has_one_loss
        assert np.array_equal(np.arange(len(rows)) if found.rows is None else found.rows, rows)
