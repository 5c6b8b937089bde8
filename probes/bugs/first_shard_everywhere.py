"""Every rank loads the first shard: a loader whose tp_rank defaults to 0 (vllm-gguf-plugin#103).

Each rank cuts its part out of the whole weight, with plain tensors and no placements. The loader's `tp_rank` argument
has a default, one call site leaves it out, and all ranks hold part 0. Shapes are right on every rank.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz

AXES = ("tp",)
MESH = (4,)
KINDS = ("duplicated", "missing")


def build() -> nn.Linear:
    return nn.Linear(8, 12, bias=False)


def parallelize(model: nn.Linear, mesh: DeviceMesh) -> None:
    model.weight = nn.Parameter(load(model.weight.detach(), mesh["tp"].size()))


def load(whole: torch.Tensor, tp_size: int, tp_rank: int = 0) -> torch.Tensor:
    return whole.chunk(tp_size)[tp_rank].clone()


if __name__ == "__main__":
    shardviz.run_probe(__file__)
