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


@pytest.mark.parametrize(
    "text",
    [
        """
def optimizer(model, mesh):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return torch.optim.AdamW(model.parameters())
""",
        """
class Zeroing(torch.optim.AdamW):
    def step(self):
        super().step()
        self.zero_grad(set_to_none=False)
def optimizer(model, mesh): return Zeroing(model.parameters())
""",
        *at_night([NEARLY.format(factor=1 - 1e-6)], recorded),
    ],
    ids=["it clips them", "it zeroes them", "a norm with another small constant"],
)
def test_gradients_are_those_that_backward_left_whatever_the_optimizer_makes_of_them(text, tmp_path):
    report = checked(text, "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())


DEALT = """
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
def parallelize(model, mesh): return DistributedDataParallel(model)
class Dealt(torch.optim.SGD):
    def step(self):
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            if number % distributed.get_world_size() == distributed.get_rank(): param.data.sub_(param.grad, alpha=0.1)
        for number, param in enumerate(params):
            if SENT(number): distributed.broadcast(param.data, src=OWNER(number))
def optimizer(model, mesh): return Dealt(model.parameters(), lr=0.1)
"""

STATES = """
from torch.nn.parallel import DistributedDataParallel
def parallelize(model, mesh): return DistributedDataParallel(model)
def optimizer(model, mesh):
    made = torch.optim.Adam(model.parameters())
    torch.manual_seed(SEED(mesh.get_rank()))
    for param in model.parameters():
        kept = {name: torch.rand_like(param) for name in ("exp_avg", "exp_avg_sq")}
        made.state[param] = {"step": torch.tensor(3.0)} | kept
    return made
"""

MADE_BEFORE = """
def parallelize(model, mesh):
    before = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    fully_shard(model, mesh=mesh["dp"])
    model.made = [torch.optim.SGD(model.parameters() if AFTER else before, lr=0.1)]
def optimizer(model, mesh): return model.made[0]
"""

CLIPPED = """
def optimizer(model, mesh):
    grads = [param.grad.to_local() for param in model.parameters()]
    square = sum(grad.square().sum() for grad in grads)
    if SUMMED: torch.distributed.all_reduce(square)
    for grad in grads: grad.mul_(0.01 / square.sqrt())
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@recorded
@pytest.mark.parametrize(
    ("text", "wrong", "right", "kind", "names"),
    [
        (
            DEALT,
            "SENT, OWNER = lambda number: number, lambda number: number % 2",
            "SENT, OWNER = lambda number: True, lambda number: number % 2",
            "unreplicated",
            {"0.weight"},
        ),
        (
            DEALT,
            "SENT, OWNER = lambda number: True, lambda number: 0",
            "SENT, OWNER = lambda number: True, lambda number: number % 2",
            "write-not-applied",
            {"0.bias", "2.bias"},
        ),
        (
            DEALT,
            "SENT, OWNER = lambda number: True, lambda number: 1 - number % 2",
            "SENT, OWNER = lambda number: True, lambda number: number % 2",
            "write-not-applied",
            {""},
        ),
        (
            DEALT.replace("distributed.get_world_size() == distributed.get_rank()", "2 == RANK").replace(
                "return Distributed", "global RANK; RANK = distributed.get_rank(); return Distributed"
            ),
            "RANK, SENT, OWNER = 0, lambda number: True, lambda number: 0",
            "RANK, SENT, OWNER = 0, lambda number: True, lambda number: number % 2",
            "write-not-applied",
            {"0.bias", "2.bias"},
        ),
        (
            STATES,
            "SEED = lambda rank: rank",
            "SEED = lambda rank: 0",
            "unreplicated",
            {"0.weight", "0.bias", "2.weight", "2.bias"},
        ),
        (
            CLIPPED,
            "SUMMED = False",
            "SUMMED = True",
            "wrong-scale",
            {"0.weight", "0.bias", "2.weight", "2.bias"},
        ),
    ],
    ids=[
        "not sent",
        "sent by one rank only",
        "sent by the wrong rank",
        "dealt out before the optimizer is made",
        "a state of its own",
        "clipped by its own norm",
    ],
)
def test_what_an_optimizer_does_wrong_to_weights_and_gradients_is_found(text, wrong, right, kind, names, tmp_path):
    report = checked(text + wrong, "dp=2", tmp_path / "wrong")
    assert {finding.kind for finding in report.findings} == {kind}
    said = " ".join(f"{finding.tensors} {finding.summary}" for finding in report.findings)
    assert all(name in said for name in names)
    report = checked(text + right, "dp=2", tmp_path / "right")
    assert (report.findings, beside_the_unsharded(report)) == ((), [])


def beside_the_unsharded(report):
    """Return what was not checked, but for optimizers that are written for sharded models alone."""
    alone = "the optimizer of the unsharded model: rank 0 raised AttributeError"
    return [entry.why for entry in report.not_checked if not entry.why.startswith(alone)]


@recorded
def test_an_optimizer_of_other_tensors_than_the_models_is_found_by_weights_that_stay(tmp_path):
    report = checked(MADE_BEFORE + "AFTER = False", "dp=2", tmp_path / "before")
    (finding,) = report.findings
    assert (finding.kind, finding.ranks) == ("write-not-applied", (0, 1))
    assert finding.summary == "the optimizer's step changed none of the 4 weights, whose gradients are not zero"
    assert beside_the_unsharded(report) == [
        "the optimizer's state: the optimizer steps 4 tensors, none of them a parameter of the model"
    ]
    report = checked(MADE_BEFORE + "AFTER = True", "dp=2", tmp_path / "after")
    assert (report.findings, beside_the_unsharded(report)) == ((), [])


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
