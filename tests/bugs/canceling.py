"""Steps whose terms nearly cancel: what is left of them is rounding, which another order of the sums changes."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

NORM = """
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
    def forward(self, x): return self.norm(x + self.down(self.up(x).relu()))
def build(): return Normed()
def parallelize(model, mesh):
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
def batch(): return torch.randn(8, 16)
def optimizer(model, mesh): return torch.optim.Adam(model.parameters(), lr=1e-3)
"""

ATTENTION = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.value.requires_grad_(False)
        self.out.requires_grad_(False)
    def forward(self, x):
        parts = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.out(functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
def build(): return Attention()
def parallelize(model, mesh):
    plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
    parallelize_module(model, mesh, {**plan, "out": RowwiseParallel()})
def batch(): return torch.randn(2, 1, 16).expand(2, 6, 16) + 1e-9 * torch.randn(2, 6, 16)
def loss(model, x): return model(x).square().mean()
"""

AVERAGED = """
BATCH_AXES = ("dp",)
def build():
    norm = nn.LayerNorm(6, elementwise_affine=False)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6), norm)
def parallelize(model, mesh):
    def averaged(parameter):
        distributed.all_reduce(parameter.grad, group=mesh.get_group())
        parameter.grad /= mesh.size()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(averaged)
def batch(): return torch.randn(16, 8)
def loss(model, x): return model(x).square().mean()
"""

ZERO = NORM + "def loss(model, x): return model(x).mean()\n"

CASES = [
    Healthy("a loss that a norm makes zero", "tp=2", ZERO),
    Healthy("a loss that a norm makes constant", "tp=2", ZERO.replace("model(x).mean", "model(x).square().mean")),
    Healthy("attention between words that are nearly equal", "tp=2", ATTENTION),
    Bug(
        "gradients that nearly cancel are summed and not averaged",
        "dp=2",
        AVERAGED,
        (("        parameter.grad /= mesh.size()\n", ""),),
        ("wrong-scale",),
        ("2 times",),
    ),
]
