"""Key heads and norms of heads that several ranks share."""

from __future__ import annotations

from tests.bugs.case import Bug

KEY_HEADS = """
from torch.distributed.nn import functional as dist_nn
HEADS, KEYS, SIZE = 4, 2, 4


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(16, HEADS * SIZE, bias=False)
        self.wkv = nn.Linear(16, 2 * KEYS * SIZE, bias=False)
        self.wo = nn.Linear(HEADS * SIZE, 16)

    def forward(self, x):
        b, t, _ = x.shape
        given = x if self.group is None else Copy.apply(x, self.group)
        q = self.wq(given).view(b, t, -1, SIZE).transpose(1, 2)
        k, v = self.wkv(given).view(b, t, 2, -1, SIZE).permute(2, 0, 3, 1, 4)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        out = functional.linear(out, self.wo.weight)
        if self.group is not None:
            out = Sum.apply(out, self.group)
        return x + out + self.wo.bias


def build():
    return nn.Sequential(Attention(), nn.Linear(16, 16), Attention())


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.replicas = [distributed.new_group([0, 1]), distributed.new_group([2, 3])][rank // 2]
    for layer in (model[0], model[2]):
        layer.group = mesh.get_group("tp")
        layer.wq.weight = nn.Parameter(layer.wq.weight.detach().chunk(size)[rank].clone())
        layer.wo.weight = nn.Parameter(layer.wo.weight.detach().chunk(size, 1)[rank].clone())
        both = layer.wkv.weight.detach().view(2, KEYS, SIZE, 16)
        layer.wkv.weight = nn.Parameter(both[:, rank * KEYS // size].reshape(-1, 16).clone())


def batch():
    return torch.randn(2, 6, 16)


def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for layer in (model[0], model[2]):
        distributed.all_reduce(layer.wkv.weight.grad, group=model.replicas)
    return loss.detach()

"""

NORMED_HEADS = """
HEADS, SIZE = 4, 4


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 3 * HEADS * SIZE, bias=False)
        self.q_norm = nn.RMSNorm(SIZE)
        self.k_norm = nn.RMSNorm(SIZE)
        self.wo = nn.Linear(HEADS * SIZE, 16, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        given = x if self.group is None else Copy.apply(x, self.group)
        q, k, v = self.qkv(given).view(b, t, 3, -1, SIZE).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        out = self.wo(out.transpose(1, 2).reshape(b, t, -1))
        return x + (out if self.group is None else Sum.apply(out, self.group))


def build():
    model = nn.Sequential(Attention(), Attention())
    for layer in model:
        nn.init.normal_(layer.q_norm.weight)
        nn.init.normal_(layer.k_norm.weight)
    return model


def parallelize(model, mesh):
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    for layer in model:
        layer.group = mesh.get_group("tp")
        whole = layer.qkv.weight.detach().view(3, HEADS, SIZE, 16).chunk(size, 1)[rank]
        layer.qkv.weight = nn.Parameter(whole.reshape(-1, 16).clone())
        layer.wo.weight = nn.Parameter(layer.wo.weight.detach().chunk(size, 1)[rank].clone())


def batch():
    return torch.randn(2, 5, 16)


def step(model, x, mesh):
    loss = model(x).square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        if "_norm" in name:
            distributed.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    return loss.detach()

"""

SHARED_EXPERT = """
EXPERTS = 4


class Mixture(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(number): nn.Linear(8, 8, bias=False) for number in range(EXPERTS)})
        self.shared = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8))

    def forward(self, x):
        best, chosen = self.gate(x).sigmoid().max(-1)
        given = x
        if self.group is not None:
            given = Copy.apply(x, self.group)
            best = Copy.apply(best, self.group)
        routed = torch.zeros_like(x)
        for number, expert in self.experts.items():
            routed = routed + expert(given) * (best * (chosen == int(number)))[:, None]
        if self.group is not None:
            routed = Sum.apply(routed, self.group)
        return x + routed + self.shared(x)


def build():
    return nn.Sequential(nn.Linear(8, 8), Mixture(), nn.Linear(8, 4))


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank(), mesh.size()
    kept = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    model[1].experts = nn.ModuleDict({str(number): model[1].experts[str(number)] for number in kept})
    model[1].group = mesh.get_group()


def batch():
    return torch.randn(16, 8)

"""

