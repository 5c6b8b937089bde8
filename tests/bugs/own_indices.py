"""Indices of the largest or nearest that a rank finds in its own part, taken for indices into the whole."""

from __future__ import annotations

from tests.bugs.case import Bug

NEAREST = """
CODES, DIM = 16, 6


class Book(nn.Module):
    group, rank, size = None, 0, 1

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(CODES, DIM))

    @torch.no_grad()
    def nearest(self, z):
        distance, index = torch.cdist(z, self.codes).min(-1)
        if self.group is None:
            return index
        index = index + self.rank * len(self.codes)
        distances = [torch.empty_like(distance) for _ in range(self.size)]
        indices = [torch.empty_like(index) for _ in range(self.size)]
        distributed.all_gather(distances, distance, group=self.group)
        distributed.all_gather(indices, index, group=self.group)
        best = torch.stack(distances).argmin(0, keepdim=True)
        return torch.stack(indices).gather(0, best)[0]

    def forward(self, z):
        index = self.nearest(z)
        local = index - self.rank * len(self.codes)
        mine = (local >= 0) & (local < len(self.codes))
        found = self.codes[local.clamp(0, len(self.codes) - 1)] * mine[:, None]
        return found if self.group is None else Sum.apply(found, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.book, self.out = nn.Linear(5, DIM), Book(), nn.Linear(DIM, 3)

    def forward(self, x):
        z = self.into(x)
        return self.out(z + self.book(z))


def build():
    return Net()


def parallelize(model, mesh):
    book = model.book
    book.group, book.rank, book.size = mesh.get_group("tp"), mesh["tp"].get_local_rank(), mesh["tp"].size()
    book.codes = nn.Parameter(book.codes.detach().chunk(book.size)[book.rank].clone())


def batch():
    return torch.randn(12, 5)
"""

EXPERTS = """
EXPERTS, DIM = 8, 6


class Router(nn.Module):
    group, rank, size = None, 0, 1

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.scale = nn.Embedding(EXPERTS, DIM)

    def forward(self, h):
        scores = h @ self.gate.T
        top, chosen = scores.topk(2, -1)
        if self.group is not None:
            chosen = chosen + self.rank * scores.shape[-1]
            tops, all_chosen = ([torch.empty_like(one) for _ in range(self.size)] for one in (top, chosen))
            distributed.all_gather(tops, top.detach(), group=self.group)
            distributed.all_gather(all_chosen, chosen, group=self.group)
            best = torch.cat(tops, -1).topk(2, -1).indices
            chosen = torch.cat(all_chosen, -1).gather(-1, best)
        return self.scale(chosen).sum(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.router, self.out = nn.Linear(5, DIM), Router(), nn.Linear(DIM, 3)

    def forward(self, x):
        h = self.into(x)
        return self.out(h * self.router(h))


def build():
    return Net()


def parallelize(model, mesh):
    router = model.router
    router.group, router.rank, router.size = mesh.get_group("tp"), mesh["tp"].get_local_rank(), mesh["tp"].size()
    router.gate = nn.Parameter(router.gate.detach().chunk(router.size)[router.rank].clone(), requires_grad=False)


def batch():
    return torch.randn(12, 5)
"""

GREEDY = """
WORDS, DIM = 12, 6


class Draft(nn.Module):
    group, rank, size = None, 0, 1

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.head = nn.Parameter(torch.randn(WORDS, DIM), requires_grad=False)

    @torch.no_grad()
    def greedy(self, h):
        logits = h @ self.head.T
        index = logits.argmax(-1)
        if self.group is None:
            return index
        largest = logits.amax(-1)
        whole = largest.clone()
        distributed.all_reduce(whole, op=distributed.ReduceOp.MAX, group=self.group)
        index = torch.where(largest == whole, index + self.rank * logits.shape[-1], 0)
        distributed.all_reduce(index, group=self.group)
        return index

    def forward(self, h):
        return torch.cat((h, self.words(self.greedy(h))), -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.draft, self.out = nn.Linear(5, DIM), Draft(), nn.Linear(2 * DIM, 3)

    def forward(self, x):
        return self.out(self.draft(self.into(x)))


def build():
    return Net()


def parallelize(model, mesh):
    draft = model.draft
    draft.group, draft.rank, draft.size = mesh.get_group("tp"), mesh["tp"].get_local_rank(), mesh["tp"].size()
    draft.head = nn.Parameter(draft.head.detach().chunk(draft.size)[draft.rank].clone(), requires_grad=False)


def batch():
    return torch.randn(12, 5)
"""

OWNERS = (
    NEAREST.replace("        index = index + self.rank * len(self.codes)\n", "")
    .replace("(0, best)[0]\n", "(0, best)[0], best[0]\n")
    .replace("            return index\n", "            return index, torch.zeros_like(index)\n")
    .replace("index = self.nearest(z)", "local, owner = self.nearest(z)")
    .replace("        local = index - self.rank * len(self.codes)\n", "")
    .replace("mine = (local >= 0) & (local < len(self.codes))", "mine = owner == self.rank")
)
"""Each code is named by the rank that has it and its number there."""

UNCOUNTED = ("own part",)

CASES = [
    Bug(
        "the nearest code's index within a rank's part, gathered as one of the whole book",
        "tp=2",
        NEAREST,
        (("        index = index + self.rank * len(self.codes)\n", ""),),
        ("wrong-value",),
        (*UNCOUNTED, "min"),
        with_lines=True,
    ),
    Bug(
        "the nearest code's index over four ranks, without the offset of its part",
        "tp=4",
        NEAREST,
        (("        index = index + self.rank * len(self.codes)\n", ""),),
        ("wrong-value",),
        UNCOUNTED,
        with_lines=True,
    ),
    Bug(
        "experts chosen by the number within a rank's own part of the gate",
        "tp=2",
        EXPERTS,
        (("            chosen = chosen + self.rank * scores.shape[-1]\n", ""),),
        ("wrong-value",),
        UNCOUNTED,
        with_lines=True,
    ),
    Bug(
        "the likeliest word's number within a rank's own part of the vocabulary",
        "tp=2",
        GREEDY,
        (("index + self.rank * logits.shape[-1], 0)", "index, 0)"),),
        ("wrong-value",),
        UNCOUNTED,
        with_lines=True,
    ),
    Bug(
        "codes named by their rank and number there, which nothing sums",
        "tp=2",
        OWNERS,
        (("found if self.group is None else Sum.apply(found, self.group)", "found"),),
        ("unreduced-output", "wrong-value"),
        ("sum",),
        UNCOUNTED,
        with_lines=True,
    ),
    Bug(
        "the nearest code of each rank's own part, with the part's offset taken away twice",
        "tp=2",
        NEAREST,
        (("index = index + self.rank * len(self.codes)", "index = index - self.rank * len(self.codes)"),),
        ("wrong-value",),
        (*UNCOUNTED, "-8"),
        with_lines=True,
    ),
    Bug(
        "the nearest code's index with the rank's number added, and not the part's offset",
        "tp=4",
        NEAREST,
        (("index = index + self.rank * len(self.codes)", "index = index + self.rank"),),
        ("wrong-value",),
        (*UNCOUNTED, "3 was added|2 was added|1 was added"),
        with_lines=True,
    ),
]
