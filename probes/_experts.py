"""Experts behind a router, all on one rank or split over the ranks of a group."""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor

FEATURES = 12


class Experts(nn.Module):
    """One matrix per expert, stacked: `weight[e]` is expert e's. Under expert parallel a rank has a stretch of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.randn(num_experts, FEATURES, FEATURES))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Send each token through its chosen expert.

        Args:
            tokens: [tokens, features].
            chosen: [tokens], each token's expert by number.
        """
        if isinstance(self.weight, DTensor):
            return exchanged(self.weight, tokens, chosen, self.num_experts)
        return apply(self.weight, tokens, chosen)


def apply(weight: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Multiply each token by the matrix of its expert."""
    return torch.bmm(tokens.unsqueeze(1), weight[chosen]).squeeze(1)


def exchanged(weight: DTensor, tokens: torch.Tensor, chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Send tokens to the ranks that have their experts, apply the experts, and send the tokens back: two all_to_all.

    Args:
        weight: Split along dim 0 over a mesh of one axis.
        tokens: This rank's tokens.
        chosen: Their experts, numbered over all ranks.
        num_experts: The number of experts on all ranks together.
    """
    group, size = weight.device_mesh.get_group(), weight.device_mesh.size()
    per_rank = -(-num_experts // size)
    owner = chosen // per_rank
    order = owner.argsort(stable=True)
    sent = owner.bincount(minlength=size)
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    to, of = sent.tolist(), received.tolist()
    expert_numbers = chosen.new_empty(sum(of))
    distributed.all_to_all_single(expert_numbers, chosen[order], of, to, group=group)
    arrived = tokens.new_empty(sum(of), FEATURES)
    arrived = all_to_all_single(arrived, tokens[order], of, to, group=group)
    done = apply(weight.to_local(), arrived, expert_numbers - per_rank * weight.device_mesh.get_local_rank())
    returned = tokens.new_empty(len(tokens), FEATURES)
    returned = all_to_all_single(returned, done, to, of, group=group)
    return returned[order.argsort()]


class MixtureOfExperts(nn.Module):
    """A router, which chooses an expert for each token and weights its result, and the experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, num_experts, bias=False)
        self.experts = Experts(num_experts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        return self.experts(tokens, chosen) * weight.unsqueeze(1)
