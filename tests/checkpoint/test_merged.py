"""A change merged twice, or halved, beside the checkpoints that it lies between; and training, which is on no line."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint
from shardviz.explain.conversion import AveragedWeights

NAMES = [f"layers.{at}.q_proj.weight" for at in range(3)]


@pytest.fixture
def merged(tmp_path):
    """Write a base with an adapter that was merged several times, in a type."""

    def write(times, dtype=torch.float32, scale=0.1):
        numbers = np.random.default_rng(0)
        weights = {}
        for name in NAMES:
            base, down, up = (numbers.normal(size=size) for size in ((16, 16), (16, 2), (2, 16)))
            weights[name] = torch.from_numpy(base + times * scale * down @ up).to(dtype)
        path = tmp_path / f"{times:g}.safetensors"
        save_file(weights, path)
        return path

    return write


def causes(one, other, *also):
    found = compare_checkpoints(*map(open_checkpoint, (one, other)), also=[open_checkpoint(path) for path in also])
    assert [outcome.verdict for outcome in found.outcomes] == ["other"] * len(NAMES)
    return [(outcome.why.partition("; ")[2], outcome.cause) for outcome in found.outcomes]


@pytest.mark.parametrize(
    ("sides", "why"),
    [
        ((1, 2, 0), "it is 0.safetensors and 2 times what the first adds to that"),
        ((0, 2, 1), "it is the first and 2 times what 1.safetensors adds to that"),
        ((0, 3, 1), "it is the first and 3 times what 1.safetensors adds to that"),
    ],
)
def test_an_adapter_that_was_merged_again_is_named_beside_its_base(merged, sides, why):
    found = causes(*map(merged, sides))
    assert {text for text, _ in found} == {why}
    assert all("The adapter (a LoRA, for example) was merged again" in cause for _, cause in found)


def test_a_mean_of_two_checkpoints_is_no_adapter_merged_again(merged):
    found = causes(*map(merged, (0, 0.5, 1)))
    assert {text for text, _ in found} == {"it is the first and 0.5 times what 1.safetensors adds to that"}
    assert {cause for _, cause in found} == {AveragedWeights().cause}


def test_without_its_base_nothing_is_said(merged):
    assert not any(cause for _, cause in causes(merged(1), merged(2)))


def test_training_is_no_adapter_merged_again(merged, tmp_path):
    torch.manual_seed(0)
    save_file({name: torch.randn(16, 16) for name in NAMES}, tmp_path / "trained.safetensors")
    assert not any(cause for _, cause in causes(merged(1), tmp_path / "trained.safetensors", merged(0)))


def test_a_change_that_is_lost_in_rounding_shows_no_factor(merged):
    files = [merged(times, torch.bfloat16, 0.02) for times in (1, 2, 0)]
    assert not any(cause for _, cause in causes(*files))


def test_weights_of_one_number_each_are_no_adapter_merged_again(tmp_path):
    files = [tmp_path / f"{at}.safetensors" for at in range(3)]
    for file, number in zip(files, (1.0, 0.97, 0.985), strict=True):
        save_file({name: torch.full((64,), number) for name in NAMES}, file)
    assert not any(cause for _, cause in causes(*files))
