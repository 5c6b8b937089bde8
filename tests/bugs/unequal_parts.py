"""Parts of a dim that the axis does not divide, and lines that take them for equal."""

from __future__ import annotations

from tests.bugs.case import Bug

VOCABULARY = """
WORDS = 10
class Embedding(nn.Module):
    mesh = None
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, 8))
    def forward(self, ids):
        first = 0
        if self.mesh is not None:
            first = self.mesh.get_local_rank() * -(-WORDS // self.mesh.size())
        local = ids - first
        is_other = (local < 0) | (local >= self.weight.shape[0])
        out = self.weight[local.masked_fill(is_other, 0)].masked_fill(is_other[..., None], 0)
        return out if self.mesh is None else Sum.apply(out, self.mesh.get_group())
def build(): return nn.Sequential(Embedding(), nn.Linear(8, 8))
def parallelize(model, mesh):
    model[0].mesh = mesh
    weight = model[0].weight
    weight.data = weight.data.chunk(mesh.size())[mesh.get_local_rank()].clone()
def batch(): return torch.arange(20).remainder(WORDS).view(4, 5)
"""

TABLE = """
class Model(nn.Module):
    mesh = None
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 40), nn.Linear(40, 8, bias=False)
        self.register_buffer("scale", torch.rand(40) + 0.5)
    def forward(self, x):
        h = torch.tanh(self.up(Copy.apply(x, self.mesh.get_group()) if self.mesh is not None else x))
        scale = self.scale
        if self.mesh is not None:
            begin = self.mesh.get_local_rank() * 14
            scale = scale[begin : begin + h.shape[-1]]
        out = self.down(h * scale)
        return out if self.mesh is None else Sum.apply(out, self.mesh.get_group())
def build(): return Model()
def parallelize(model, mesh):
    model.mesh = mesh
    for weight, dim in ((model.up.weight, 0), (model.up.bias, 0), (model.down.weight, 1)):
        weight.data = weight.data.split(14, dim)[mesh.get_local_rank()].clone()
def batch(): return torch.randn(4, 8)
"""

CASES = (
    Bug(
        "a vocabulary's part begins at the rank times its own length, and the last is shorter",
        "tp=3",
        VOCABULARY,
        (("* -(-WORDS // self.mesh.size())", "* self.weight.shape[0]"),),
        ("wrong-value",),
        ("the length of its own part", "parts are 4, 4, 2", "rank 2 at 4, 2 times"),
        with_lines=True,
    ),
    Bug(
        "a vocabulary's part begins at the rank times the words divided by ranks, without a remainder",
        "tp=3",
        VOCABULARY,
        (("* -(-WORDS // self.mesh.size())", "* (WORDS // self.mesh.size())"),),
        ("wrong-value",),
        ("(10 // 3)", "parts are 4, 4, 2", "rank 1 at 3"),
        with_lines=True,
    ),
    Bug(
        "a table is cut at the rank times the length of the rank's features, and the last part is shorter",
        "tp=3",
        TABLE,
        (("* 14\n", "* h.shape[-1]\n"),),
        ("wrong-value",),
        ("the length of its own part", "parts are 14, 14, 12", "rank 2 at 24"),
        never=("undo x[order]",),
        with_lines=True,
    ),
    Bug(
        "a vocabulary's words that others have read the rank's first row, and parts are unequal",
        "tp=3",
        VOCABULARY,
        ((".masked_fill(is_other[..., None], 0)", ""),),
        ("wrong-value",),
        ("moved into the rank's part|sums what comes of them",),
        never=("times the length of its own part", "(10 // 3)"),
        with_lines=True,
    ),
)
