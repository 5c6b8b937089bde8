"""Jobs in narrow numbers compared in a later step: rounding took their weights apart, or an earlier step did."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import at_night
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            mean = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
            weight.sub_(self.param_groups[0]["lr"] * mean.lerp(weight.grad, 0.1).sign())
            mean.lerp_(weight.grad, 0.01)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(functional.gelu(self.up(x)))


model = nn.Sequential(nn.Embedding(20, 16), Block(), nn.Linear(16, 20))
called, step_with = model, {"lr": 1e-2}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    WRAP
optimizer = OPTIMIZER(called.parameters(), **step_with)
ids = torch.randint(20, (4, 8, 9), generator=torch.Generator().manual_seed(1))
for step in range(4):
    batch = ids[step, RANK::WORLD]
    if WORLD > 1:
        BEFORE
    with torch.autocast("cpu", torch.bfloat16, enabled=AUTOCAST):
        loss = functional.cross_entropy(called(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if WORLD > 1:
        AFTER
    optimizer.step()
"""
DDP = {"WRAP": "called = DistributedDataParallel(model)", "AUTOCAST": "True"}
FSDP = {
    "WRAP": (
        "policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32); "
        "[fully_shard(layer, mesh=mesh, mp_policy=policy) for layer in (model[1], model)]"
    )
}
FLAT = {
    "WRAP": (
        "called = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16), "
        "device_id=torch.device('cpu'))"
    )
}
USUAL = {"BEFORE": "pass", "AFTER": "pass", "AUTOCAST": "WORLD == 1", "OPTIMIZER": "torch.optim.AdamW"}
SINGLE = DDP | {"AUTOCAST": "False"}
MOVES = SINGLE | {"OPTIMIZER": "functools.partial(torch.optim.RMSprop, momentum=0.5, alpha=0.5)"}
SIZES = SINGLE | {"OPTIMIZER": "torch.optim.Rprop"}
SIGNS = SINGLE | {"OPTIMIZER": "Lion"}
SHIFT = SINGLE | {
    "y = self.norm(x)": "x = self.before(x + self.shift[: x.shape[1], None])\n        y = self.norm(x)",
    "self.up, self.down =": (
        "self.before, self.shift = nn.LayerNorm(16), nn.Parameter(torch.randn(9))\n        self.up, self.down ="
    ),
}
OF_RANK = "[dist.all_reduce(part.grad.mul_(WORLD * (RANK == 0))) for part in model[1].parameters() if part.ndim == 1]"


def compared(tmp_path, changes, step=3):
    source = PROGRAM
    for word, code in (USUAL | changes).items():
        source = source.replace(word, code)
    (tmp_path / "job.py").write_text(source)
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    one, two = (
        run(tmp_path, name, *launcher, str(tmp_path / "job.py"), step=step)
        for name, launcher in (("one", (sys.executable,)), ("two", command))
    )
    return diff(one, two)[0]


@pytest.mark.recorded
@pytest.mark.parametrize(
    "changes",
    at_night([DDP, FSDP, FLAT, MOVES, SIZES, SIGNS, SHIFT]),
    ids=["ddp", "fsdp", "fsdp1", "moves", "sizes", "signs", "shift"],
)
def test_jobs_that_rounding_takes_apart_agree(tmp_path, changes):
    step = compared(tmp_path, changes)
    assert not step["departures"], step
    assert any("rounding decides where an optimizer moves" in each["why"] for each in step["not_compared"]), step


WRONG = {
    "rate": (DDP | {"BEFORE": "optimizer.param_groups[0]['lr'] = 2e-2 if step == 0 else 1e-2"}, 2, "another learning"),
    "rows": (FSDP | {"BEFORE": "batch = ids[step, :8 // WORLD] if step == 0 else batch"}, 2, "by other gradients"),
    "part": (DDP | {"AFTER": OF_RANK}, 3, "by other gradients, by another"),
    "moves": (
        MOVES | {"AFTER": "[part.grad.neg_() for part in model[1].parameters() if not step]"},
        2,
        "gradients, as",
    ),
    "sign": (DDP | {"AFTER": "[part.grad.neg_() for part in model[1].parameters() if not step]"}, 2, "gradients, as"),
}


@pytest.mark.recorded
@pytest.mark.parametrize(("changes", "step", "why"), at_night(WRONG.values()), ids=WRONG)
def test_what_an_earlier_step_does_is_seen(tmp_path, changes, step, why):
    differences = compared(tmp_path, changes, step)["departures"]
    assert why in differences[0]["why"], differences
