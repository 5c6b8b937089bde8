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
