"""Values as ids: content is found where it stands in the reference, whatever was done to it, and never elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from shardviz.layout.region import Region
from shardviz.reference.lookup import UNPLACED, bits_of, locate
from shardviz.relate.values import is_alike

SHAPES = [(64,), (1024,), (32, 48), (48, 24), (3, 16, 40), (4, 24, 16), (256, 9), (9, 256), (2, 3, 8, 16)]
BF16 = 16


def content(shape, width=32, seed=0, scale=1.0):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale
    bits = bits_of(values)
    return bits if width == 32 else (bits >> 16).astype(np.uint16)


def ids_like(shape):
    return np.arange(1, np.prod(shape) + 1, dtype=np.int64).reshape(shape)


def halves(ids, dim):
    return np.split(ids, 2, dim) if ids.shape[dim] % 2 == 0 else np.array_split(ids, 2, dim)


CHANGES = {
    "a half": lambda a: halves(a, 0)[1],
    "the last dim's half": lambda a: halves(a, a.ndim - 1)[1],
    "halves exchanged": lambda a: np.concatenate(halves(a, 0)[::-1], 0),
    "columns exchanged": lambda a: np.concatenate(halves(a, a.ndim - 1)[::-1], a.ndim - 1),
    "rows backwards": lambda a: np.ascontiguousarray(a[::-1]),
    "every second row": lambda a: np.ascontiguousarray(a[::2]),
    "rows interleaved": lambda a: np.concatenate([a[::2], a[1::2]]),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [32, BF16])
@pytest.mark.parametrize("change", CHANGES)
def test_content_is_found_where_it_belongs(shape, width, change):
    reference, ids = content(shape, width), ids_like(shape)
    local, wanted = CHANGES[change](reference), CHANGES[change](ids)
    found = locate(local, reference)
    placed = found != UNPLACED
    assert np.array_equal(reference.ravel()[found[placed] - 1], local[placed])  # never a place with other content
    if width == 32 or (len(shape) > 1 and min(shape) >= 16):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(32, 48), (48, 48), (24, 40)], ids=str)
def test_a_transposed_weight_is_found(shape):
    reference, ids = content(shape, BF16), ids_like(shape)
    assert np.array_equal(locate(np.ascontiguousarray(reference.T), reference), ids.T)


def test_each_of_a_stack_of_experts_transposed_is_found():
    reference, ids = content((4, 32, 48), BF16), ids_like((4, 32, 48))
    assert np.array_equal(locate(np.ascontiguousarray(reference.swapaxes(1, 2)), reference), ids.swapaxes(1, 2))
    unstrided = np.ascontiguousarray(reference[2:].swapaxes(1, 2)).reshape(2, 32, 48)
    assert np.array_equal(locate(unstrided, reference), ids[2:].swapaxes(1, 2).reshape(2, 32, 48))


def test_what_is_claimed_and_right_is_taken_even_where_the_content_repeats():
    reference = np.tile(content((4, 32), BF16), (4, 1))
    claimed = Region((((8, 12),), ((0, 32),)))
    assert np.array_equal(locate(reference[8:12], reference, claimed), ids_like((16, 32))[8:12])


def test_zeros_between_rows_follow_their_neighbors():
    reference = content((64, 32), BF16).copy()
    reference[5:9] = 0
    reference[37:41] = 0
    claimed = Region((((0, 32),), ((0, 32),)))
    assert np.array_equal(locate(reference[32:], reference, claimed), ids_like((64, 32))[32:])


def test_content_of_something_else_has_no_place():
    assert not locate(content((16, 32), BF16, seed=1), content((32, 32), BF16)).any()


def test_one_changed_element_has_no_place_and_its_neighbors_keep_theirs():
    reference = content((32, 64))
    local = reference[8:16].copy()
    local[3, 40] ^= 1
    found = locate(local, reference)
    wanted = ids_like((32, 64))[8:16].copy()
    wanted[3, 40] = UNPLACED
    assert np.array_equal(found, wanted)


def test_constant_content_is_alike():
    assert is_alike(bits_of(np.ones(8, np.float32)))
    assert is_alike(bits_of(np.empty((0, 3), np.float32)))
    assert not is_alike(bits_of(np.array([1.0, -1.0], np.float32)))


@pytest.mark.parametrize("seed", range(20))
def test_random_pieces_of_random_tensors(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(8, 64, size=rng.integers(1, 4)).tolist())
    reference, ids = content(shape, 32, seed), ids_like(shape)
    orders = [rng.permutation(size)[: rng.integers(1, size + 1)] for size in shape]
    assert np.array_equal(locate(reference[np.ix_(*orders)], reference), ids[np.ix_(*orders)])


@pytest.mark.parametrize("count", [1, 20])
def test_values_that_another_tensor_has_by_chance_are_not_placed(count):
    own, other = content((32, 48)), content((32, 48), seed=1)
    where = np.random.default_rng(2).permutation(own.size)[:count]
    other.ravel()[where] = own.ravel()[where[::-1]]  # of so many values a few are equal
    assert (locate(other, own) == UNPLACED).all()


def test_short_pieces_are_placed_value_by_value_though_a_few_are_not_there():
    own = content((40, 5))
    mixed = own[np.random.default_rng(0).permutation(40)][:, ::-1].copy()
    mixed[0] = content((5,), seed=9)
    ids = locate(mixed, own)
    assert (ids[0] == UNPLACED).all()
    assert sorted(ids[1:].ravel()) == sorted(np.unique(ids[1:])) != [UNPLACED]
