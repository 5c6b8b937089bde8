"""Operations of DTensor whose result has a label that does not fit it.

The labels are put on by hand: torch 2.13 redistributes before the view, and raises after the convolution's backward.
"""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.public.case import Public

VIEWED = '''
class Net(nn.Module):
    """Regroup features in sixes, whatever row they come from, and project them."""

    mesh = None

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 5)

    def forward(self, x):
        if self.mesh is None:
            return self.proj(x.view(-1, 6))
        return self.proj(regrouped(distribute_tensor(x, self.mesh, (Shard(1),)))).full_tensor()


def regrouped(x):
    return x.redistribute(placements=(Replicate(),)).view(-1, 6)


def build():
    return Net()


def parallelize(model, mesh):
    model.mesh = mesh["tp"]
    for name, parameter in list(model.proj.named_parameters()):
        whole = distribute_tensor(parameter.detach(), mesh["tp"], (Replicate(),))
        setattr(model.proj, name, nn.Parameter(whole))


def batch():
    return torch.randn(12, 8)

'''

CONVOLVED = '''
BATCH_AXES = {"cp": 3}


class Net(nn.Module):
    """Scale the colors of images, and convolve patches of them; each rank has a part of the width."""

    mesh = None

    def __init__(self):
        super().__init__()
        self.colors = nn.Linear(3, 3)
        self.conv = nn.Conv2d(3, 4, 2, stride=2)

    def forward(self, x):
        x = self.colors(x.movedim(1, -1)).movedim(-1, 1)
        return self.conv(x if self.mesh is None else Labelled.apply(x, self.mesh))


class Labelled(torch.autograd.Function):
    """The input of a convolution; what backward gets for it is given a label, and redistributed by that."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        local, placement = labelled(grad.contiguous(), ctx.mesh.size())
        grad = DTensor.from_local(local, ctx.mesh, (placement,))
        return grad.redistribute(placements=(Shard(3),)).to_local().contiguous(), None


def labelled(grad, size):
    return grad, Shard(3)


def build():
    return Net()


def parallelize(model, mesh):
    model.mesh = mesh["cp"]


def batch():
    return torch.randn(2, 3, 4, 8)


def step(model, images, mesh):
    loss = model(images).square().mean()
    loss.backward()
    loss = loss.detach().clone()
    for number in (loss, *(parameter.grad for parameter in model.parameters())):
        distributed.all_reduce(number, group=mesh.get_group("cp"))
        number /= mesh["cp"].size()
    return loss


def whole_output(part, mesh):
    parts = [torch.empty_like(part) for _ in range(mesh["cp"].size())]
    distributed.all_gather(parts, part.contiguous(), group=mesh.get_group("cp"))
    return torch.cat(parts, 3)

'''

LABELLED = """
SIZES = (3, 3, 3, 1)


def build():
    return nn.Linear(6, sum(SIZES), bias=False)


def parallelize(model, mesh):
    whole = model.weight.detach()
    local = whole.split(SIZES)[mesh.get_local_rank("tp")].clone()
    shape = {"shape": whole.shape, "stride": whole.stride()}
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], (Shard(0),), run_check=True, **shape))

"""

CASES = (
    Public(
        "pytorch#179502",
        Bug(
            "a view of columns labelled as rows",
            "tp=4",
            VIEWED,
            (
                (
                    "x.redistribute(placements=(Replicate(),)).view(-1, 6)",
                    "DTensor.from_local(x.to_local().reshape(-1, 6), x.device_mesh, (Shard(0),))",
                ),
            ),
            ("misordered", "wrong-value"),
            ("proj", "view|reshape|in a different order|order of the rows"),
        ),
        score="misnamed",
        known_gap="full_tensor() is blamed for a label of from_local's; the order of the rows is not named",
    ),
    Public(
        "pytorch#191926",
        Bug(
            "a convolution's gradient labelled as split over the batch",
            "cp=2",
            CONVOLVED,
            (("    return grad, Shard(3)\n", "    return grad.reshape(-1, *grad.shape[1:3], 8), Shard(0)\n"),),
            ("misordered", "wrong-value"),
            ("colors|conv", "backward", "order|gradient"),
        ),
    ),
    Public(
        "pytorch#144109",
        Bug(
            "shards of other sizes than chunks have",
            "tp=4",
            LABELLED,
            (("SIZES = (3, 3, 3, 1)", "SIZES = (1, 3, 3, 3)"),),
            ("wrong-shape", "misordered"),
            ("weight", "chunk|uneven|even"),
        ),
    ),
)
