"""Programs of `step_cases` whose loss has a backward of its own, or is of DTensors alone."""

from __future__ import annotations

from tests.live.lines.step_programs import SHARDED

OF_SHARDS = """
AXES = BATCH_AXES = ("dp",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 6)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def build():
    return Model()


def parallelize(model, mesh):
    distribute_module(model, mesh)


def batch():
    return torch.randn(8, 8), torch.randn(8, 6)


def loss(model, batch):
    x, wanted = batch
    weight = model.up.weight
    if isinstance(weight, DTensor):
        x, wanted = (DTensor.from_local(each, weight.device_mesh, [Shard(0)]) for each in batch)
    given = model(x)
    value = F.mse_loss(given, wanted, reduction="sum") / wanted.numel()
    return value.full_tensor() if isinstance(value, DTensor) else value
"""
"""A model and its loss on DTensors alone."""

BY_ROWS = (
    """
AXES = BATCH_AXES = ("fsdp",)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        return x * times

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.times, None

"""
    + SHARDED
    + """
def batch():
    return torch.randn(8, 8), torch.randn(8, 6)


def loss(model, batch):
    x, wanted = batch
    given = Times.apply(model(x), 1.0)
    return (given - wanted).square().mean()
"""
)
