"""Context parallel: the sequence is split over cp, and every rank's queries meet the keys and values of all.

Weights are whole on every rank, as in data parallel; what is split is the tokens. Attention is the one layer where they
meet, so keys and values are gathered (or passed round in a ring). A causal mask makes late tokens cost more than early
ones: with contiguous stretches the last rank would do most of the work. So the sequence is cut in 2 * cp chunks, and
rank r takes chunk r from the head and chunk 2 * cp - 1 - r from the tail: all have the same number of pairs. Whatever
goes with the tokens, positions, labels, masks, must be cut in the same order; nothing raises where it is not.

torch's own `context_parallel` needs a GPU's attention kernels; this is the same order and gather by hand.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_gather
from torch.nn import functional

import shardviz
from shardviz.mesh import Mesh
from shardviz.probes._refusals import refuse_uneven

AXES = ("cp",)
MESH = (4,)

TOKENS, FEATURES = 48, 12

expect = {"*.weight": "[*, *] =cp"}


class Attention(nn.Module):
    """Causal attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(FEATURES, FEATURES, bias=False)
        self.key = nn.Linear(FEATURES, FEATURES, bias=False)
        self.value = nn.Linear(FEATURES, FEATURES, bias=False)
        self.positions = nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(tokens))
        return attend(self.query(tokens), self.key(tokens), self.value(tokens), positions, positions)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor
) -> torch.Tensor:
    """Let each query see the keys at its own position and before."""
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=key_at <= query_at.unsqueeze(1))


def check_mesh(mesh: Mesh) -> None:
    refuse_uneven(mesh, "cp", TOKENS // 2, "pairs of tokens", "torch: the sequence must divide by 2 * cp")


def build() -> nn.Module:
    return Attention()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave the weights whole; the sequence is split in the step."""


def batch() -> torch.Tensor:
    return torch.randn(TOKENS, FEATURES)


def head_and_tail(rank: int, ranks: int) -> torch.Tensor:
    """Return the positions of a rank's tokens: one chunk from the head, one from the tail."""
    chunks = torch.arange(TOKENS).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def sequence(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    mine = head_and_tail(mesh.get_local_rank("cp"), mesh["cp"].size())
    return {"tokens": mine, "positions": mine}


def step(model: Attention, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    rank, ranks, group = mesh.get_local_rank("cp"), mesh["cp"].size(), mesh.get_group("cp")
    mine = model.positions(head_and_tail(rank, ranks))
    everyones = torch.cat([head_and_tail(other, ranks) for other in range(ranks)])
    own = tokens[mine]
    key = torch.cat(all_gather(model.key(own), group=group))
    value = torch.cat(all_gather(model.value(own), group=group))
    part = attend(model.query(own), key, value, mine, everyones).square().mean()
    part.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(ranks)
    total = part.detach().clone()
    distributed.all_reduce(total, group=group)
    return total / ranks


if __name__ == "__main__":
    shardviz.run_probe(__file__)
