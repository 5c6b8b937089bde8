"""Programs with a fault in their loss, their training step or their optimizer, the line to be named, and right twins.

The lines were written down before the judge was run for the first time. A case without a line must not name any.
"""

from __future__ import annotations

from tests.live.lines.cases import Case
from tests.live.lines.loss_programs import BY_ROWS, OF_SHARDS
from tests.live.lines.step_programs import (
    BUCKETS,
    BY_HAND,
    CENTERED,
    CLIPPED,
    DISTILLED,
    MASKED,
    MICRO,
    SCALED,
    TOWERS,
    TRUSTED,
    TWO_AXES,
    VOCABULARY,
)

HEAD = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.narrow(0, dist.get_rank(ctx.group) * ctx.rows, ctx.rows), None

"""


def _case(name: str, program: str, right: str, wrong: str, line: str, mesh: str = "2") -> Case:
    return Case(name, program, ((right, wrong),), line, mesh, head=HEAD)


STEP_CASES = (
    _case(
        "loss: own count",
        MASKED,
        '    dist.all_reduce(count, group=mesh.get_group("fsdp"))\n'
        "    value = errors(model, batch).sum() / count\n"
        '    value = value * mesh["fsdp"].size()\n',
        "    value = errors(model, batch).sum() / count\n",
        "value = errors(model, batch).sum() / count",
    ),
    _case(
        "loss: own exponentials",
        VOCABULARY,
        "    normal = Sum.apply(logits.exp().sum(-1), group).log()\n",
        "    normal = logits.exp().sum(-1).log()\n",
        "normal = logits.exp().sum(-1).log()",
    ),
    _case(
        "loss: words not shifted",
        VOCABULARY,
        '    start = mesh.get_local_rank("tp") * size\n',
        "    start = 0\n",
        "is_here = (words >= start) & (words < start + size)",
    ),
    _case(
        "loss: own width",
        DISTILLED,
        'width * mesh["tp"].size())',
        "width)",
        "return energy.mean() / width",
    ),
    _case(
        "loss: labels from zero",
        TOWERS,
        "torch.arange(len(left)) + dist.get_rank(group) * len(left)",
        "torch.arange(len(left))",
        "labels = torch.arange(len(left))",
    ),
    _case(
        "loss: gathered without gradient",
        TOWERS,
        "    everyone = Gather.apply(right, group)\n",
        "    parts = [torch.empty_like(right) for _ in range(dist.get_world_size(group))]\n"
        "    dist.all_gather(parts, right.detach().contiguous(), group=group)\n"
        "    parts[dist.get_rank(group)] = right\n"
        "    everyone = torch.cat(parts)\n",
        "dist.all_gather(parts, right.detach().contiguous(), group=group)",
    ),
    _case(
        "loss: torch's mean over shards",
        OF_SHARDS,
        'F.mse_loss(given, wanted, reduction="sum") / wanted.numel()',
        "F.mse_loss(given, wanted)",
        "value = F.mse_loss(given, wanted)",
    ),
    _case(
        "loss: a backward by its own rows",
        BY_ROWS,
        "gradient * ctx.times",
        "gradient * ctx.times * len(gradient) / 8",
        "given = Times.apply(model(x), 1.0)",
    ),
    _case(
        "step: no average",
        BY_HAND,
        "        p.grad /= dist.get_world_size(group)\n",
        "",
        "dist.all_reduce(p.grad, group=group)",
    ),
    _case(
        "step: another scale",
        BY_HAND,
        "        p.grad.div_(SCALE)\n",
        "        p.grad.div_(SCALE / 2)\n",
        "p.grad.div_(SCALE / 2)",
    ),
    _case(
        "step: averaged twice",
        MICRO,
        "        p.grad.to_local().mul_(1.0)\n",
        '        p.grad.to_local().div_(mesh["fsdp"].size())\n',
        'p.grad.to_local().div_(mesh["fsdp"].size())',
    ),
    _case(
        "step: micro-batches not averaged",
        MICRO,
        "        value = loss(model, (x, target)) / MICRO\n"
        "        value.backward()\n"
        "        total = total + value.detach()\n",
        "        value = loss(model, (x, target))\n"
        "        value.backward()\n"
        "        total = total + value.detach() / MICRO\n",
        "value.backward()",
    ),
    _case(
        "step: never scaled down",
        BY_HAND,
        "    unscale(model)\n",
        "",
        "(value * SCALE).backward()",
    ),
    _case(
        "step: last bucket left",
        BUCKETS,
        "    if waiting:\n        reduce(waiting, pairs)\n",
        "",
        "dist.all_reduce(flat, group=group)",
    ),
    _case(
        "step: bucket not copied back",
        BUCKETS,
        "    flat = torch._utils._flatten_dense_tensors(grads)\n"
        "    dist.all_reduce(flat, group=group)\n"
        "    for grad, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):\n"
        "        grad.copy_(",
        "    flat = torch.cat([grad.flatten() for grad in grads])\n"
        "    dist.all_reduce(flat, group=group)\n"
        "    for grad, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):\n"
        "        grad.clone().copy_(",
        "grad.clone().copy_(part / dist.get_world_size(group))",
    ),
    _case(
        "step: one axis of two",
        TWO_AXES,
        "        for axis in AXES:\n            dist.all_reduce(p.grad, group=mesh.get_group(axis))\n",
        '        dist.all_reduce(p.grad, group=mesh.get_group("dp"))\n',
        'dist.all_reduce(p.grad, group=mesh.get_group("dp"))',
        mesh="2,2",
    ),
    _case(
        "model: a weight's part without placements",
        SCALED,
        "self.scale.to_local(grad_placements=[Partial()])",
        "self.scale.to_local()",
        "x = x * self.scale.to_local()",
    ),
    _case(
        "optimizer: norm of shards",
        CLIPPED,
        "        if isinstance(p.grad, DTensor):\n"
        "            dist.all_reduce(total, group=p.device_mesh.get_group())\n",
        "",
        "norm = total.sqrt()",
    ),
    _case(
        "optimizer: trust by shard",
        TRUSTED,
        "norm_of(weight, mesh) / norm_of(grad, mesh)",
        "norm_of(weight, None) / norm_of(grad, None)",
        "return square.sqrt()",
    ),
    _case(
        "optimizer: center of shard",
        CENTERED,
        "                if mesh is not None:\n                    dist.all_reduce(center, group=mesh.get_group())\n",
        "",
        "update = (grad - center).tanh()",
    ),
)
"""A fault in each part of a training step."""
