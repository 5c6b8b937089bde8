"""Tensor parallel by hand: sums that are thrown away, and scales that are not cut as their weights are."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.public.case import Public

TRANSPOSED = '''
class Enter(torch.autograd.Function):
    """The same on all ranks, each of which uses its own part: backward sums."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class Net(nn.Module):
    """A norm, and a head over tokens first, batch second."""

    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        x = self.norm(x)
        if self.group is None:
            return self.down(torch.tanh(self.up(x.transpose(0, 1).contiguous())))
        x = Enter.apply(x, self.group).transpose(0, 1).contiguous()
        return Sum.apply(self.down(torch.tanh(self.up(x))), self.group)


def build():
    return Net()


def parallelize(model, mesh):
    model.up.weight = own(model.up.weight, mesh)
    model.down.weight = own(model.down.weight, mesh, 1)
    model.group = mesh.get_group("tp")


def batch():
    return torch.randn(6, 4, 8)

'''

QUANTIZED = '''
BLOCK, FEATURES, WIDE = 8, 16, 48


class Quantized(nn.Module):
    """Weights in float8, with a scale for each block of elements along one dim."""

    def __init__(self, rows, columns, dim):
        super().__init__()
        whole, self.dim, self.start = torch.randn(rows, columns), dim, 0
        largest = whole.unflatten(dim, (-1, BLOCK)).abs().amax(dim + 1, keepdim=True)
        values = (whole.unflatten(dim, (-1, BLOCK)) / largest * 448).flatten(dim, dim + 1)
        self.register_buffer("weight", values.to(torch.float8_e4m3fn))
        self.register_buffer("scale", largest.squeeze(dim + 1) / 448)

    def forward(self, x):
        scale = self.scale.repeat_interleave(BLOCK, self.dim)
        scale = scale.narrow(self.dim, self.start, self.weight.shape[self.dim])
        return functional.linear(x, self.weight.to(x.dtype) * scale.to(x.dtype))


class Net(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.up = Quantized(WIDE, FEATURES, 0)
        self.down = Quantized(FEATURES, WIDE, 1)

    def forward(self, x):
        x = self.embed(x)
        if self.group is None:
            return self.down(torch.tanh(self.up(x)))
        x = torch.tanh(self.up(Copy.apply(x, self.group)))
        return Sum.apply(self.down(x), self.group)


def build():
    return Net()


def parallelize(model, mesh):
    model.group = mesh.get_group("tp")
    for layer in (model.up, model.down):
        load(layer, mesh.get_local_rank("tp"), mesh["tp"].size())


def load(layer, rank, size):
    """Take this rank's weights, and the blocks of scales that they lie in."""
    dim = layer.dim
    length = layer.weight.shape[dim] // size
    layer.weight = layer.weight.narrow(dim, rank * length, length).clone()
    layer.scale, layer.start = scales_of(layer.scale, dim, rank * length, length)


def scales_of(scale, dim, start, length):
    """Return the blocks that some elements lie in, and where in the first of them these begin."""
    first, last = start // BLOCK, -(-(start + length) // BLOCK)
    return scale.narrow(dim, first, last - first).clone(), start % BLOCK


def batch():
    return torch.randn(10, FEATURES)

'''

SUMMED = "        grad = grad.contiguous()\n        distributed.all_reduce(grad, "

CASES = (
    Public(
        "SkyRL#1886",
        Bug(
            "the sum over a copy of what is not contiguous",
            "tp=2",
            TRANSPOSED,
            ((SUMMED, "        distributed.all_reduce(grad.contiguous(), "),),
            ("unreduced-gradient",),
            ("norm", "over tp", "sum|reduce"),
        ),
    ),
    Public(
        "vllm-omni#5761",
        Bug(
            "block scales not cut with their weight",
            "tp=2",
            QUANTIZED,
            (
                (
                    "scales_of(layer.scale, dim, rank * length,",
                    "scales_of(layer.scale, dim, 0 if dim else rank * length,",
                ),
            ),
            ("wrong-value", "duplicated", "missing", "identical-shards"),
            ("down", "scale"),
        ),
    ),
    Public(
        "vllm-omni#5761",
        Bug(
            "rows that begin inside a block, with scales from its start",
            "tp=4",
            QUANTIZED,
            ((".clone(), start % BLOCK", ".clone(), 0"),),
            ("wrong-value", "misordered"),
            ("up", "scale|block|offset"),
        ),
    ),
)
