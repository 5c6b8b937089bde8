"""Losses over logits whose vocabulary is split: torch's own loss_parallel, as in 2.13."""

from __future__ import annotations

from tests.bugs.case import Bug
from tests.bugs.public.case import Public

PREFERRED = '''
from contextlib import nullcontext
from torch.distributed.tensor.parallel import loss_parallel

WORDS = 12


class Speaker(nn.Module):
    """A head over the vocabulary; its loss weighs the log-probabilities of words, as preference losses do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def build():
    return Speaker()


def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(use_local_output=False)})


def batch():
    return torch.randn(6, 8), torch.rand(6, WORDS)


def loss(model, batch):
    rows, weights = batch
    return -(functional.log_softmax(model(rows), 1) * weights).mean()


def step(model, batch, mesh):
    rows, weights = batch
    logits = model(rows)
    weights = distribute_tensor(weights, mesh["tp"], logits.placements)
    with context():
        loss = -(functional.log_softmax(logits, 1) * weights).mean()
        loss.backward()
    return loss.detach().full_tensor()


def context():
    return nullcontext()

'''

CASES = (
    Public(
        "pytorch#190746",
        Bug(
            "log_softmax under loss_parallel without cross_entropy",
            "tp=2",
            PREFERRED,
            (("return nullcontext()", "return loss_parallel()"),),
            ("wrong-value",),
            ("backward|gradient", "loss_parallel", "log_softmax"),
        ),
    ),
)
