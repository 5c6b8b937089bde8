"""A probe with a step and no loss: the mean square of the output stands in, where the step returns that too."""

import pytest

from tests.lanes import at_night, recorded
from tests.live.probing import checked

STEP = """
def step(model, rows, mesh):
    {body}
    loss.backward()
    return loss.detach()
"""
OWN = {
    "another one": "loss = (model(rows) - rows).abs().mean()",
    "half of it": "loss = 0.5 * model(rows).square().mean()",
    "a sum": "loss = model(rows).square().sum()",
    "one more term": "loss = model(rows).square().mean() + 0.1 * model[0].bias.abs().sum()",
    "of another function": "loss = model(rows).logsumexp(-1).mean()",
}
ADAM = "\ndef optimizer(model, mesh): return torch.optim.Adam(model.parameters())\n"
LOGGED = """
def log(model, batch, loss):
    whole = loss.clone()
    torch.distributed.all_reduce(whole)
    return {"loss": whole / 2}
"""


@pytest.mark.parametrize(
    "body",
    [next(iter(OWN.values())), *at_night([*OWN.values()][1:2], recorded), *at_night([*OWN.values()][2:])],
    ids=OWN,
)
def test_a_loss_of_the_steps_own_is_not_checked(body, tmp_path):
    report = checked(STEP.format(body=body) + ADAM + LOGGED, "dp=2", tmp_path)
    assert report.findings == ()
    (why,) = {entry.why for entry in report.not_checked}
    assert "the step's loss, gradients and logged values" in why
    assert why.endswith("define loss")


def test_a_model_that_the_step_calls_with_something_else_is_not_checked(tmp_path):
    report = checked(STEP.format(body="loss = model(rows.tanh()).abs().mean()"), "dp=2", tmp_path)
    assert report.findings == ()
    assert ["with something else than its batch" in entry.why for entry in report.not_checked] == [True]


ALIKE = {
    "of micro-batches": """loss = 0
    for part in rows.chunk(2):
        own = model(part).square().mean() / 2
        loss = loss + own
    """,
    "reduced": """loss = model(rows).square().mean()
    whole = loss.detach().clone()
    torch.distributed.all_reduce(whole)
    loss = loss + (whole / 2 - loss.detach())
    """,
}


@pytest.mark.parametrize("body", [next(iter(ALIKE.values())), *at_night([*ALIKE.values()][1:], recorded)], ids=ALIKE)
def test_a_mean_square_is_compared_however_it_is_computed(body, tmp_path):
    report = checked(STEP.format(body=body), "dp=2", tmp_path)
    assert (report.findings, report.not_checked) == ((), ())


NARROW = """
from torch.distributed.fsdp import MixedPrecisionPolicy
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
"""


@pytest.mark.parametrize(
    ("loss", "kept"),
    [
        *at_night([("square().mean()", 0)], recorded),
        ("abs().mean()", 1),
        *at_night([("float().square().mean()", 0)]),
    ],
)
def test_a_mean_square_of_a_narrow_output_may_be_computed_in_a_wider_dtype(loss, kept, tmp_path):
    report = checked(NARROW + STEP.format(body=f"loss = model(rows).{loss}"), "dp=2", tmp_path)
    assert report.findings == ()
    assert ["another number than the mean square" in entry.why for entry in report.not_checked] == [True] * kept


OTHER, SAME = "(model(rows) - rows).abs().mean()", "model(rows).square().mean()"
