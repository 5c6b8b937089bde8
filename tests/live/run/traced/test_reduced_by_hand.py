"""Jobs whose code reduces numbers itself: counts of a balance term or a bias, and gradients inside of an optimizer."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_by_hand import BEGIN
from tests.live.run.traced.test_traced import diff, run

ROUTED = """
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 5, bias=False), nn.Linear(6, 5 * 4)

    def forward(self, x):
        scores = SCORES
        picked = torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1.0)
        counts = picked.sum(0)
        if WORLD > 1 and SUMMED:
            dist.all_reduce(counts)
        self.balance = 5 * (counts / TOKENS * scores.mean(0)).sum()
        made = self.experts(x).unflatten(-1, (5, 4))
        return ((scores * picked)[..., None] * made).sum(-2)


model = nn.Sequential(nn.Linear(6, 6), Routed(), nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(2, 48, 6, generator=torch.Generator().manual_seed(1)):
    loss = model(x.chunk(WORLD)[RANK]).square().mean()
    (loss + 0.1 * model[1].balance).backward()
    for parameter in model.parameters() if WORLD > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD
    optimizer.step()
    optimizer.zero_grad()
"""
SOFTMAX, SIGMOID = "self.gate(x).softmax(-1)", "self.gate(x).sigmoid()"

STEPPING = """
class Reducing(torch.optim.SGD):
    def step(self, closure=None):
        parameters = list(model.parameters())
        for at, parameter in enumerate(parameters) if WORLD > 1 else ():
            REDUCE
        super().step(closure)
        for at, parameter in enumerate(parameters) if WORLD > 1 else ():
            SEND


model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = Reducing(model.parameters(), 0.1)
for x in torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)):
    model(x.chunk(WORLD)[RANK]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MEAN = "(dist.all_reduce(parameter.grad), parameter.grad.div_(WORLD))"
TO_OWNER = "(dist.reduce(parameter.grad, at % WORLD), parameter.grad.div_(WORLD))"
FROM_OWNER = "dist.broadcast(parameter.data, at % WORLD)"


def departures(folder, program, changes):
    """Return how the job on two ranks, with some changes, departs from the one on one rank."""
    text = BEGIN + program
    for word, code in changes.items():
        text = text.replace(word, code)
    script = folder / "train.py"
    script.write_text(text)
    alone = run(folder, "one", sys.executable, str(script))
    ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    step, _ = diff(alone, run(folder, "many", *ranks, str(script)))
    return step["departures"]


@nightly
@pytest.mark.parametrize("scores", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("summed", "tokens", "causes"),
    [
        ("True", "(len(x) * WORLD)", []),
        ("False", "len(x)", ["balance-of-own-rows"]),
        ("True", "len(x)", ["balance-scaled"]),
    ],
    ids=["right", "own rows", "scaled"],
)
def test_a_balance_term_counts_the_tokens_of_all_ranks_once(tmp_path, scores, summed, tokens, causes):
    found = departures(tmp_path, ROUTED, {"SCORES": scores, "SUMMED": summed, "TOKENS": tokens})
    assert [departure["cause_id"] for departure in found] == causes, found


@nightly
@pytest.mark.parametrize(
    ("reduce", "send", "causes"),
    [
        (MEAN, "pass", []),
        (TO_OWNER, FROM_OWNER, []),
        ("pass", "pass", ["gradient-not-reduced"]),
    ],
    ids=["all_reduce", "owners", "nothing"],
)
def test_gradients_that_an_optimizer_reduces_are_no_findings(tmp_path, reduce, send, causes):
    found = departures(tmp_path, STEPPING, {"REDUCE": reduce, "SEND": send})
    assert sorted({departure["cause_id"] for departure in found}) == causes, found


SIGNED = """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.scale * x


model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Scaled(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.1)
for x in torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(1)):
    model(x.chunk(WORLD)[RANK]).square().mean().backward()
    for name, parameter in model.named_parameters() if WORLD > 1 else ():
        if REDUCED:
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD
    optimizer.step()
    optimizer.zero_grad()
"""


@nightly
@pytest.mark.parametrize(
    ("reduced", "causes"),
    [("True", []), ('name != "2.scale"', ["gradient-not-reduced"])],
    ids=["right", "all but a scalar"],
)
def test_a_gradient_of_own_rows_is_named_though_adam_moves_a_number_alike_in_its_first_step(tmp_path, reduced, causes):
    found = departures(tmp_path, SIGNED, {"REDUCED": reduced})
    assert sorted({departure["cause_id"] for departure in found}) == causes, found
