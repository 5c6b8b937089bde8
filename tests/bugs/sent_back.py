"""What lines send back: means instead of sums, nothing, or a rank's own terms, far from the line that shows it."""

from __future__ import annotations

from tests.bugs.case import Bug

ENTERED = """
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class Layer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(1 + 0.2 * torch.randn(8))
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        h = functional.layer_norm(x, (8,)) * self.gain
        if self.group is None:
            return self.down(torch.tanh(self.up(h)))
        h = Enter.apply(h, self.group)
        return Sum.apply(self.down(torch.tanh(self.up(h))), self.group)


def build():
    return nn.Sequential(nn.Linear(8, 8), Layer())


def batch():
    return torch.randn(24, 8)


def parallelize(model, mesh):
    model[1].up.weight, model[1].down.weight = own(model[1].up.weight, mesh), own(model[1].down.weight, mesh, 1)
    model[1].group = mesh.get_group("tp")
"""

GATED = """
class Gated(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        if self.group is None:
            return self.down(self.gate(x).sigmoid() * self.up(x))
        x = Copy.apply(x, self.group)
        gate = self.gate(x).sigmoid()
        self.opened = gate.detach().mean()
        return Sum.apply(self.down(gate * self.up(x)), self.group)


def build():
    return nn.Sequential(nn.Linear(8, 8), Gated())


def batch():
    return torch.randn(24, 8)


def parallelize(model, mesh):
    for layer in (model[1].gate, model[1].up):
        layer.weight = own(layer.weight, mesh)
    model[1].down.weight = own(model[1].down.weight, mesh, 1)
    model[1].group = mesh.get_group("tp")
"""

SHIFTED = """
class Weighed(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.scores, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        if self.group is None:
            return self.down(self.scores(x).softmax(-1))
        scores = self.scores(Copy.apply(x, self.group))
        top = scores.detach().amax(-1, keepdim=True)
        distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=self.group)
        powers = (scores - top).exp()
        total = Copy.apply(Sum.apply(powers.sum(-1, keepdim=True), self.group), self.group)
        return Sum.apply(self.down(powers / total), self.group)


def build():
    return nn.Sequential(nn.Linear(8, 8), Weighed())


def batch():
    return torch.randn(24, 8)


def parallelize(model, mesh):
    model[1].scores.weight = own(model[1].scores.weight, mesh)
    model[1].down.weight = own(model[1].down.weight, mesh, 1)
    model[1].group = mesh.get_group("tp")
"""
"""A softmax over split features: the maximum that is subtracted needs no gradient, and the sum does."""

SHIFTED_BEHIND = SHIFTED.replace("scores.detach().amax(-1, keepdim=True)", "scores.amax(-1, keepdim=True).detach()")
"""The same, whose maximum is detached when it is taken."""

FUNCTIONAL = """
class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        shapes = {"first": (8, 6), "up": (6, 12), "down": (12, 6), "mix": (6, 6), "head": (6, 12)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 3))

    def forward(self, x):
        x = (x @ self.first).tanh()
        if self.group is None:
            x = (x @ self.up).tanh() @ self.down
            x = (x @ self.mix).tanh()
            return (x @ self.head).square().mean()
        x = Sum.apply((Copy.apply(x, self.group) @ self.up).tanh() @ self.down, self.group)
        x = Copy.apply((x @ self.mix).tanh(), self.group)
        return Sum.apply((x @ self.head).square().sum(), self.group) / 24 / 12


def build():
    return Model()


def batch():
    return torch.randn(24, 8)


def loss(model, x):
    return model(x)


def parallelize(model, mesh):
    model.up, model.head = own(model.up, mesh, 1), own(model.head, mesh, 1)
    model.down = own(model.down, mesh)
    model.group = mesh.get_group("tp")
"""
"""Weights that no module has: all of it are lines of one forward."""

CASES = (
    Bug(
        "a backward that averages the terms of the gradient of what a layer is given",
        "tp=2",
        ENTERED,
        (
            (
                "        distributed.all_reduce(grad, group=ctx.group)",
                "        distributed.all_reduce(grad, op=distributed.ReduceOp.AVG, group=ctx.group)",
            ),
        ),
        ("wrong-value", "wrong-scale"),
        ("The backward of Enter averages over tp", "ReduceOp.SUM", "1.gain|1 other|0.weight"),
        with_lines=True,
    ),
    Bug(
        "a gate that is detached where it is split",
        "tp=2",
        GATED,
        (("        self.opened = gate.detach().mean()", "        gate = gate.detach()"),),
        ("incomplete", "wrong-value"),
        ("detach in case.py:", "cuts the graph"),
        with_lines=True,
    ),
    Bug(
        "a sum of exponentials that is detached with their maximum",
        "tp=2",
        SHIFTED,
        (("(powers.sum(-1, keepdim=True), self.group)", "(powers.detach().sum(-1, keepdim=True), self.group)"),),
        ("wrong-value",),
        ("detach in case.py:", "cuts the graph"),
        with_lines=True,
    ),
    Bug(
        "a sum of exponentials whose gradient is summed once more, beside a detached maximum",
        "tp=2",
        SHIFTED_BEHIND,
        (
            (
                "Copy.apply(Sum.apply(powers.sum(-1, keepdim=True), self.group), self.group)",
                "Copy.apply(all_reduce(powers.sum(-1, keepdim=True), group=self.group), self.group)",
            ),
        ),
        ("wrong-value", "wrong-scale"),
        (),
        ("cuts the graph",),
        with_lines=True,
    ),
    Bug(
        "a sum of exponentials that is detached, beside a maximum that is",
        "tp=2",
        SHIFTED_BEHIND,
        (("(powers.sum(-1, keepdim=True), self.group)", "(powers.detach().sum(-1, keepdim=True), self.group)"),),
        ("wrong-value",),
        ("detach in case.py:", "cuts the graph"),
        with_lines=True,
    ),
    Bug(
        "a split head without a sum in backward, in a model without modules",
        "tp=2",
        FUNCTIONAL,
        (("Copy.apply((x @ self.mix).tanh(), self.group)", "(x @ self.mix).tanh()"),),
        ("unreduced-gradient",),
        ("sends back each rank's own part of a gradient", "over tp", "case.py:", "first", "so is the gradient of mix"),
        ("a different use adds",),
        with_lines=True,
    ),
)
