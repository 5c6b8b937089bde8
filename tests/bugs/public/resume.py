"""Jobs that resume, and go on with other weights than were saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bugs.public.case import Command, Public
from tests.live.run.jobs import BEGIN, END, TORCHRUN, save_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UNEVEN = """
import torch.distributed.checkpoint as dcp

def build():
    return nn.Sequential(nn.Embedding(33, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 33))

torch.manual_seed(7)
dcp.save({"model": build().state_dict()}, checkpoint_id="step-10")
torch.manual_seed(0)
model = build()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
fully_shard(model, mesh=mesh)

def cached(model):
    # The state dict as it was before FSDP2 padded shards: what has padding lives elsewhere since then.
    return model.state_dict()

dcp.load({"model": cached(model)}, checkpoint_id="step-10")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    model(torch.randint(33, (4, 8))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
STALE = "{name: value.clone() if value.shape[0] % 2 else value for name, value in model.state_dict().items()}"

LAYER_WISE = """
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(build())
whole = load_file("weights.safetensors")
with torch.no_grad():
    # Each rank's optimizer has the master weights of every other parameter.
    for number, (name, parameter) in enumerate(model.module.named_parameters()):
        owner = number % dist.get_world_size()
        if owner == rank:
            parameter.copy_(whole[name])
        dist.broadcast(parameter, src=owner)
train(model)
"""


def script(right: str, edit: tuple[str, str]) -> Callable[[Path, bool], None]:
    """Return what writes the job's script, and a checkpoint for it."""
    assert right.count(edit[0]) == 1

    def make(folder: Path, is_right: bool) -> None:
        save_weights(folder)
        (folder / "job.py").write_text(BEGIN + (right if is_right else right.replace(*edit)) + END)

    return make


RUN = ("run", "-o", "job.shardviz", "--steps", "1")

CASES = (
    Public(
        "torchtitan#1702",
        Command(
            "an uneven vocabulary loaded into a state dict that was cached",
            script(UNEVEN, ("return model.state_dict()", f"return {STALE}")),
            (*RUN, "--", *TORCHRUN, "job.py"),
            ("[0,3].weight", "3.bias", "step-10", "not loaded|never|initial|before|did not take|not applied"),
        ),
    ),
    Public(
        "Megatron-LM#6920",
        Command(
            "master weights loaded by their owners and not sent on",
            script(LAYER_WISE, ("        dist.broadcast(parameter, src=owner)\n", "")),
            (*RUN, "--reference", "weights.safetensors", "--", *TORCHRUN, "job.py"),
            ("0.weight", "0.bias", "rank 0", "rank 1", "skipped|differ|not loaded|initial|never|copies"),
        ),
    ),
)
