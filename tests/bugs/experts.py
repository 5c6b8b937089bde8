"""Experts and their routers: numbered otherwise than tokens are sent, reduced over ranks that do not have them."""

from __future__ import annotations

from tests.bugs.case import Bug, Healthy

EXPERTS = '''
EXPERTS = 8
BATCH_AXES = ("ep",)


class Mixture(nn.Module):
    """A router, and experts as one stack: tokens travel to the rank that has theirs, and back."""

    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, 6, 6))

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        if self.group is None:
            return self.apply_to(x, chosen) * gate[:, None]
        size = distributed.get_world_size(self.group)
        owner = self.owner_of(chosen, size)
        order = owner.argsort(stable=True)
        sent = owner.bincount(minlength=size)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        to, of = sent.tolist(), received.tolist()
        numbers = chosen.new_empty(sum(of))
        distributed.all_to_all_single(numbers, chosen[order], of, to, group=self.group)
        arrived = Exchange.apply(x[order], to, of, self.group)
        done = self.apply_to(arrived, self.local(numbers, size))
        back = Exchange.apply(done, of, to, self.group)
        return self.put_back(back * gate[order, None], order)

    def put_back(self, tokens, order):
        return tokens[order.argsort()]

    def owner_of(self, numbers, size):
        return numbers // (EXPERTS // size)

    def local(self, numbers, size):
        return numbers % (EXPERTS // size)

    def apply_to(self, x, numbers):
        return torch.bmm(x[:, None], self.weight[numbers])[:, 0]


def build():
    return Mixture()


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank("ep"), mesh["ep"].size()
    whole = model.weight.detach()
    own = whole.chunk(size)[rank]
    model.weight = nn.Parameter(own.clone())
    model.group = mesh.get_group("ep")


def batch():
    return torch.randn(60, 6)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    finish(model, mesh)
    return loss.detach()


def finish(model, mesh):
    """Each rank's loss is the mean over its own rows: divide, and sum what copies have."""
    model.weight.grad /= mesh["ep"].size()
    distributed.all_reduce(model.router.weight.grad, group=mesh.get_group("ep"))
    model.router.weight.grad /= mesh["ep"].size()

'''

WITH_DATA = (
    EXPERTS.replace('("ep",)', '("dp", "ep")')
    + '''
def finish(model, mesh):
    """Experts have copies along dp, the router on every rank."""
    distributed.all_reduce(model.weight.grad, group=mesh.get_group("dp"))
    model.weight.grad /= mesh.size()
    distributed.all_reduce(model.router.weight.grad)
    model.router.weight.grad /= mesh.size()

'''
)

OWN = '''
EXPERTS = 4
BATCH_AXES = ("ep",)


class Mixture(nn.Module):
    """A gate, and experts of which each rank has some: each takes all ranks' rows."""

    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, EXPERTS)
        self.experts = nn.ModuleDict({str(number): nn.Linear(6, 6) for number in range(EXPERTS)})

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        size = 1 if self.group is None else distributed.get_world_size(self.group)
        rows, weights = (self.exchanged(part.repeat(size, 1)) for part in (x, weights))
        out = sum(weights[:, int(name), None] * expert(rows).tanh() for name, expert in self.experts.items())
        return x + self.exchanged(out).unflatten(0, (size, -1)).sum(0)

    def exchanged(self, x):
        if self.group is None:
            return x
        size = distributed.get_world_size(self.group)
        lengths = [len(x) // size] * size
        return Exchange.apply(x, lengths, lengths, self.group)


def build():
    return nn.Sequential(nn.Linear(6, 6), Mixture(), nn.Linear(6, 1))


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank("ep"), mesh["ep"].size()
    own = torch.arange(EXPERTS).chunk(size)[rank].tolist()
    model[1].experts = nn.ModuleDict({str(number): model[1].experts[str(number)] for number in own})
    model[1].group = mesh.get_group("ep")


def batch():
    return torch.randn(8, 6)


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    finish(model, mesh)
    return loss.detach()


def finish(model, mesh):
    """Each rank's loss is the mean over its own rows."""
    for name, parameter in model.named_parameters():
        parameter.grad /= mesh.size()
        if ".experts." not in name:
            distributed.all_reduce(parameter.grad)

'''

OWN_WITH_DATA = OWN.replace('("ep",)', '("dp", "ep")').replace(
    "            distributed.all_reduce(parameter.grad)\n",
    "            distributed.all_reduce(parameter.grad)\n"
    "        else:\n"
    '            distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))\n',
)
NOT_OF_EXPERTS = (
    '        parameter.grad /= mesh.size()\n        if ".experts." not in name:\n',
    '        if ".experts." not in name:\n            parameter.grad /= mesh.size()\n',
)

