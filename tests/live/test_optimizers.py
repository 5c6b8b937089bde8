"""A probe's own optimizer: what it makes of gradients and weights, right and wrong, on real ranks."""

import pytest

from tests.lanes import at_night, recorded
from tests.live.probing import checked

NEARLY = """
def optimizer(model, mesh):
    for param in model.parameters():
        param.grad.mul_({factor} if hasattr(param, "placements") else 1)
    return torch.optim.AdamW(model.parameters())
"""


ZEROING = """
class Zeroing(torch.optim.AdamW):
    def step(self):
        super().step()
        self.zero_grad(set_to_none=False)
def optimizer(model, mesh): return Zeroing(model.parameters())
"""


@pytest.mark.parametrize(
    "text",
    [
        """
def optimizer(model, mesh):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return torch.optim.AdamW(model.parameters())
""",
        *at_night([ZEROING, NEARLY.format(factor=1 - 1e-6)], recorded),
    ],
    ids=["it clips them", "it zeroes them", "a norm with another small constant"],
)
def test_gradients_are_those_that_backward_left_whatever_the_optimizer_makes_of_them(text, tmp_path):
    report = checked(text, "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())


@pytest.mark.parametrize(
    ("text", "unchecked"),
    [
        *at_night(
            [("def optimizer(model, mesh): return torch.optim.SGD(model[0].parameters(), lr=0.1)", [])], recorded
        ),
        (
            "def optimizer(model, mesh): return torch.optim.SGD(model.parameters(), lr=0.0)",
            ["the weights after the optimizer's step: its learning rate is 0"],
        ),
        (
            """
class Masters:
    def __init__(self, model):
        self.params, self.state = list(model.parameters()), {}
        self.masters = [nn.Parameter(param.detach().clone()) for param in self.params]
        self.own = torch.optim.Adam(self.masters)
        self.param_groups = self.own.param_groups
    def step(self):
        for master, param in zip(self.masters, self.params): master.grad = param.grad.clone()
        self.own.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.params): param.copy_(master)
def optimizer(model, mesh): return Masters(model)
""",
            ["the optimizer's state: the optimizer steps 4 tensors, none of them a parameter of the model"],
        ),
        (
            """
from torch.distributed.fsdp import FullyShardedDataParallel
def parallelize(model, mesh):
    return FullyShardedDataParallel(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
def optimizer(model, mesh): return torch.optim.SGD(model.parameters(), lr=0.1)
""",
            [],
        ),
    ],
    ids=["a part of the model", "a rate of zero", "weights of its own that are copied back", "flat parameters"],
)
def test_weights_that_an_optimizer_does_not_step_and_those_that_it_does_otherwise_are_no_errors(
    text, unchecked, tmp_path
):
    report = checked(text, "dp=2", tmp_path)
    assert report.findings == ()
    assert [entry.why for entry in report.not_checked] == unchecked


def test_states_that_began_as_zeros_are_not_said_to_be_of_another_rank(tmp_path):
    report = checked(NEARLY.format(factor=1 - 1e-4), "dp=2", tmp_path)
    assert {finding.kind for finding in report.findings} == {"wrong-value"}
    assert "state-of-another-rank" not in {finding.explanation.name for finding in report.findings}
