"""A convolutional network of three layers under HSDP, with batch statistics over all ranks."""

from __future__ import annotations

from tests.bugs.places.fault import Fault, Program, spoiled

TEXT = '''
BATCH_AXES = ("replicate", "shard")


class Norm(nn.Module):
    """Batch normalization whose mean and variance are those of all ranks' images."""

    group = None

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(channels) + 0.5), nn.Parameter(torch.randn(channels))

    def forward(self, x):
        mean = self.averaged(x.mean((0, 2, 3)))
        variance = self.variance(x, mean)
        x = (x - self.shaped(mean)) * (self.shaped(variance) + 1e-5).rsqrt()
        return x * self.shaped(self.weight) + self.shaped(self.bias)

    def variance(self, x, mean):
        return self.averaged((x - self.shaped(mean)).square().mean((0, 2, 3)))

    def averaged(self, x):
        if self.group is None:
            return x
        return all_reduce(x, group=self.group) / distributed.get_world_size(self.group)

    def shaped(self, x):
        return x[None, :, None, None]


class Layer(nn.Module):
    def __init__(self, taken, given):
        super().__init__()
        self.conv = nn.Conv2d(taken, given, 3, padding=1, bias=False)
        self.norm = Norm(given)

    def forward(self, x):
        return torch.tanh(self.norm(self.conv(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(3, 4), Layer(4, 6), Layer(6, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


def build():
    return Network()


def batch():
    return torch.randn(8, 3, 6, 6)


def parallelize(model, mesh):
    for layer in model.layers:
        layer.norm.group = distributed.group.WORLD
    spoil(model.layers[1], mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def spoil(layer, mesh):
    """Leave everything as it is."""

'''

CONVOLUTION = Program("convolution, HSDP", "replicate=2,shard=2", TEXT)


FAULTS = (
    Fault(
        "batch statistics of each rank's own images",
        CONVOLUTION,
        spoiled("layer.norm.group = None"),
        ("layers.1.norm",),
        ("own",),
    ),
    Fault(
        "batch statistics over one axis of two",
        CONVOLUTION,
        spoiled("layer.norm.group = mesh.get_group('shard')"),
        ("layers.1.norm",),
        ("own|replicate",),
    ),
    Fault(
        "a variance around each rank's own mean",
        CONVOLUTION,
        spoiled("layer.norm.variance = lambda x, mean: layer.norm.averaged(x.var((0, 2, 3), correction=0))"),
        ("layers.1.norm",),
        ("norm",),
    ),
    Fault(
        "batch statistics that nothing flows back through",
        CONVOLUTION,
        spoiled("averaged = layer.norm.averaged; layer.norm.averaged = lambda x: averaged(x.detach())"),
        ("layers.1.norm",),
        ("backward",),
    ),
    Fault(
        "a channel lost on one rank",
        CONVOLUTION,
        spoiled(
            "layer.conv.register_forward_hook(lambda module, inputs, output: "
            "output * (torch.arange(6)[:, None, None] != distributed.get_rank()))"
        ),
        ("layers.1.conv",),
        ("rank",),
    ),
    Fault(
        "gradients of a layer divided once more",
        CONVOLUTION,
        (
            (
                "    fully_shard(model, mesh=mesh)\n",
                "    fully_shard(model, mesh=mesh)\n    model.layers[1].set_gradient_divide_factor(16.0)\n",
            ),
        ),
        ("layers.1.conv", "layers.1.norm"),
        ("1/4",),
    ),
)
