"""After the optimizer: weights, its state and buffers are the unsharded model's, or the ranks that differ are named."""

import pytest

from tests.lanes import at_night, recorded
from tests.live.probing import checked

RIGHT = {
    "Adam": "def optimizer(model, mesh): return torch.optim.Adam(model.parameters())",
    "AdamW, fused": "def optimizer(model, mesh): return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)",
    "SGD with momentum": "def optimizer(model, mesh): return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)",
    "clipping by the whole norm": """
def optimizer(model, mesh):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return torch.optim.AdamW(model.parameters())
""",
    "groups by name": """
def optimizer(model, mesh):
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}])
""",
    "some weights frozen": """
def optimizer(model, mesh): return torch.optim.SGD([p for n, p in model.named_parameters() if "bias" in n], 0.1)
""",
}

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
RIGHT |= {
    "a norm over all ranks of the job": CLIPPING.replace("REDUCE", "distributed.all_reduce(total)"),
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
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_right_update_is_quiet(text, tmp_path):
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
    "a step too many": (
        """
from torch.distributed.tensor import DTensor
class Twice(torch.optim.SGD):
    def step(self):
        super().step()
        if any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]): super().step()
def optimizer(model, mesh): return Twice(model.parameters(), 0.1)
""",
        "wrong-value",
        "stepped 2 times",
    ),
    "groups by names that a wrapper changes": (
        """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
def build(): return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 4))
def parallelize(model, mesh):
    model[0] = checkpoint_wrapper(model[0])
    fully_shard(model, mesh=mesh)
def optimizer(model, mesh):
    first = [p for n, p in model.named_parameters() if n.startswith("0.0.")]
    others = [p for n, p in model.named_parameters() if not n.startswith("0.0.")]
    return torch.optim.AdamW([{"params": first, "lr": 0.01}] * bool(first) + [{"params": others, "lr": 0.1}])
""",
        "wrong-value",
        "in another group than the unsharded model's optimizer: lr 0.1 instead of 0.01",
    ),
    "another factor of decay": (
        """
from torch.distributed.tensor import DTensor
def optimizer(model, mesh):
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    return torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5 if sharded else 0.1)
""",
        "wrong-value",
        "weight decay",
    ),
    "moments of no checkpoint": (
        """
from torch.distributed.tensor import DTensor
def optimizer(model, mesh):
    made = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for p in model.parameters():
        made.state[p]["momentum_buffer"] = torch.zeros_like(p) if isinstance(p, DTensor) else torch.ones_like(p)
    return made
""",
        "wrong-value",
        "never loaded",
    ),
    "a group that sharding emptied": (
        """
def optimizer(model, mesh):
    plain = [p for n, p in model.named_parameters() if type(p) is nn.Parameter and p.data.__class__ is torch.Tensor
             or n.endswith("bias")]
    return torch.optim.SGD(plain, 0.1)
""",
        "write-not-applied",
        "sharding changed",
    ),
    "moments of the neighbor's shard": (
        """
from torch import distributed
from torch.distributed.tensor import DTensor
class Neighbors(torch.optim.SGD):
    def step(self):
        super().step()
        for state in self.state.values():
            buffer = state["momentum_buffer"]
            if isinstance(buffer, DTensor):
                local = buffer.to_local()
                parts = [torch.empty_like(local) for _ in range(2)]
                distributed.all_gather(parts, local.contiguous())
                local.copy_(parts[1 - distributed.get_rank()])
def optimizer(model, mesh): return Neighbors(model.parameters(), 0.1, momentum=0.9)
""",
        "wrong-value",
        "a different coordinate",
    ),
}


@pytest.mark.parametrize(
    ("text", "kind", "cause"), [*[*WRONG.values()][:2], *at_night([*WRONG.values()][2:], recorded)], ids=WRONG
)
def test_a_wrong_update_is_named(text, kind, cause, tmp_path):
    findings = checked(text, "dp=2", tmp_path).findings
    assert {finding.kind for finding in findings} == {kind}
    assert any(cause in finding.cause for finding in findings)
