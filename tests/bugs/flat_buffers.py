"""Gradients that a step joins in one buffer, with parts of split weights between copies."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.models import TENSOR_PARALLEL

BUFFER = (
    TENSOR_PARALLEL
    + """
BATCH_AXES = ("dp",)


def loss(model, rows):
    return model(rows).square().mean()


def step(model, rows, mesh):
    value = loss(model, rows)
    value.backward()
    gradients = [weight.grad for weight in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat, group=mesh.get_group("dp"))
    flat /= mesh["dp"].size()
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(mean.view_as(gradient))
    return value.detach()

"""
)

FILLED = (
    TENSOR_PARALLEL
    + """
BATCH_AXES = ("dp",)


def mean_over(buffer, mesh, axis):
    buffer = buffer / mesh[axis].size()
    distributed.all_reduce(buffer, group=mesh.get_group(axis))
    return buffer


def loss(model, rows):
    return model(rows).square().mean()


def step(model, rows, mesh):
    value = loss(model, rows)
    value.backward()
    buffer = torch.cat([weight.grad.contiguous().view(-1) for weight in model.parameters()])
    means = mean_over(buffer, mesh, "dp")
    begin = 0
    for weight in model.parameters():
        end = begin + weight.numel()
        weight.grad = means[begin:end].reshape(weight.shape)
        begin = end
    return value.detach()

"""
)

NO_SHAPES = ("flatten in", "cat in", "view in", "flatten gets", "cat gets", "view gets", "reordered", "rearranged")

CASES = (
    Bug(
        "a buffer of gradients reduced over all ranks",
        "dp=2,tp=2",
        BUFFER,
        (
            (
                'all_reduce(flat, group=mesh.get_group("dp"))\n    flat /= mesh["dp"].size()',
                "all_reduce(flat)\n    flat /= distributed.get_world_size()",
            ),
        ),
        ("wrong-value",),
        ("distributed.all_reduce(flat)` is the first wrong line", "mixes the shards", "leave tp out"),
        never=NO_SHAPES,
        with_lines=True,
    ),
    Bug(
        "a buffer of gradients reduced over tp instead of dp",
        "dp=2,tp=2",
        FILLED,
        (('means = mean_over(buffer, mesh, "dp")', 'means = mean_over(buffer, mesh, "tp")'),),
        ("wrong-value", "unreduced-gradient", "unreplicated"),
        ("tp", "dp"),
        never=NO_SHAPES,
        with_lines=True,
    ),
    Bug(
        "a buffer of gradients that is divided by all ranks",
        "dp=2,tp=2",
        BUFFER,
        (('flat /= mesh["dp"].size()', "flat /= distributed.get_world_size()"),),
        ("wrong-scale", "wrong-value"),
        ("1/2|0.5 times",),
        never=NO_SHAPES,
        with_lines=True,
    ),
)
