"""Convolutions of images that are split into stripes: halos are exchanged, norms are of whole images."""

from __future__ import annotations

from tests.bugs.places.fault import Fault, Program, spoiled

TEXT = '''
BATCH_AXES = {"dp": 0, "sp": 2}


class Stripes(torch.autograd.Function):
    """All ranks' stripes; backward sums, and each rank takes its own."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(distributed.get_world_size(ctx.group), 2)[place_in(ctx.group)], None


def place_in(group):
    return distributed.get_group_rank(group, distributed.get_rank())


class Conv(nn.Module):
    group = None

    def __init__(self, taken, given):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(given, taken, 3, 3) / 3)

    def forward(self, x):
        return functional.conv2d(self.padded(x), self.weight, padding=(0, 1))

    def padded(self, x):
        if self.group is None:
            return functional.pad(x, (0, 0, 1, 1))
        whole = functional.pad(self.gathered(x), (0, 0, 1, 1))
        first = self.first(x)
        return whole[:, :, first : first + x.shape[2] + 2]

    def gathered(self, x):
        return Stripes.apply(x, self.group)

    def first(self, x):
        return place_in(self.group) * x.shape[2]


class Norm(nn.Module):
    """Each image's own mean and variance, over all its stripes."""

    group = None

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels) + 0.5)

    def forward(self, x):
        mean = self.averaged(x.mean((1, 2, 3), keepdim=True))
        variance = self.averaged((x - mean).square().mean((1, 2, 3), keepdim=True))
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight[None, :, None, None]

    def averaged(self, x):
        if self.group is None:
            return x
        return all_reduce(x, group=self.group) / distributed.get_world_size(self.group)


class Layer(nn.Module):
    def __init__(self, taken, given):
        super().__init__()
        self.conv, self.norm = Conv(taken, given), Norm(given)

    def forward(self, x):
        return functional.gelu(self.norm(self.conv(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(3, 4), Layer(4, 6), Layer(6, 4))
        self.head = nn.Conv2d(4, 5, 1)

    def forward(self, x):
        return self.head(self.layers(x))


def build():
    return Network()


def batch():
    return torch.randn(4, 3, 8, 6)


def parallelize(model, mesh):
    for layer in model.layers:
        layer.conv.group = layer.norm.group = mesh.get_group("sp")
    spoil(model.layers[1], mesh)


def spoil(layer, mesh):
    """Leave everything as it is."""


def step(model, images, mesh):
    loss = model(images).square().mean()
    loss.backward()
    for parameter in [one for one in model.parameters() if one.grad is not None]:
        distributed.all_reduce(parameter.grad)
        parameter.grad /= mesh.size()
    return loss.detach()

'''

HALO = Program("convolution, stripes + DP", "dp=2,sp=2", TEXT)
ALONE = """def gathered(x):
        parts = [torch.empty_like(x) for _ in range(2)]
        distributed.all_gather(parts, x.detach().contiguous(), group=layer.conv.group)
        parts[place_in(layer.conv.group)] = x
        return torch.cat(parts, 2)
    layer.conv.gathered = gathered"""


FAULTS = (
    Fault(
        "a halo of zeros",
        HALO,
        spoiled("layer.conv.padded = lambda x: functional.pad(x, (0, 0, 1, 1))"),
        ("layers.1.conv",),
        ("sp", "halo"),
    ),
    Fault(
        "a halo that begins a row too late",
        HALO,
        spoiled("layer.conv.first = lambda x: place_in(layer.conv.group) * (x.shape[2] - 1)"),
        ("layers.1.conv",),
        ("sp",),
    ),
    Fault(
        "a halo that nothing flows back through",
        HALO,
        spoiled(ALONE),
        ("layers.1.conv",),
        ("backward",),
    ),
    Fault(
        "statistics of a rank's own stripe",
        HALO,
        spoiled("layer.norm.averaged = lambda x: x"),
        ("layers.1.norm",),
        ("own", "sp"),
    ),
)
