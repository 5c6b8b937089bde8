"""Jobs that resume by torch's state dicts, which step the optimizer once before a checkpoint is read into them."""

import pytest

from tests.lanes import nightly
from tests.live.run.jobs import run

RESUME = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict,
)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
torch.manual_seed(7)
earlier = build()
nn.init.normal_(earlier[3].weight)
dcp.save({"model": get_model_state_dict(earlier)}, checkpoint_id="step-10")
torch.manual_seed(0)
model = build()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
weights, states = get_state_dict(model, optimizer)
"""

LOADS = {
    "loaded": "dcp.load({'model': weights}, checkpoint_id='step-10')\nset_state_dict(model, optimizer, "
    "model_state_dict=weights, optim_state_dict=states)\n",
    "exchanged": "dcp.load({'model': weights}, checkpoint_id='step-10')\nexchange(weights['0.weight'])\n",
    "forgotten": "del earlier\ncopies = {name: value.clone() for name, value in weights.items()}\n"
    "dcp.load({'model': copies}, checkpoint_id='step-10')\n",
    "thrown away": "del earlier\ndef resume():\n    copies = {name: value.clone() for name, value in weights.items()}\n"
    "    dcp.load({'model': copies}, checkpoint_id='step-10')\nresume()\n",
    "of a teacher": "def resume(model):\n    copies = {name: value.clone() for name, value in weights.items()}\n"
    "    dcp.load({'model': copies}, checkpoint_id='step-10')\n"
    "    for name, value in model.named_parameters():\n        value.data = copies[name].full_tensor().bfloat16()\n"
    "teacher = build()\nresume(teacher)\n",
}

APP = """
class App:
    def state_dict(self):
        weights, states = get_state_dict(model, optimizer)
        return {"model": {name: GIVEN for name, value in weights.items()}}
    def load_state_dict(self, state):
        RETURNED
del earlier, weights, states
dcp.load({"app": App()}, checkpoint_id="step-10")
"""
"""A `Stateful`, as torch's tutorial has it: `dcp.load` asks it for its tensors, and gives them back to it."""

APPS = {
    "set": {"GIVEN": "value", "RETURNED": "set_model_state_dict(model, state['model'])"},
    "exchanged": {"GIVEN": "value", "RETURNED": "exchange(state['model']['0.weight'])"},
    "thrown away": {"GIVEN": "value.clone()", "RETURNED": "pass"},
}


def resumed(folder, load):
    return run(folder, RESUME + LOADS[load] + "train(model)\n", "--steps", "2")


@nightly
def test_a_resumed_job_is_captured_after_its_load(tmp_path):
    ran = resumed(tmp_path, "loaded")
    assert ran.code == 0, ran.err + ran.out
    assert "values of Sequential are compared with" in ran.err
    assert "step-10" in ran.err
    assert not ran.report().findings
    assert "ended after 2 steps" in ran.err


@nightly
def test_shards_that_changed_places_in_a_resumed_job_are_named(tmp_path):
    ran = resumed(tmp_path, "exchanged")
    assert ran.code == 1, ran.err + ran.out
    assert [finding.tensors for finding in ran.report().findings] == [("0.weight",)]


@nightly
def test_a_checkpoint_that_was_read_into_copies_and_never_set_is_noted(tmp_path):
    ran = resumed(tmp_path, "forgotten")
    assert ran.code == 0, ran.err + ran.out
    assert any("the job opened step-10, and these values are not in it" in one.why for one in ran.report().not_checked)


@nightly
def test_a_checkpoint_that_was_read_into_copies_which_are_gone_is_a_finding(tmp_path):
    ran = resumed(tmp_path, "thrown away")
    assert ran.code == 1, ran.err + ran.out
    (finding,) = ran.report().findings
    assert finding.explanation.id == "loaded-into-copies"


@nightly
def test_a_checkpoint_that_was_read_for_a_teacher_is_no_finding(tmp_path):
    ran = resumed(tmp_path, "of a teacher")
    assert not ran.report().findings, ran.out


def resumed_by_an_app(folder, words):
    load = APP
    for word, text in APPS[words].items():
        load = load.replace(word, text)
    saved = RESUME.replace(
        '{"model": get_model_state_dict(earlier)}', '{"app": {"model": get_model_state_dict(earlier)}}'
    )
    return run(folder, saved + load + "train(model)\n", "--steps", "2")


@nightly
def test_a_job_that_resumes_by_a_stateful_is_compared_with_its_folder(tmp_path):
    ran = resumed_by_an_app(tmp_path, "set")
    assert ran.code == 0, ran.err + ran.out
    assert "step-10" in ran.err
    assert not ran.report().findings
    assert not [one for one in ran.report().not_checked if "written after" in one.why]


@nightly
@pytest.mark.parametrize(("words", "kind"), [("exchanged", "misordered"), ("thrown away", "loaded-into-copies")])
def test_what_a_stateful_does_wrong_is_named(tmp_path, words, kind):
    ran = resumed_by_an_app(tmp_path, words)
    assert ran.code == 1, ran.err + ran.out
    (finding,) = ran.report().findings
    assert kind in (finding.kind, finding.explanation.id)
