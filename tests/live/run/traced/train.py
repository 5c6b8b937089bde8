"""A small job as people write them, on one process or on many: a transformer that is trained for two steps.

`python train.py`, or `torchrun ... train.py MESH WAY [FAULT]`, with a mesh such as `dp=2,tp=2`. WAY is how it is
sharded: `fsdp` (FSDP2 and DTensor's tensor parallel), `ddp`, `hand` (tensor parallel by hand beside DDP), or `pp` (two
stages of a pipeline).
"""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FEATURES, HEADS, TOKENS, ROWS, WORDS = 16, 4, 6, 8, 40
MESH, WAY, FAULT = (*sys.argv[1:4], *("", "one", "")[len(sys.argv) - 1 :])
GROUPS: dict[str, dist.ProcessGroup] = {}


def is_at(name: str) -> bool:
    return name in FAULT.split("+")


class Copy(torch.autograd.Function):
    """What every rank has goes into its own part of the features: gradients are summed."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Sum(torch.autograd.Function):
    """The terms of a sum become the sum; the gradient goes to every rank as it is."""

    @staticmethod
    def forward(ctx, values, group):
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Attention(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.group, self.heads = number, None, HEADS
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES, bias=False)
        self.out = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(mixed.transpose(1, 2).flatten(2))
        return Sum.apply(x, self.group) if self.group is not None else x


class MLP(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.group = number, None
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x):
        if self.group is None:
            return self.down(functional.gelu(self.up(x)))
        spoiled = self.number == 1
        x = self.up(Copy.apply(x, self.group))
        x = functional.linear(
            functional.gelu(x), self.down.weight, self.down.bias if spoiled and is_at("bias") else None
        )
        if not (spoiled and is_at("unsummed")):
            if spoiled and is_at("detached"):
                total = x.detach().clone()
                dist.all_reduce(total, group=self.group)
                x = total
            else:
                x = Sum.apply(x, self.group)
        return x if spoiled and is_at("bias") else x + self.down.bias


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(FEATURES), Attention(number)
        self.norm2, self.mlp = nn.LayerNorm(FEATURES), MLP(number)
        self.drop = nn.Dropout(0.25 if "drop" in FAULT else 0.0)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return self.drop(x + self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.places = nn.Embedding(TOKENS, FEATURES) if is_at("places") else None
        self.layers = nn.ModuleDict({str(number): Block(number) for number in range(3)})
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)

    def forward(self, tokens, labels=None):
        x = self.embed(tokens) if self.embed is not None else tokens
        x = x + self.places(torch.arange(TOKENS)) if self.places is not None else x
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if is_at("checkpointed") else layer(x)
        x = self.head(self.norm(x)) if self.head is not None else x
        return x if labels is None else functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def by_hand(model, mesh):
    """Cut attention and MLPs by heads and by features, as plain tensors."""
    group, at, size = mesh["tp"].get_group(), mesh["tp"].get_local_rank(), mesh["tp"].size()
    for layer in model.layers.values():
        attn, mlp = layer.attn, layer.mlp
        attn.group = mlp.group = group
        attn.heads = HEADS // size
        spoiled = attn.number == 1 and is_at("heads")
        parts = [attn.qkv.weight] if spoiled else attn.qkv.weight.chunk(3)
        attn.qkv.weight = nn.Parameter(torch.cat([part.chunk(size)[at] for part in parts]).detach().clone())
        attn.out.weight = nn.Parameter(attn.out.weight.chunk(size, 1)[at].detach().clone())
        mlp.up.weight = nn.Parameter(mlp.up.weight.chunk(size)[at].detach().clone())
        mlp.up.bias = nn.Parameter(mlp.up.bias.chunk(size)[at].detach().clone())
        mlp.down.weight = nn.Parameter(mlp.down.weight.chunk(size, 1)[at].detach().clone())


def by_fsdp(model, mesh):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = mesh.mesh_dim_names
    data = mesh[tuple(name for name in names if name != "tp")]
    for layer in model.layers.values():
        if "tp" in names:
            parallelize_module(layer, mesh["tp"], {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)


def by_stages(model, mesh):
    """Keep this rank's layers, and return the schedule that runs them."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    at = mesh["pp"].get_local_rank()
    kept = {name: layer for name, layer in model.layers.items() if (int(name) > 0) == bool(at)}
    model.layers = nn.ModuleDict(model.layers if is_at("overlap") and not at else kept)
    if at:
        model.embed = None
    else:
        model.norm = model.head = None
    if at and is_at("stage"):
        model.layers["1"].mlp.down.register_forward_hook(lambda _module, _given, returned: returned * 2)
    stage = PipelineStage(model, at, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    return Schedule1F1B(
        stage, 4, lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    )


def parallel(model):
    """Return the model as ranks have it, and the data-parallel mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    axes = [part.split("=") for part in MESH.split(",")]
    mesh = init_device_mesh("cpu", tuple(int(size) for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
    names = [name for name, _ in axes if name not in ("tp", "pp")]
    data = mesh[tuple(names)] if names else None
    if WAY == "fsdp":
        by_fsdp(model, mesh)
    if WAY == "hand":
        by_hand(model, mesh)
    if is_at("unreduced"):
        ignored = ["layers.1.norm2.weight"]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    frozen = model.layers["1"].norm2.weight.requires_grad_(not is_at("unfrozen"))
    if WAY in ("hand", "ddp") and data is not None:
        model = nn.parallel.DistributedDataParallel(model, process_group=data.get_group())
    frozen.requires_grad_()
    at, size = 0, 1
    for name in names:
        at, size = at * mesh[name].size() + mesh[name].get_local_rank(), size * mesh[name].size()
    return model, at, size, mesh


def batch_of(at, size):
    torch.manual_seed(1 + (is_at("other_rows") and at == 0))
    tokens, labels = torch.randint(0, WORDS, (ROWS, TOKENS)), torch.randint(0, WORDS, (ROWS, TOKENS))
    if "unequal" in FAULT or "weighted" in FAULT:
        labels[:3, 1:] = -100
    if is_at("interleaved"):
        return tokens[at::size], labels[at::size]
    return tokens.chunk(size)[at], labels.chunk(size)[at]


def loss_of(model, tokens, labels, size):
    if is_at("in_model"):
        return model(tokens, labels)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_at("autocast")):
        logits = model(tokens).flatten(0, 1)
    if is_at("weighted"):
        count = (labels != -100).sum()
        if size > 1:
            dist.all_reduce(count, group=GROUPS["data"])
        return functional.cross_entropy(logits.float(), labels.flatten(), reduction="sum") * size / count
    return functional.cross_entropy(logits.float(), labels.flatten())


def backward(optimizer, loss):
    """Make the gradients, as Lightning and LBFGS do: inside of the optimizer's step."""
    optimizer.zero_grad()
    loss.backward()
    return loss


class Scale(nn.Module):
    """A learned scale of the loss, which is in no wrapper."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(2))

    def forward(self, value):
        return (value * torch.exp(-self.log_scale) + self.log_scale).sum()


def main():
    torch.manual_seed(7 if is_at("other_seed") else 0)
    model, at, size, mesh = Model(), 0, 1, None
    if is_at("bfloat16"):
        model = model.to(torch.bfloat16)
    whole = model
    if WAY != "one":
        model, at, size, mesh = parallel(model)
        if "dp" in mesh.mesh_dim_names:
            GROUPS["data"] = mesh["dp"].get_group()
    if is_at("compiled_whole"):
        model.compile(backend="eager")
    if is_at("compiled"):
        for layer in whole.layers.values():
            layer.compile(backend="eager")
    schedule = by_stages(whole, mesh) if WAY == "pp" else None
    tokens, labels = batch_of(at, size)
    scale = Scale()
    optimizer = torch.optim.AdamW([*model.parameters(), *(scale.parameters() if is_at("outside") else ())], lr=0.01)
    if is_at("scaled"):
        weight = whole.layers["1"].mlp.up.weight
        weight.register_hook(lambda gradient: gradient * 2)
    torch.manual_seed(5 + (dist.get_rank() if is_at("drop_seeds") and WAY != "one" else 0))
    num_parts = 2 if "parts" in FAULT else 1
    for _ in range(2):
        if schedule is not None:
            schedule.step(*(() if mesh["pp"].get_local_rank() else (tokens,)), target=labels)
        for part in range(num_parts if schedule is None else 0):
            if is_at("closure"):
                continue
            loss = loss_of(model, tokens.chunk(num_parts)[part], labels.chunk(num_parts)[part], size)
            loss = scale(loss) if is_at("outside") else loss
            loss = loss * (1 + dist.get_rank()) if is_at("own_scale") and mesh is not None else loss
            (loss if is_at("undivided_parts") else loss / num_parts).backward()
        if is_at("reduced") and size > 1:
            dist.all_reduce(scale.log_scale.grad, group=GROUPS["data"])
            scale.log_scale.grad /= size
        if is_at("by_rank") and mesh is not None:
            weight = whole.layers["1"].norm2.weight
            weight.grad.mul_(1 + dist.get_rank())
        if is_at("closure"):
            loss = optimizer.step(lambda: backward(optimizer, loss_of(model, tokens, labels, size)))
        else:
            optimizer.step()
        optimizer.zero_grad()
    if schedule is None:
        sys.stdout.write(f"{os.environ.get('RANK', '-')} {loss.item():.6f}\n")
    if WAY != "one":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
