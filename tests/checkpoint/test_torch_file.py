"""Files of `torch.save`: state dicts in them, alone or nested, and what is refused in one line."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from shardviz.checkpoint.open import open_checkpoint
from shardviz.reference.files import open_reference
from tests.checkpoint.hostile import damaged, kinds, look, refused
from tests.dumps import replace_file
from tests.lanes import nightly

CASES = 20


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 8))
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    return made, optimizer


@pytest.fixture
def saved(model, tmp_path):
    """Return a function that saves something and returns the file."""

    def save(what, name="model.pt", **options):
        torch.save(what, tmp_path / name, **options)
        return tmp_path / name

    return save


def of(found):
    return {name: tuple(one.shape) for name, one in found.tensors.items()}


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.ckpt"])
def test_a_state_dict_has_its_tensors_with_their_bits(model, saved, name):
    state = model[0].state_dict()
    found = open_checkpoint(saved(state, name))
    assert of(found) == {one: tuple(tensor.shape) for one, tensor in state.items()}
    for one, tensor in state.items():
        wanted = np.ascontiguousarray(tensor.numpy()).view(f"u{tensor.element_size()}").reshape(tensor.shape)
        assert np.array_equal(found.tensors[one].bits, wanted)


def test_nested_state_dicts_are_named_level_by_level(model, saved):
    first, optimizer = model
    file = saved({"model": first.state_dict(), "optim": optimizer.state_dict(), "epoch": 3, "rates": [1e-3]})
    names = set(of(open_checkpoint(file)))
    assert {f"model.{one}" for one in first.state_dict()} < names
    assert {"optim.state.0.exp_avg", "optim.state.3.step"} < names
    assert open_reference(file).find("0.weight") is not None  # a prefix of one side does not count


def test_bfloat16_parameters_shared_memory_and_single_numbers_are_read(saved):
    shared = torch.arange(12.0).bfloat16()
    state = {"a": nn.Parameter(shared), "b": shared[4:8], "one": torch.tensor(2.5), "none": torch.empty(0, 3)}
    state["a"].partition_dim = 0  # as Megatron-core's have
    found = open_checkpoint(saved(state))
    assert {one: found.tensors[one].dtype for one in "ab"} == dict.fromkeys("ab", "bfloat16")
    assert np.array_equal(found.tensors["b"].bits, found.tensors["a"].bits[4:8])
    assert of(found)["none"] == (0, 3)
    assert found.tensors["one"].bits.view("float32") == 2.5


def test_what_is_not_stored_row_by_row_is_not_checked(saved):
    file = saved({"a": torch.randn(4, 6).t(), "b": torch.randn(4)})
    assert list(of(open_checkpoint(file))) == ["b"]
    look(file)
    assert kinds(file) == []


def test_a_dict_that_contains_itself_ends(saved):
    state = {"a": torch.ones(2)}
    state["again"] = state
    assert "a" in of(open_checkpoint(saved(state)))


def fuzz(file, folder, count, seed):
    rng, results = random.Random(seed), []
    for _ in range(count):
        copied = folder / f"damaged{file.suffix}"
        replace_file(copied, damaged(file.read_bytes(), rng))
        results.append(refused(copied))
    return results


def test_damaged_files_are_refused_in_one_line_or_read(model, saved, tmp_path):
    results = fuzz(saved({"model": model[0].state_dict(), "optim": model[1].state_dict()}), tmp_path, CASES, seed=0)
    assert 0 < sum(map(bool, results)) < CASES


@nightly
@pytest.mark.parametrize("seed", range(1, 4))
def test_many_damaged_files(model, saved, tmp_path, seed):
    assert any(fuzz(saved({"model": model[0].state_dict()}), tmp_path, 1000, seed))
