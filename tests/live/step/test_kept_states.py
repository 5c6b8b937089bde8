"""What an optimizer keeps besides arrays, and what a step logs: compared, or not checked by name."""

import pytest
import torch
from torch import nn

from shardviz.errors import ProbeError
from shardviz.live.step.step import logged_by
from shardviz.live.step.steppers import differing, kept_by
from tests.lanes import at_night, recorded
from tests.live.probing import checked

OPTIMIZER = """
FAULT = ""
def parallelize(model, mesh):
    model.fault = FAULT
    fully_shard(model, mesh=mesh["dp"])
class Keeping(torch.optim.SGD):
    fault = ""
    def off(self, what): return int(self.fault == what)
    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = torch.tensor(3.0 + self.off("count"))
            state["number"] = 2 + self.off("number")
            state["recent"] = [torch.ones(3) + self.off("recent")]
            if not self.off("missing"): state["kept"] = parameter.detach() * 1
        self.state["all"] = {"norm": torch.ones(2) + self.off("all")}
        self.param_groups[0]["scale"] = 1.5 + self.off("scale")
def optimizer(model, mesh):
    found = Keeping(model.parameters(), lr=0.1, momentum=0.9)
    found.fault = getattr(model, "fault", "")
    return found
"""
DIFFERS = "after the step it differs from the unsharded model's, and nothing says how ranks share it"
NAMES = "0.weight, 0.bias, 2.weight, 2.bias"


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        *at_night([("", set()), ("count", {("", f"the optimizer's count of {NAMES}: {DIFFERS}")})], recorded),
        *at_night(
            [
                ("number", {("", f"the optimizer's number of {NAMES}: {DIFFERS}")}),
                ("recent", {("", f"the optimizer's recent[0] of {NAMES}: {DIFFERS}")}),
                ("all", {("", f"the optimizer's all.norm: {DIFFERS}")}),
                ("scale", {("", f"the optimizer's scale of group 0 of 1: {DIFFERS}")}),
            ]
        ),
        (
            "missing",
            {(f"{name}.kept", "the optimizer's state after the step: no rank has it") for name in NAMES.split(", ")},
        ),
    ],
)
def test_a_state_that_only_one_optimizer_keeps_so_is_not_checked(fault, reasons, tmp_path):
    report = checked(OPTIMIZER.replace('FAULT = ""', f"FAULT = {fault!r}"), "dp=2", tmp_path)
    assert report.findings == ()
    assert {(unchecked.tensor, unchecked.why) for unchecked in report.not_checked} == reasons


def test_a_step_count_may_be_that_of_any_parameter_if_the_name_is_new():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    kept = kept_by(optimizer, model)
    flat = {kind: {"flat": next(iter(of_params.values()))} for kind, of_params in kept.items()}
    assert list(differing(flat, kept)) == []
    flat["step"] = {"flat": torch.tensor(7.0)}
    assert list(differing(flat, kept)) == [("step", f"the optimizer's step of flat: {DIFFERS}")]


LOGGED = """
FAULT = ""
def parallelize(model, mesh):
    model.fault = FAULT
    fully_shard(model, mesh=mesh["dp"])
def log(model, batch, loss):
    fault = getattr(model, "fault", "")
    deep = {"losses": {"main": 2.0 + (fault == "deep"), "none": None}, "pair": [1.0, 3.0]}
    return None if fault == "none" else deep
"""


@pytest.mark.parametrize(
    ("fault", "tensors", "names"),
    [*at_night([("", [], [])], recorded), ("deep", ["losses.main"], []), ("none", [], ["losses.main", "pair"])],
)
def test_values_are_logged_within_dicts_or_said_to_be_missing(fault, tensors, names, tmp_path):
    report = checked(LOGGED.replace('FAULT = ""', f"FAULT = {fault!r}"), "dp=2", tmp_path)
    assert [finding.tensor for finding in report.findings] == tensors
    assert [unchecked.tensor for unchecked in report.not_checked] == names


def test_a_text_cannot_be_logged():
    class Probe:
        @staticmethod
        def log(model, batch, loss):
            return {"x": {"y": "loss is 2"}}

    with pytest.raises(ProbeError, match=r"class str under 'x\.y'"):
        logged_by(Probe, nn.Linear(1, 1), (torch.ones(1),), torch.ones(()))


def test_a_step_that_returns_two_losses_is_refused(tmp_path):
    text = """
def step(model, batch, mesh):
    loss = model(batch).square().mean()
    loss.backward()
    return torch.stack([loss, loss])
"""
    with pytest.raises(ProbeError, match=r"step\(\) returned a tensor of shape \(2,\)"):
        checked(text, "dp=2", tmp_path)
