import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardviz.dump.arrays import expand_runs
from shardviz.dump.records.tensors import Body, Stamp
from shardviz.dump.validate import digests_of
from shardviz.layout.region import Region
from shardviz.live.capture.capture import describe

WHOLE = Stamp("w", 11, (6, 4))


def ids_of_region(region: Region, stamp: Stamp) -> np.ndarray:
    return region.flat_ids(stamp.shape) + stamp.first


@st.composite
def regions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    dims = [draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6)) for size in shape]
    return shape, dims


@given(regions())
def test_ids_that_are_a_product_of_indices_come_back_as_ranges(case):
    shape, dims = case
    stamp = Stamp("w", 5, shape)
    grid = np.arange(math.prod(shape)).reshape(shape)
    ids = (grid[np.ix_(*dims)] if dims else grid) + stamp.first
    held = describe.as_ranges(ids, stamp, shape)
    assert held is not None
    assert np.array_equal(ids_of_region(Region(held), stamp), ids)


def test_rows_of_a_matrix_read_as_their_range():
    ids = ids_of_region(Region((((2, 4),), ((0, 4),))), WHOLE)
    assert describe.as_ranges(ids, WHOLE, WHOLE.shape) == (((2, 4),), ((0, 4),))


def test_a_transposed_shard_is_no_product_of_ranges():
    ids = (np.arange(24).reshape(6, 4) + 11).T.copy()
    assert describe.as_ranges(ids, WHOLE, WHOLE.shape) is None


def test_ids_of_another_tensor_are_no_ranges_of_this_one():
    assert describe.as_ranges(np.array([[10, 11, 12, 13]]), WHOLE, WHOLE.shape) is None


def test_a_zero_in_the_middle_is_no_range():
    ids = np.array([[11, 12, 0, 14]])
    assert describe.as_ranges(ids, WHOLE, WHOLE.shape) is None


def test_an_empty_shard_keeps_its_shape():
    assert describe.as_ranges(np.empty((0, 4), np.int64), WHOLE, WHOLE.shape) == ((), ((0, 4),))


@given(st.lists(st.integers(-1, 30), max_size=60))
def test_runs_say_every_sequence_of_ids(ids):
    runs = describe.as_runs(np.array(ids, np.int64))
    assert runs is not None
    assert expand_runs(runs).tolist() == ids


def test_runs_of_rows_and_of_columns_are_few():
    grid = np.arange(24).reshape(6, 4)
    assert describe.as_runs(grid[2:4]) == ((8, 1, 8),)
    assert len(describe.as_runs(grid.T)) == 4


def test_noise_is_not_written_as_runs():
    noise = np.random.default_rng(0).permutation(100_000)
    assert describe.as_runs(noise) is None


def test_values_that_are_no_ids_are_reported_from_zeros():
    values = torch.tensor([1.0, 0.0, 2.5, math.nan, math.inf, -3.0, 9.0, 10.0])
    assert describe.ids_of(values, last=9).tolist() == [1, 0, -1, -1, -1, -1, 9, -1]


def test_values_that_json_cannot_say_become_strings():
    assert describe.nested(torch.tensor([[1.5, math.nan], [math.inf, -math.inf]])) == [[1.5, "nan"], ["inf", "-inf"]]


def test_a_digest_tells_values_dtypes_and_shapes_apart_and_nothing_else():
    one = torch.arange(6.0)
    assert describe.digest(one) == describe.digest(torch.arange(12.0).view(6, 2)[:, 0] / 2)
    others = [one.view(2, 3), one.double(), -one, torch.empty(0)]
    assert len({describe.digest(other) for other in [one, *others]}) == 5


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "complex64", "int64", "int8", "uint8", "bool"]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_a_digest_is_that_of_the_values_as_json_has_them(dtype: str, shape: tuple[int, ...]):
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(getattr(torch, dtype))
    body = Body("param", "initial", shape, shape, dtype, values=describe.nested(values))
    assert digests_of(msgspec.json.decode(msgspec.json.encode(body), type=Body))[0] == describe.digest(values)


def test_infinities_are_in_a_digest_and_nan_is_left_out():
    for numbers, is_known in (([-0.0, float("inf"), float("-inf")], True), ([1.0, float("nan"), 2.0], False)):
        values = torch.tensor(numbers)
        body = Body("param", "initial", (3,), (3,), "float32", values=describe.nested(values))
        assert digests_of(body)[:1] == ((describe.digest(values),) if is_known else ())
