"""Differences as small as rounding between two checkpoints, and what only looks like them."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.comparing.one_tensor.orders import cause_of_order
from shardviz.checkpoint.open import open_checkpoint

RANDOM = np.random.default_rng(5)


def outcome_of(folder, before, after):
    for name, tensor in (("a", before), ("b", after)):
        save_file({"w": tensor, "same": np.arange(8.0)}, folder / f"{name}.safetensors")
    sides = [open_checkpoint(folder / f"{name}.safetensors") for name in "ab"]
    (outcome,) = (outcome for outcome in compare_checkpoints(*sides).outcomes if outcome.name == "w")
    return outcome


@pytest.mark.parametrize(("groups", "cause"), [(4, "offsets-of-blocks"), (1, "offsets-of-blocks"), (0, ""), (64, "")])
def test_a_number_that_is_added_to_each_group_of_a_row_is_named(tmp_path, groups, cause):
    """One number for all values has a cause of its own; one for each value is none."""
    before = RANDOM.normal(size=(12, 64)).astype("f4")
    steps = RANDOM.uniform(0.1, 0.4, size=(12, max(groups, 1))).astype("f4")
    after = before + (steps.repeat(64 // groups, axis=1) if groups else np.zeros_like(before))
    after[:, 0] += 0 if groups else 0.5
    assert outcome_of(tmp_path, before, after).cause_id == cause


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([0, 1, 2, 3] * 2, "one-shard-repeated"),
        ([4, 5] * 4, "one-shard-repeated"),
        ([0, 1, 2, 3, 0, 1, 2, 4], ""),
        ([0, 0, 1, 1, 2, 2, 3, 3], ""),
    ],
)
def test_one_shard_in_place_of_all_is_named(tmp_path, rows, cause):
    before = RANDOM.normal(size=(8, 6))
    assert outcome_of(tmp_path, before, before[rows]).cause_id == cause


def test_a_tensor_of_equal_parts_repeats_nothing(tmp_path):
    part = RANDOM.normal(size=(4, 6))
    before = np.concatenate([part, part, RANDOM.normal(size=(8, 6))])
    after = np.concatenate([part] * 4)
    assert outcome_of(tmp_path, before, after).cause_id != "one-shard-repeated"


def test_zeros_repeat_no_shard():
    before = np.array([0, 0, 1, 2], np.uint32)
    assert cause_of_order(before, np.zeros_like(before)) is None
    assert cause_of_order(before, before[[2, 3, 2, 3]]) is not None
