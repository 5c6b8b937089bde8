"""A job that copies weights from a file by itself: the file that it opened is what they are compared with."""

import pytest
from safetensors.torch import save_file

from tests.lanes import nightly
from tests.live.run.jobs import ON_META, ON_TWO_RANKS, run, save_weights

READERS = {
    "load_file": "by_hand(load_file('weights.safetensors').get)\n",
    "torch_load": "whole = torch.load('weights.pt')['model']\nby_hand(whole.get)\n",
    "safe_open": """
with safe_open("weights.safetensors", framework="pt") as file:
    assert isinstance(file, safe_open)
    for name, parameter in model.named_parameters():
        size = file.get_slice(name).get_shape()[0] // 2
        parameter.to_local().detach().copy_(file.get_slice(name)[rank * size : (rank + 1) * size])
""",
}


@nightly
@pytest.mark.parametrize("reader", ["safe_open", "load_file", "torch_load"])
def test_what_is_copied_from_a_file_is_compared_with_it(tmp_path, reader):
    save_weights(tmp_path)
    ran = run(tmp_path, ON_META + READERS[reader] + "train(model)\n")
    assert ran.code == 0, ran.err + ran.out
    assert "values of Sequential are compared with" in ran.err
    assert f"weights.{'pt' if reader == 'torch_load' else 'safetensors'}" in ran.err
    assert not {one.tensor for one in ran.report().not_checked} - {"3.bias"}  # zeros


@nightly
def test_one_rank_that_did_not_copy_is_named_without_a_reference(tmp_path):
    save_weights(tmp_path)
    ran = run(tmp_path, ON_META + "by_hand(load_file('weights.safetensors').get, skipped=1)\ntrain(model)\n")
    assert ran.code == 1, ran.err + ran.out
    found = {one.tensor: one for finding in ran.report().findings for one in finding.each}
    assert {"0.weight", "2.weight", "3.weight"} <= set(found)
    assert found["0.weight"].ranks == (1,)


@nightly
def test_a_file_that_was_opened_and_not_loaded_is_named_and_its_tensors_have_no_tick(tmp_path):
    weights = save_weights(tmp_path)
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "older.safetensors")
    ran = run(
        tmp_path,
        "from safetensors.torch import load_file\n" + ON_TWO_RANKS + "load_file('older.safetensors')\ntrain(model)\n",
    )
    assert ran.code == 0, ran.err + ran.out
    assert ran.report().findings == ()
    assert "? 0.weight" in ran.out
    assert "the job opened older.safetensors, and these values are not in it" in " ".join(ran.out.split())


@nightly
@pytest.mark.parametrize(
    ("changed", "how"),
    [
        ("whole[name].tanh()", "no rank holds any of the values"),
        ("whole[name] * 0.7", "each element is 0.7 times what it has there"),
    ],
)
def test_values_that_are_changed_after_they_were_read_are_not_checked(changed, how, tmp_path):
    save_weights(tmp_path)
    loads = f"whole = load_file('weights.safetensors')\nby_hand(lambda name: {changed})\ntrain(model)\n"
    ran = run(tmp_path, ON_META + loads)
    assert ran.code == 2, ran.err + ran.out
    assert not ran.report().findings
    why = {one.tensor: one.why for one in ran.report().not_checked}
    assert f"the job opened weights.safetensors, and {how}" in why["0.weight"]


@nightly
def test_a_file_that_is_opened_for_a_second_model_is_compared_with_it(tmp_path):
    save_weights(tmp_path)
    second = ON_META + "by_hand(load_file('weights.safetensors').get, skipped=1)\ntrain(model)\n"
    ran = run(tmp_path, ON_TWO_RANKS + "train(model)\n" + second)
    assert ran.code == 1, ran.err + ran.out
    assert not ran.report().findings
    assert {finding.ranks for finding in ran.report(2).findings} == {(1,)}
    assert "job.shardviz:\n" in ran.out
    assert "job-2.shardviz:\n" in ran.out


@nightly
def test_a_file_that_the_job_opens_itself_for_torch_is_found(tmp_path):
    save_weights(tmp_path)
    opened = "with open('weights.pt', 'rb') as file:\n    whole = torch.load(file)['model']\n"
    ran = run(tmp_path, ON_META + opened + "by_hand(whole.get, skipped=1)\ntrain(model)\n")
    assert ran.code == 1, ran.err + ran.out
    assert "weights.pt" in ran.err
