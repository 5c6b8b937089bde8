"""A job that goes on from a checkpoint beside the one that was not interrupted, each with the step after it traced."""

from __future__ import annotations

import sys

import pytest

from tests.lanes import nightly
from tests.live.run.traced.test_traced import diff, run

PROGRAM = """
import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
optimizer = torch.optim.OPTIMIZER
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
begin = 0
if sys.argv[1:] == ["resume"]:
    saved = torch.load("saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    begin = saved["step"]
for step in range(begin, 4):
    if step == 2 and sys.argv[1:] != ["resume"]:
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: one.state_dict() for name, one in states.items()} | {"step": step}, "saved.pt")
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    mse_loss(model(x), x.flip(1)).backward()
    optimizer.step()
    scheduler.step()
"""
ADAM, PLAIN = "AdamW(model.parameters(), lr=0.05)", "SGD(model.parameters(), lr=0.05)"
RATE = "optimizer.param_groups[0]['lr'] = saved['optimizer']['param_groups'][0]['lr']"
WITHOUT_STATES = ('optimizer.load_state_dict(saved["optimizer"])', RATE)
ANEW = ('optimizer.load_state_dict(saved["optimizer"])', "pass")


@nightly
@pytest.mark.parametrize(
    ("optimizer", "edits", "words"),
    [
        (ADAM, (), ""),
        (ADAM, (WITHOUT_STATES,), "begins the step with exp_avg, exp_avg_sq, and that of the second run with none"),
        (PLAIN, (WITHOUT_STATES,), ""),
        (ADAM, (('"step": step}', '"step": 0}'),), "doesn't begin with the rows that come next"),
        (PLAIN, (ANEW,), "save the scheduler's state_dict()"),
        (
            ADAM,
            (('scheduler.load_state_dict(saved["scheduler"])', "[s.update(step=s['step'] * 0) for s in STATES]"),),
            "its count of steps is 2 in the first run and 0 in the second run",
        ),
    ],
    ids=["right", "without states", "plain", "the first rows", "another rate", "a count that begins again"],
)
def test_what_a_resumed_job_has_not_loaded_is_named(tmp_path, optimizer, edits, words):
    (tmp_path / "train.py").write_text(PROGRAM.replace("OPTIMIZER", optimizer))
    whole = run(tmp_path, "whole", sys.executable, "train.py", step=3)
    text = PROGRAM.replace("OPTIMIZER", optimizer)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new.replace("STATES", "optimizer.state.values()"))
    (tmp_path / "train.py").write_text(text)
    if edits and "step" in edits[0][0]:
        run(tmp_path, "again", sys.executable, "train.py", step=3)  # saves what is wrong
    step, _ = diff(whole, run(tmp_path, "resumed", sys.executable, "train.py", "resume"))
    found = " ".join(f"{one['sentence']} {one['why']}" for one in step["departures"])
    assert bool(found) == bool(words), found
    assert words in found


STATEFUL = PROGRAM.replace("OPTIMIZER", ADAM).replace(
    """
    saved = torch.load("saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
""",
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    saved = torch.load("saved.pt")
    get_state_dict(model, optimizer)
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
""",
)


@nightly
def test_the_step_by_which_torch_makes_states_to_load_into_is_none_of_the_job(tmp_path):
    (tmp_path / "train.py").write_text(STATEFUL)
    whole = run(tmp_path, "whole", sys.executable, "train.py", step=3)
    step, done = diff(whole, run(tmp_path, "resumed", sys.executable, "train.py", "resume"))
    assert step["departures"] == []
    assert done.returncode == 0
