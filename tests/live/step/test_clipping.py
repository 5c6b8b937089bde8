"""A step that clips its gradients is compared with the unsharded model's, clipped by the same calls."""

import pytest

from tests.lanes import at_night, recorded
from tests.live.probing import checked

STEP = """
from torch import distributed
from torch.nn.utils import clip_grad_norm_ as clip, clip_grad_value_
def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    {clip}
    return loss.detach()
def optimizer(model, mesh): return torch.optim.SGD(model.parameters(), 0.1)
"""
RIGHT = {
    "all by their norm": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.0123)",
    "by an imported name": "clip(model.parameters(), 0.01, norm_type=1.0)",
    "by the largest": "clip(model.parameters(), max_norm=0.01, norm_type=float('inf'))",
    "a part": "clip(model[0].parameters(), 0.01)",
    "each": "[clip([weight], 0.01) for weight in model.parameters()]",
    "value by value": "clip_grad_value_(model.parameters(), 0.01)",
    "not at all": "clip(model.parameters(), 1e9)",
}
BY_DAY = [RIGHT[name] for name in ("all by their norm", "value by value")]
"""One that looks at all gradients together, and one at each element by itself."""
LOGGED = """
def log(model, batch, loss):
    squares = sum(weight.grad.square().sum() for weight in model.parameters())
    return {"norm": (squares.full_tensor() if hasattr(squares, "full_tensor") else squares).sqrt()}
"""


@pytest.mark.parametrize("clip", [*BY_DAY, *at_night(text for text in RIGHT.values() if text not in BY_DAY)])
def test_clipping_of_a_right_step_is_compared(clip, tmp_path):
    report = checked(STEP.format(clip=clip) + LOGGED, "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())


BY_HAND = "\ndef parallelize(model, mesh): pass\n"
MEAN = "[distributed.all_reduce(weight.grad, distributed.ReduceOp.AVG) for weight in model.parameters()]"
WRONG = {
    "before the reduction": f"{BY_HAND}|clip(model.parameters(), 0.01); {MEAN}",
    "on one rank only": "|distributed.get_rank() or [g.grad.to_local().mul_(0.5) for g in model.parameters()]",
    "and scaled after it": "|clip(model.parameters(), 0.01); [w.grad.mul_(1.2345) for w in model.parameters()]",
    "by each rank's own norm": "|clip([w.grad.to_local() for w in model.parameters()], 0.01)"
    "; [w.grad.to_local().mul_(0.1 + distributed.get_rank()) for w in model.parameters()]",
    "the wrong part": "|clip(model[0].parameters(), 0.01); model[2].bias.grad.mul_(2)",
}


@pytest.mark.parametrize(
    "case",
    [*at_night([*WRONG.values()][:1], recorded), [*WRONG.values()][1], *at_night([*WRONG.values()][2:])],
    ids=WRONG,
)
def test_clipping_that_makes_a_step_wrong_is_found(case, tmp_path):
    head, _, clip = case.partition("|")
    assert checked(head + STEP.format(clip=clip), "dp=2", tmp_path).findings
