"""What a tensor's numbers are known by: a digest, and sixteen of them by which two tensors are compared."""

import numpy as np
import pytest
import torch

from shardviz.dump.arrays import (
    HASHED_AT_ONCE,
    MAX_SKETCHED,
    NUMBERS_OF_A_SKETCH,
    apart,
    hash_of,
    hash_of_bytes,
    sketch,
)
from shardviz.live.capture.describe import digest

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


FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]
NAMED = [*FLOATS, "complex64", "complex128"]


def of_(numbers: list[float], dtype: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", NAMED)
def test_zero_has_no_sign_and_nan_no_bits(dtype: str) -> None:
    first = digest(of_([0.0, 1.5, -2.0], dtype))
    assert digest(of_([-0.0, 1.5, -2.0], dtype)) == first


def test_the_payload_of_nan_does_not_count() -> None:
    bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32)
    assert len({hash_of(bits[at : at + 1], "float32", (1,)) for at in range(3)}) == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_that_differ_have_other_digests(dtype: str) -> None:
    smallest = torch.finfo(getattr(torch, dtype)).smallest_normal
    numbers = [0.0, smallest, -smallest, 1.0, -1.0, torch.finfo(getattr(torch, dtype)).max, float("nan")]
    numbers += [] if dtype == "float8_e4m3fn" else [float("inf"), float("-inf")]
    assert len({digest(of_([number, 2.0], dtype)) for number in numbers}) == len(numbers)


def test_bits_of_what_has_no_signed_zero_all_count() -> None:
    assert digest(torch.tensor([-128], dtype=torch.int8)) != digest(torch.tensor([0], dtype=torch.int8))
    lowest = torch.tensor([torch.iinfo(torch.int32).min], dtype=torch.int32)
    assert digest(lowest) != digest(lowest * 0)
    bits = np.array([0x80], np.uint8)  # the one NaN of float8_e4m3fnuz
    assert hash_of(bits, "float8_e4m3fnuz", (1,)) != hash_of(bits * 0, "float8_e4m3fnuz", (1,))


def test_a_zero_far_into_a_large_tensor_has_no_sign_either() -> None:
    one = np.ones(3 * HASHED_AT_ONCE + 5, np.float32)
    one[-1] = 0
    other = one.copy()
    other[-1] = -0.0
    assert hash_of(other, "float32", one.shape) == hash_of(one, "float32", one.shape)
    assert hash_of_bytes(other, "float32", one.shape) != hash_of_bytes(one, "float32", one.shape)
    other[-2] = 2
    assert hash_of(other, "float32", one.shape) != hash_of(one, "float32", one.shape)


def test_a_digest_without_zero_or_nan_is_that_of_earlier_versions() -> None:
    numbers = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    assert hash_of(numbers, "float32", (7, 5)) == hash_of_bytes(numbers, "float32", (7, 5))
