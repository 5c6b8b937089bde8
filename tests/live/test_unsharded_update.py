"""After the optimizer: weights, its state and buffers are the unsharded model's, or the ranks that differ are named."""

import pytest

from tests.lanes import recorded
from tests.live.probing import checked

CLIPPING = """
from torch import distributed
class Clipping(torch.optim.SGD):
    def step(self):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        total = sum((g.to_local() if hasattr(g, "to_local") else g).square().sum() for g in grads)
        REDUCE
        for grad in grads: grad.mul_((0.001 / total.sqrt()).clamp(max=1.0))
        super().step()
def optimizer(model, mesh):
    made = Clipping(model.parameters(), 0.1)
    made.group = mesh.get_group("dp")
    return made
"""
OF_ITS_WORLD = {
    "a norm over the mesh's group": CLIPPING.replace("REDUCE", "distributed.all_reduce(total, group=self.group)"),
    "parameters dealt out by the environment": """
import os
from torch import distributed
class Dealt(torch.optim.SGD):
    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        for number, param in enumerate(params):
            mine = number % int(os.environ["WORLD_SIZE"]) == int(os.environ["RANK"])
            change = -0.1 * param.grad if mine else torch.zeros_like(param.grad)
            distributed.all_reduce(change)
            param.data += change
def parallelize(model, mesh): return nn.parallel.DistributedDataParallel(model)
def optimizer(model, mesh): return Dealt(model.parameters(), 0.1)
""",
}


@recorded
@pytest.mark.parametrize("text", OF_ITS_WORLD.values(), ids=OF_ITS_WORLD)
def test_an_update_that_asks_for_its_group_or_world_runs_unsharded_too(text, tmp_path):
    report = checked(text, "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())


WRONG = {
    "a norm over all ranks that is summed twice": (
        CLIPPING.replace("REDUCE", "distributed.all_reduce(total); distributed.all_reduce(total)"),
        "wrong-value",
        "a norm that isn't the whole",
    ),
    "another learning rate": (
        """
from torch.distributed.tensor import DTensor
def optimizer(model, mesh):
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    return torch.optim.SGD(model.parameters(), 0.2 if sharded else 0.1)
""",
        "wrong-value",
        "learning rate",
    ),
}


@pytest.mark.parametrize(("text", "kind", "cause"), WRONG.values(), ids=WRONG)
def test_what_an_update_does_otherwise_is_named(text, kind, cause, tmp_path):
    findings = checked(text, "dp=2", tmp_path).findings
    assert {finding.kind for finding in findings} == {kind}
    assert any(cause in finding.cause for finding in findings)
