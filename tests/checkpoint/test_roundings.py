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


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("shape", [(40, 60), (48,)])
def test_sums_in_a_different_order_are_a_rounding(tmp_path, dtype, shape):
    terms = RANDOM.normal(size=(32, *shape)).astype(dtype)
    before, after = (np.add.reduce(order, axis=0, dtype=dtype) for order in (terms, terms[::-1]))
    outcome = outcome_of(tmp_path, before, after)
    assert (outcome.verdict, outcome.cause_id) == ("other", "rounding-difference")


@pytest.mark.parametrize("change", ["one bit", "one element", "a step", "narrow", "nan"])
def test_what_is_no_rounding_has_another_cause_or_none(tmp_path, change):
    before = RANDOM.normal(size=(400, 60)).astype("f4")
    after = before.copy()
    if change == "one bit":
        after[3, 5] = np.nextafter(after[3, 5], np.float32(9))
    elif change == "one element":
        before[3, 5], after[3, 5] = 1e-3, 2e-3
    elif change == "a step":
        after += 1e-5 * np.sign(RANDOM.normal(size=before.shape)).astype("f4")
    elif change == "narrow":
        before, after = before.astype("f2"), after.astype("f2")
        after[::7] = np.nextafter(after[::7], np.float16(9))
    else:
        before[0, 0], after[0, 1] = np.nan, np.inf
    outcome = outcome_of(tmp_path, before, after)
    assert (outcome.verdict, outcome.cause_id) == ("other", ""), change


@pytest.mark.parametrize(("size", "cause"), [(1e-9, "lost-in-float16"), (1e-3, ""), (1e6, "overflow-in-float16")])
def test_values_that_a_cast_to_float16_makes_zero_are_named(tmp_path, size, cause):
    """A few of any weights are that small."""
    before = (size * np.square(RANDOM.normal(size=(40, 60)))).astype("f4")
    before[0, :5] = 1e-9
    before[1] = 0
    with np.errstate(over="ignore"):
        outcome = outcome_of(tmp_path, before, before.astype("f2"))
    assert (outcome.verdict, outcome.cause_id) == ("cast", cause)


@pytest.mark.parametrize(
    ("at", "rest", "cause"), [(6, 0.0, "overwritten-parts"), (0, 0.0, ""), (6, 1.0, ""), (4, 0.0, "")]
)
def test_parts_that_were_written_over_each_other_are_named(tmp_path, at, rest, cause):
    """Parts in their own places, beside zeros or drawn anew, are something else."""
    before = RANDOM.normal(size=(8, 4, 6))
    after = np.abs(rest * RANDOM.normal(size=before.shape))
    after[:2] = before[at : at + 2]
    outcome = outcome_of(tmp_path, before, after)
    assert outcome.cause_id == cause
    assert not cause or f"has the first's {at}-{at + 1} at 0-1, and zeros at 2-7" in outcome.why


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
