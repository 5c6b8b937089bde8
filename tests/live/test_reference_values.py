"""What the unsharded model's step starts from and is compared over, and who has a pipeline's output."""

import pytest

from tests.lanes import recorded
from tests.live.probing import checked

FILLED = """
from torch.distributed.tensor import DTensor
def batch(): return torch.randn(12, 6)
def initialize(model, mesh):
    torch.manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            whole = {values}
            p.to_local().copy_(whole.chunk(2)[mesh.get_local_rank("dp")]) if isinstance(p, DTensor) else p.copy_(whole)
"""


@recorded
def test_weights_loaded_after_sharding_start_both_steps_and_that_is_reported(tmp_path):
    report = checked(FILLED.format(values="torch.randn(p.shape, dtype=p.dtype)"), "dp=2", tmp_path)
    assert report.findings == ()
    (entry,) = report.not_checked
    assert "0.bias, 0.weight, 2.bias, 2.weight: drawn or loaded in parallelize() or initialize()" in entry.why


@recorded
@pytest.mark.parametrize("values", ["p.full_tensor() * 2", "p.full_tensor().flip(0)", "torch.zeros(p.shape)"])
def test_weights_that_are_scaled_moved_or_zeroed_are_not_the_unsharded_models(values, tmp_path):
    assert checked(FILLED.format(values=values), "dp=2", tmp_path).findings


@pytest.mark.parametrize("name", ["loss", "other"])
def test_a_log_may_return_a_loss_of_its_own_and_is_compared(name, tmp_path):
    log = f"""
from torch import distributed
from torch.distributed.tensor import DTensor
def log(model, rows, loss):
    value = loss.detach().clone()
    if isinstance(model[0].weight, DTensor) and MEAN:
        distributed.all_reduce(value, distributed.ReduceOp.AVG)
    return {{"{name}": float(value)}}
"""
    assert checked(log + "MEAN = True", "dp=2", tmp_path / "right").findings == ()
    (finding,) = checked(log + "MEAN = False", "dp=2", tmp_path / "wrong").findings
    assert (finding.kind, finding.tensor) == ("unreduced-scalar", {"loss": "log.loss"}.get(name, name))


CLIPPED = """
from torch.distributed.tensor import DTensor
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    {clip}
    return loss.detach()
"""
WHOLE = (
    "norm = sum(p.grad.square().sum().full_tensor() for p in model.parameters()).sqrt()\n"
    "    [p.grad.to_local().mul_(0.01 / norm) for p in model.parameters()]"
)
OWN = "[p.grad.to_local().mul_(0.01 / p.grad.to_local().norm()) for p in model.parameters()]"
HALF = "[p.grad.to_local().mul_(0.3) for p in model.parameters()]"


@recorded
def test_gradients_clipped_by_hand_by_the_norm_of_all_are_right(tmp_path):
    report = checked(CLIPPED.format(clip=WHOLE), "dp=2", tmp_path)
    assert report.findings == ()
    assert sum("clips them to a norm of 0.01" in entry.why for entry in report.not_checked) == 1


@recorded
@pytest.mark.parametrize("clip", [OWN, HALF])
def test_gradients_scaled_otherwise_are_not(clip, tmp_path):
    assert {one.kind for one in checked(CLIPPED.format(clip=clip), "dp=2", tmp_path).findings} == {"wrong-scale"}


NORMED = """
def build(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    (loss {times}).backward()
    return loss.detach()
"""


@recorded
def test_batch_statistics_beside_a_step_of_ones_own_are_compared_over_the_parts(tmp_path):
    assert checked(NORMED.format(times=""), "dp=2", tmp_path / "right").findings == ()
    assert checked(NORMED.format(times="* 2"), "dp=2", tmp_path / "wrong").findings


DROPPED = """
BATCH_AXES = ()
class Dropped(nn.Linear):
    seed = None
    def forward(self, x):
        if self.seed is not None: torch.manual_seed(self.seed)
        return nn.functional.dropout(super().forward(x), 0.5, self.training)
def build(): return nn.Sequential(Dropped(6, 8), nn.Linear(8, 6))
def parallelize(model, mesh): model[0].seed = 5{own}
"""


@recorded
def test_copies_that_drop_different_numbers_in_training_are_a_finding(tmp_path):
    assert checked(DROPPED.format(own=""), "dp=2", tmp_path / "right").findings == ()
    report = checked(DROPPED.format(own=" + mesh.get_local_rank('dp')"), "dp=2", tmp_path / "wrong")
    (finding,) = report.findings
    assert (finding.kind, finding.tensor) == ("unreplicated", "output")
    assert "dropout" in finding.cause
