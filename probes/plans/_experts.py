"""Experts that share tokens evenly, all on one rank or split over the ranks of ep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from shardviz.live.compat import flatten_mesh  # mesh._flatten(): torch has no public name for it
from shardviz.probes.plans._transformer import Decoder, FeedForward

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Experts(nn.Module):
    """SwiGLU once for each expert, stacked: `w1[e]` is expert e's."""

    group: ProcessGroup | None = None

    def __init__(self, count: int, features: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, features, hidden))
        self.w3 = nn.Parameter(torch.empty(count, features, hidden))
        self.w2 = nn.Parameter(torch.empty(count, hidden, features))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Send every expert its tokens and get them back.

        Args:
            tokens: [experts, tokens for each of them, features].
        """
        size = 1 if self.group is None else self.group.size()
        sent = tokens
        if self.group is not None:
            sent = all_to_all_single(torch.empty_like(tokens), tokens.contiguous(), group=self.group)
        by_expert = sent.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)
        w1, w2, w3 = (_local(weight) for weight in (self.w1, self.w2, self.w3))
        done = torch.bmm(functional.silu(torch.bmm(by_expert, w1)) * torch.bmm(by_expert, w3), w2)
        back = done.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)
        if self.group is not None:
            back = all_to_all_single(torch.empty_like(tokens), back.contiguous(), group=self.group)
        return back


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


class Mixture(nn.Module):
    """A router and its experts, and perhaps one that sees every token.

    The plan spreads tokens evenly: which expert a token wants is in its values, which a plan does not have.
    """

    def __init__(self, features: int, hidden: int, experts: int, chosen: int, *, shared: bool = False) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(features, experts, bias=False)
        self.experts = Experts(experts, features, hidden)
        self.shared_experts = FeedForward(features, hidden) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1).topk(self.chosen).values
        count = self.gate.out_features
        tokens = x.unsqueeze(-2).expand(*x.shape[:-1], self.chosen, x.shape[-1]).flatten(0, -2)
        done = self.experts(tokens.unflatten(0, (count, -1))).flatten(0, 1)
        mixed = (done.view(*x.shape[:-1], self.chosen, x.shape[-1]) * weights.unsqueeze(-1)).sum(-2)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)


def over_ep(model: Decoder, mesh: DeviceMesh) -> None:
    """Split experts over ep, each rank's along its second dim over fsdp, and all the rest over both axes as one.

    Over dim 0 again, as FSDP does if it is not asked, few experts would leave most ranks with none.

    Args:
        model: The model.
        mesh: The axes fsdp and ep.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole_mesh = flatten_mesh(mesh)
    for block in model.layers.values():
        if isinstance(block.feed_forward, Mixture):
            experts = block.feed_forward.experts
            for name, weight in list(experts.named_parameters()):
                split = distribute_tensor(weight.detach(), mesh["ep"], (Shard(0),))
                setattr(experts, name, nn.Parameter(split))
            experts.group = mesh["ep"].get_group()
            fully_shard(experts, mesh=mesh["fsdp"], mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
        fully_shard(block, mesh=whole_mesh, mp_policy=policy)
    fully_shard(model, mesh=whole_mesh, mp_policy=policy)