TABLES = '''
TABLES = 4
BATCH_AXES = ("mp",)


class Features(nn.Module):
    """Tables of features, of which each rank looks up some for all rows."""

    group = None

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({str(number): nn.Embedding(5, 3) for number in range(TABLES)})
        self.top = nn.Linear(3 * TABLES, 1)

    def forward(self, numbers):
        if self.group is None:
            return self.top(self.look_up(numbers))
        rank, size = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        rows = [torch.empty_like(numbers) for _ in range(size)]
        distributed.all_gather(rows, numbers.contiguous(), group=self.group)
        parts = distributed.nn.functional.all_gather(self.look_up(torch.cat(rows)), group=self.group)
        return self.top(torch.cat([part.chunk(size)[rank] for part in parts], -1))

    def look_up(self, numbers):
        return torch.cat([table(numbers[:, int(name)]) for name, table in self.tables.items()], -1)


def build():
    return Features()


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank("mp"), mesh["mp"].size()
    own = torch.arange(TABLES).chunk(size)[rank].tolist()
    model.tables = nn.ModuleDict({str(number): model.tables[str(number)] for number in own})
    model.group = mesh.get_group("mp")
    for parameter in model.top.parameters():
        parameter.register_hook(lambda gradient: averaged(gradient, mesh))
    for parameter in model.tables.parameters():
        parameter.register_hook(lambda gradient: gradient / size)


def averaged(gradient, mesh):
    gradient = gradient / mesh.size()
    distributed.all_reduce(gradient)
    return gradient


def batch():
    return torch.randint(5, (8, TABLES)), torch.randn(8, 1)


def loss(model, batch):
    numbers, wanted = batch
    return functional.mse_loss(model(numbers), wanted)

'''

LABELLED = """
EXPERTS = 8


def build():
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(EXPERTS, 4, 4))
    return model


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank("ep"), mesh["ep"].size()
    whole = model.weight.detach()
    local = whole.chunk(size)[rank].clone()
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["ep"], (Shard(0),)))

"""

LIST = """
EXPERTS = 8


def build():
    return nn.ModuleDict({"experts": nn.ModuleDict({str(number): nn.Linear(4, 4) for number in range(EXPERTS)})})


def parallelize(model, mesh):
    rank, size = mesh.get_local_rank("ep"), mesh["ep"].size()
    own = torch.arange(EXPERTS).chunk(size)[rank].tolist()
    model["experts"] = nn.ModuleDict({name_of(number, own): model["experts"][str(number)] for number in own})


def name_of(number, own):
    return str(number)


def initialize(model, mesh):
    torch.manual_seed(5 + mesh.get_local_rank("ep"))
    for name, parameter in sorted(model.named_parameters()):
        nn.init.normal_(parameter.detach())

"""
CHUNK = "whole.chunk(size)[rank]"

