"""Functions of each element between two tensors: which one it is, and what only looks like one."""

from __future__ import annotations

import numpy as np
import pytest

from shardviz.relate.casts import FUNCTIONS, function_between

BITS = {"float32": np.uint32, "float64": np.uint64, "float16": np.uint16}


def bits_of(values, dtype):
    return np.asarray(values, dtype).view(BITS[dtype])


def between(before, after, dtype="float32", to="float32"):
    function = function_between(bits_of(before, dtype), dtype, bits_of(after, to), to)
    return function.text if function is not None else ""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.text)
def test_each_function_is_told_from_the_others(function, dtype):
    before = np.random.default_rng(0).uniform(0.1, 0.9, (16, 16)).astype(dtype)
    before = -before if "(-x).log" in function.text else before * 4 if "sigmoid" in function.text else before
    after = function.of(before.astype(np.float64)).astype(dtype)
    assert between(before, after, dtype, dtype) == function.text


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.text)
def test_the_inverse_that_is_printed_takes_a_function_back(function):
    torch = pytest.importorskip("torch")
    before = torch.rand(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.8 + 0.1
    before = -before if "(-x).log" in function.text else before
    names = {"F": torch.nn.functional}
    after = eval(function.text, names | {"x": before})
    assert torch.allclose(eval(function.inverse, names | {"y": after}), before)


@pytest.mark.parametrize(
    "after_of",
    [
        lambda before: before * 3,
        lambda before: before + 1,
        lambda before: before[::-1],
        lambda before: np.exp(before) * 2,
        lambda before: np.exp(before[::-1]),
        lambda before: np.exp(before) + np.eye(16),
        lambda before: before + np.float32(1e-6),
    ],
    ids=["factor", "offset", "order", "a multiple", "another order", "one that differs", "rounding"],
)
def test_what_is_no_function_of_each_element_is_not_called_one(after_of):
    before = np.random.default_rng(1).uniform(0.1, 0.9, (16, 16)).astype(np.float32)
    assert between(before, after_of(before).astype(np.float32)) == ""


@pytest.mark.parametrize("before", [np.ones((4, 4)), np.eye(4), np.array([0.5]), np.zeros((4, 4))])
def test_few_values_tell_no_function(before):
    assert between(before, np.exp(before)) == ""


def test_numbers_so_small_or_large_that_a_function_is_a_line_tell_none():
    small = np.random.default_rng(2).normal(0, 1e-3, (16, 16))
    assert between(small, np.tanh(small), "float16", "float16") == ""
    large = np.random.default_rng(2).uniform(30, 60, (16, 16))
    assert between(large, np.logaddexp(large, 0)) == ""
