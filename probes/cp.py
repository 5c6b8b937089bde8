"""Context parallel: each rank has some of the tokens of a sequence, and its queries meet the keys and values of all.

The tokens are split over cp, and every activation with them. The weights are equal copies on all ranks, and their
gradients are summed over cp, as in data parallel. Attention is the one layer where tokens meet: keys and values are
gathered before it (or passed on in a ring), and in backward their gradients are reduced and scattered.

Under a causal mask a late token sees more keys than an early one. If the sequence were cut into consecutive stretches,
the last rank would do most of the work. So the sequence is cut into 2 * cp chunks, and rank r has chunk r from the head
and chunk 2 * cp - 1 - r from the tail: every such pair is equal work. Everything that belongs to the tokens (positions,
labels, masks) must be in the same order; nothing raises if it is not. `shardviz show DUMP tokens` draws the order.

torch's own `context_parallel` does this inside a GPU's attention kernels; written out as here, it runs anywhere.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._refusals import refuse_uneven

AXES = ("cp",)
MESH = (4,)

TOKENS, FEATURES = 48, 12

expect = {"*.weight": "[*, *] =cp"}

Batch = tuple[torch.Tensor, torch.Tensor]


class Attend(nn.Module):
    """Let each query see the keys at its own position and before: causal attention, one head, the whole sequence."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return attend(query, key, value, positions, positions)


class AttendAcross(nn.Module):
    """The same when each rank has some of the tokens: keys, values and their positions come from all ranks.

    Args:
        mesh: The ranks that share the sequence.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        keys, values, key_at = (of_all(part, self.mesh) for part in (key, value, positions))
        return attend(query, keys, values, positions, key_at)


class Attention(nn.Module):
    """Projections of each token to a query, key and value, and the layer where tokens meet."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(FEATURES, FEATURES, bias=False)
        self.key = nn.Linear(FEATURES, FEATURES, bias=False)
        self.value = nn.Linear(FEATURES, FEATURES, bias=False)
        self.attend: nn.Module = Attend()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.attend(self.query(tokens), self.key(tokens), self.value(tokens), positions)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=key_at <= query_at.unsqueeze(1))


def of_all(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Concatenate the ranks' parts; in backward their gradients are summed, and each rank gets its own part."""
    return DTensor.from_local(part, mesh, (Shard(0),)).full_tensor(grad_placements=(Partial(),))


def check_mesh(mesh: Mesh) -> None:
    refuse_uneven(mesh, "cp", TOKENS // 2, "pairs of tokens", "torch: the sequence must divide by 2 * cp")


def build() -> nn.Module:
    return Attention()


def parallelize(model: Attention, mesh: DeviceMesh) -> None:
    """Leave the weights whole, and let attention look at all ranks' tokens; the sequence is split in the step."""
    model.attend = AttendAcross(mesh["cp"])


def batch() -> Batch:
    return torch.randn(TOKENS, FEATURES), torch.arange(TOKENS)


def head_and_tail(mesh: DeviceMesh) -> torch.Tensor:
    """Return the positions that this rank has: one chunk from the head, one from the tail."""
    rank, ranks = mesh.get_local_rank("cp"), mesh["cp"].size()
    chunks = torch.arange(TOKENS).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def sequence(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return this rank's positions in the sequence for each tensor: shardviz checks that they agree."""
    return {"tokens": head_and_tail(mesh), "positions": head_and_tail(mesh)}


def step(model: Attention, batch: Batch, mesh: DeviceMesh) -> torch.Tensor:
    tokens, positions = (part[head_and_tail(mesh)] for part in batch)
    loss = model(tokens, positions).square().mean()  # over this rank's tokens: the mean over ranks is the mean over all
    loss.backward()
    whole = loss.detach().clone()
    for number in (whole, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group("cp"))
        number.div_(mesh["cp"].size())
    return whole


def whole_output(shard: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Put the tokens back in order for the comparison: no placements say which tokens a rank has."""
    parts, order = of_all(shard, mesh["cp"]), of_all(head_and_tail(mesh), mesh["cp"])
    return parts[order.argsort()]


if __name__ == "__main__":
    shardviz.run_probe(__file__)