CASES = (
    Bug(
        "experts counted from 0 on every rank",
        "ep=4",
        LIST,
        (("    return str(number)\n", "    return str(number - own[0])\n"),),
        ("name-collision",),
        ("experts.", "number"),
    ),
    Bug(
        "experts dealt out in turn under the label of chunks",
        "ep=4",
        LABELLED,
        ((f"{CHUNK}.clone()", "whole[rank::size].clone()"),),
        ("misordered",),
        ("in turn",),
    ),
    Bug(
        "experts of the ranks in falling order",
        "ep=4",
        LABELLED,
        ((CHUNK, "whole.chunk(size)[-1 - rank]"),),
        ("misordered",),
        ("other end|falling",),
    ),
    Bug(
        "experts stacked in order of their names",
        "ep=4",
        LABELLED.replace("EXPERTS = 8", "EXPERTS = 12"),
        (("whole = model.weight.detach()", "whole = model.weight.detach()[sorted(range(EXPERTS), key=str)]"),),
        ("misordered",),
        ("name|sorted|text", "order"),
    ),
    Bug(
        "matrices of experts transposed on load",
        "ep=2",
        LABELLED,
        ((f"{CHUNK}.clone()", f"{CHUNK}.transpose(1, 2).clone(memory_format=torch.contiguous_format)"),),
        ("misordered", "misordered-within-shard"),
        ("transpose",),
        ("Nothing that shardviz knows",),
    ),
    Bug(
        "every other expert's matrix transposed",
        "ep=2",
        LABELLED,
        (
            (
                f"    local = {CHUNK}.clone()",
                f"    local = {CHUNK}.clone()\n    local[1::2] = local[1::2].transpose(1, 2).clone()",
            ),
        ),
        ("misordered", "misordered-within-shard"),
        ("transpose",),
        ("Nothing that shardviz knows",),
    ),
    Bug(
        "experts dealt out in turn, tokens sent to chunks",
        "ep=2",
        EXPERTS,
        ((CHUNK, "whole[rank::size]"),),
        ("misordered", "wrong-value"),
        ("weight", "order|in turn"),
        ("compare the outputs module by module",),
    ),
    Bug(
        "tokens sent to experts dealt out in turn",
        "ep=2",
        EXPERTS,
        (
            ("return numbers // (EXPERTS // size)", "return numbers % size"),
            ("return numbers % (EXPERTS // size)", "return numbers // size"),
        ),
        ("misordered", "wrong-value"),
        ("weight|expert", "order|in turn"),
        ("compare the outputs module by module",),
    ),
    Bug(
        "every rank with the first experts",
        "ep=4",
        EXPERTS,
        ((CHUNK, "whole.chunk(size)[0]"),),
        ("duplicated", "missing"),
        ("ep", "same part|same shard|did not use"),
    ),
    Bug(
        "tokens put back by the permutation for its inverse",
        "ep=2",
        EXPERTS,
        (("tokens[order.argsort()]", "tokens[order]"),),
        ("misordered",),
        ("inverse|argsort", "order"),
    ),
    Bug(
        "gradients of experts not divided",
        "ep=4",
        EXPERTS,
        (('    model.weight.grad /= mesh["ep"].size()\n', ""),),
        ("wrong-scale",),
        ("4 times", "ep", "divide", "divides other gradients by 4 and never gets this gradient"),
        ("over ep with ReduceOp.AVG",),
        with_lines=True,
    ),
    Bug(
        "gradients of experts averaged over ep",
        "ep=2",
        EXPERTS,
        (
            (
                '    model.weight.grad /= mesh["ep"].size()\n',
                '    model.weight.grad /= mesh["ep"].size()\n'
                '    distributed.all_reduce(model.weight.grad, group=mesh.get_group("ep"))\n',
            ),
        ),
        ("wrong-value",),
        ("splits", "ep"),
    ),
    Bug(
        "gradients of the router not reduced",
        "ep=2",
        EXPERTS,
        (
            (
                '    distributed.all_reduce(model.router.weight.grad, group=mesh.get_group("ep"))\n'
                '    model.router.weight.grad /= mesh["ep"].size()\n',
                "",
            ),
        ),
        ("unreduced-gradient",),
        ("router.weight", "over ep"),
    ),
    Bug(
        "copies of experts not reduced over dp",
        "dp=2,ep=2",
        WITH_DATA,
        (
            (
                '    distributed.all_reduce(model.weight.grad, group=mesh.get_group("dp"))\n'
                "    model.weight.grad /= mesh.size()",
                '    model.weight.grad /= mesh["ep"].size()',
            ),
        ),
        ("unreduced-gradient",),
        ("over dp",),
    ),
    Bug(
        "experts reduced over all ranks",
        "dp=2,ep=2",
        WITH_DATA,
        (
            (
                'distributed.all_reduce(model.weight.grad, group=mesh.get_group("dp"))',
                "distributed.all_reduce(model.weight.grad)",
            ),
        ),
        ("wrong-value",),
        ("splits", "ep", "all_reduce(model.weight.grad)`", "is the first wrong line"),
        with_lines=True,
    ),
    Bug(
        "gradients of the experts that each rank has not divided",
        "ep=2",
        OWN,
        (NOT_OF_EXPERTS,),
        ("wrong-scale",),
        ("the size of ep", "divide the gradient", "don't all_reduce", "only some ranks along ep have"),
        ("no mesh axis has the size", "lost its hook"),
    ),
    Bug(
        "gradients of experts summed over dp and not divided",
        "dp=2,ep=2",
        OWN_WITH_DATA,
        (NOT_OF_EXPERTS,),
        ("wrong-scale",),
        ("4 times", "the size of dp * ep", "divide the gradient by 4"),
        ("no mesh axis has the size", "lost its hook"),
    ),
    Bug(
        "gradients of the tables that each rank has not divided",
        "mp=4",
        TABLES,
        (("lambda gradient: gradient / size", "lambda gradient: gradient"),),
        ("wrong-scale",),
        ("4 times", "the size of mp", "divide the gradient by 4", "don't all_reduce"),
        ("no mesh axis has the size", "lost its hook"),
    ),
    Healthy("experts named by their global number", "ep=2", LIST),
)