EXCHANGED = """
BATCH_AXES = {"sp": 1}


def exchange(x, scatter, gather, group):
    size = distributed.get_world_size(group)
    sent = torch.stack([part.contiguous() for part in x.chunk(size, scatter)])
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), gather)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        ctx.how = gather, scatter, group
        return exchange(x, scatter, gather, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.how), None, None, None


class Attention(nn.Module):
    group, size = None, 1

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (8, 2))
        k, v = self.kv(x).unflatten(-1, (2, 2, 2)).unbind(2)
        if self.group is not None:
            k, v = (part.repeat_interleave(self.size // 2, 2) for part in (k, v))
            q, k, v = (Exchange.apply(part, 2, 1, self.group) for part in (q, k, v))
        k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = Exchange.apply(y.contiguous(), 1, 2, self.group)
        return self.out(y.flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.attention, self.head = nn.Linear(6, 16), Attention(), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.attention(self.into(x)))


def build():
    return Net()


def parallelize(model, mesh):
    model.attention.group, model.attention.size = mesh.get_group("sp"), mesh["sp"].size()

    def average(weight):
        distributed.all_reduce(weight.grad, group=mesh.get_group("sp"))
        weight.grad /= mesh["sp"].size()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(average)


def batch():
    return torch.randn(2, 8, 6)
"""
"""Each of four ranks gets a copy of one of two key heads, and all of the sequence."""

CASES = (
    Bug(
        "a shared expert that reads what backward sums over ranks",
        "ep=2",
        SHARED_EXPERT,
        (("self.shared(x)", "self.shared(given)"),),
        ("wrong-value",),
        ("whole gradient", "over ep", "counts 2 times", "case.py:"),
        never=("1.shared.0 is the first",),
        with_lines=True,
    ),
    Bug(
        "gradients of shared key heads averaged",
        "tp=4",
        KEY_HEADS,
        (
            (
                "distributed.all_reduce(layer.wkv.weight.grad, group",
                "distributed.all_reduce(layer.wkv.weight.grad, op=distributed.ReduceOp.AVG, group",
            ),
        ),
        ("wrong-scale",),
        ("wkv", "1/2", "SUM"),
        never=("not the size of a mesh axis",),
    ),
    Bug(
        "a bias of attention added on every rank",
        "tp=4",
        KEY_HEADS,
        (
            ("functional.linear(out, self.wo.weight)", "functional.linear(out, self.wo.weight, self.wo.bias)"),
            ("x + out + self.wo.bias", "x + out"),
        ),
        ("wrong-scale",),
        ("bias", "4 times|on every rank|each rank"),
    ),
    Bug(
        "the gradient of a norm of queries not summed over heads",
        "tp=2",
        NORMED_HEADS,
        (('if "_norm" in name', 'if "k_norm" in name'),),
        ("unreduced-gradient",),
        ("q_norm", "over tp", "SUM"),
    ),
    Bug(
        "the gradient of a norm of queries summed twice",
        "tp=2",
        NORMED_HEADS,
        (
            (
                "    return loss.detach()",
                (
                    "    for layer in model:\n"
                    "        distributed.all_reduce(layer.q_norm.weight.grad, group=mesh.get_group('tp'))\n"
                    "    return loss.detach()"
                ),
            ),
        ),
        ("wrong-scale",),
        ("q_norm", "twice|once more|already whole"),
    ),
    *(
        Bug(
            f"key heads {how} before they are exchanged",
            "sp=4",
            EXCHANGED,
            (("part.repeat_interleave(self.size // 2, 2)", code),),
            ("wrong-value",),
            ("orders slices", "The exchange itself is right"),
            ("arithmetic",),
            with_lines=True,
        )
        for how, code in (
            ("repeated one after the other", "part.repeat(1, 1, self.size // 2, 1)"),
            ("stacked one after the other", "torch.cat([part] * (self.size // 2), 2)"),
            ("chosen by the remainder of the rank", "part[:, :, [rank % 2 for rank in range(self.size)]]"),
        )
    ),
)
