"""A decoder at any size, split as large jobs split it: layers over pp, weights over tp, each part again over fsdp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardviz.live.compat.meshes import flatten_mesh  # mesh._flatten(): torch has no public name for it

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder.

    Attributes:
        layers: Blocks.
        features: Of a token between blocks.
        heads: Of queries.
        kv_heads: Of keys and values.
        hidden: Features inside of the feed-forward layer.
        words: In the vocabulary.
        head: Features of a head.
    """

    layers: int
    features: int
    heads: int
    kv_heads: int
    hidden: int
    words: int
    head: int = 128


class Attention(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.wq = nn.Linear(sizes.features, sizes.heads * sizes.head, bias=False)
        self.wk = nn.Linear(sizes.features, sizes.kv_heads * sizes.head, bias=False)
        self.wv = nn.Linear(sizes.features, sizes.kv_heads * sizes.head, bias=False)
        self.wo = nn.Linear(sizes.heads * sizes.head, sizes.features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(features, hidden, bias=False)
        self.w3 = nn.Linear(features, hidden, bias=False)
        self.w2 = nn.Linear(hidden, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its own input; only the input is kept for backward."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, features: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(features)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(features)
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """A decoder, or a stage of one: what a stage lacks is passed by."""

    def __init__(self, sizes: Sizes, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(sizes.words, sizes.features)
        self.layers = nn.ModuleDict(blocks)
        self.norm: nn.Module | None = nn.RMSNorm(sizes.features)
        self.output: nn.Module | None = nn.Linear(sizes.features, sizes.words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def keep_stage(model: Decoder, stage: int, stages: int) -> None:
    """Drop what another stage has: layers in a row for each, the embedding for the first, the output for the last."""
    names = list(model.layers)
    per_stage = -(-len(names) // stages)
    stage_names = names[stage * per_stage : (stage + 1) * per_stage]
    model.layers = nn.ModuleDict({name: model.layers[name] for name in stage_names})
    if stage > 0:
        model.tok_embeddings = None
    if stage < stages - 1:
        model.norm = model.output = None


def over_tp(model: Decoder, mesh: DeviceMesh) -> None:
    """Split attention by heads, feed-forward layers by hidden features, embedding and output by words."""
    columns, rows = ("attention.wq", "attention.wk", "attention.wv"), ("attention.wo", "feed_forward.w2")
    for block in model.layers.values():
        plan = {name: ColwiseParallel() for name in (*columns, "feed_forward.w1", "feed_forward.w3")}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in rows})
    if model.tok_embeddings is not None:
        parallelize_module(model, mesh, {"tok_embeddings": RowwiseParallel(input_layouts=Replicate())})
    if model.output is not None:
        parallelize_module(model, mesh, {"output": ColwiseParallel()})


def over_fsdp(model: Decoder, mesh: DeviceMesh) -> None:
    """Split every block as a unit and the rest as one more; gather in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def stage_input(stage: int, rows: int, tokens: int, features: int) -> torch.Tensor:
    """Return a stage's input of one micro-batch: token ids, or the previous stage's output."""
    if stage == 0:
        return torch.zeros(rows, tokens, dtype=torch.int64)
    return torch.zeros(rows, tokens, features, dtype=torch.bfloat16).requires_grad_()


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
