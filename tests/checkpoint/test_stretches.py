"""Orders of long stretches, and what looking for them takes: the words and the memory."""

import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.comparing.equality import BLOCK
from shardviz.checkpoint.comparing.one_tensor.orders import name_stretches
from shardviz.checkpoint.open import open_checkpoint

SIZE = 1 << 20


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).view(np.uint32)


def pieces(tensor, num, dim):
    return np.concatenate(np.split(tensor, num, dim)[::-1], dim)


LINE, TABLE = values(1, 6000), values(60, 100)
NAMED = {
    "rolled": (LINE, np.roll(LINE, 1000, 1), "dim 1 is rolled by 1000"),
    "rolled a little": (LINE, np.roll(LINE, 7, 1), "dim 1 is rolled by 7"),
    "rolled back": (LINE[0], np.roll(LINE[0], -5), "dim 0 is rolled by -5"),
    "blocks": (LINE, pieces(LINE, 4, 1), "dim 1's blocks of 1500 come in the order 3 2 1 0"),
    "uneven": (
        LINE.T,
        np.concatenate([LINE.T[200:300], LINE.T[:200], LINE.T[300:]]),
        "in a different order: 3 stretches",
    ),
    "a table": (TABLE, np.roll(TABLE.ravel(), 30).reshape(60, 100), "in a different order: 2 stretches"),
    "joined": (
        TABLE,
        np.concatenate(np.split(TABLE, 4, 1), 0).reshape(60, 100),
        "in the order of view(1, 60, 4, 25).transpose(1, 2)",
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_long_stretches_are_named(case):
    before, after, words = NAMED[case]
    assert name_stretches(before, after).endswith(words)


@pytest.mark.parametrize(
    "after",
    [values(1, 6000, seed=1), np.where(np.arange(6000) == 77, 0, np.roll(LINE, 9, 1)), np.zeros_like(LINE)],
    ids=["others", "one that differs", "zeros"],
)
def test_what_is_no_order_has_no_name(after):
    assert name_stretches(LINE, after.astype(np.uint32)) == ""


def test_values_that_come_twice_are_not_guessed():
    twice = np.tile(LINE[0][:3000], 2)
    assert name_stretches(twice, np.roll(twice, 40)) == ""


CHANGES = {
    "rolled": lambda w: np.roll(w, 7, 1),
    "blocks": lambda w: pieces(w, 8, 1),
    "others": lambda w: values(*w.shape, seed=3),
    "some": lambda w: np.where(np.arange(w.size) % 2, w, 0).astype(w.dtype),
}


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_of_one_line_takes_less_memory_than_two(tmp_path, monkeypatch, change, narrow):
    monkeypatch.setattr("shardviz.checkpoint.comparing.one_tensor.orders.MAX_LOCATED", SIZE - 1)
    line = values(1, SIZE)
    pair = [one.view(np.float32) for one in (line, CHANGES[change](line))]
    for name, one in zip("ab", pair, strict=True):
        save_file(
            {"w": one.astype(np.float16) if narrow else np.ascontiguousarray(one)}, tmp_path / f"{name}.safetensors"
        )
    one, other = (open_checkpoint(tmp_path / f"{name}.safetensors") for name in "ab")
    tracemalloc.start()
    (outcome,) = compare_checkpoints(one, other).outcomes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome.verdict != "equal"
    assert peak < 6 * BLOCK * 8 + 2 * one.tensors["w"].num_bytes
