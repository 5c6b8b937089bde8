"""Optimizer state that a round trip through a checkpoint loses."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.bugs.public.case import Command, Public

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 10


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps."""
    model, optimizer = built()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return both before the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the weights, and the state that the optimizer has, frozen weights or not."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {names[parameter]: values for parameter, values in optimizer.state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save({"model": model.state_dict(), "optim": {"state": state}}, checkpoint_id=folder)


def frozen_before_the_load(folder: Path, right: bool) -> None:
    """Resume a job that freezes its first layer; torch drops the state of what is frozen when it is set."""
    model, optimizer = trained()
    save(folder / "saved", model, optimizer)
    states = get_optimizer_state_dict(model, optimizer)
    resumed, other = built()
    resumed.load_state_dict(model.state_dict())
    resumed[0].requires_grad_(right)
    set_optimizer_state_dict(resumed, other, states)
    resumed[0].requires_grad_(False)
    save(folder / "resumed", resumed, other)


def moments_made_anew(folder: Path, right: bool) -> None:
    """Resume a job; the bug keeps the number of steps, and makes the moments anew."""
    model, optimizer = trained()
    if not right:
        for values in optimizer.state.values():
            values["exp_avg"].zero_()
            values["exp_avg_sq"].zero_()
    save(folder / "resumed", model, optimizer)


CASES = (
    Public(
        "pytorch#192202",
        Command(
            "moments of frozen parameters dropped by a load",
            frozen_before_the_load,
            ("diff", "saved", "resumed"),
            ("0.weight.exp_avg", "0.bias.exp_avg", "missing|only|not in|lost|gone"),
            ("2.weight.exp_avg", "tied to the embedding"),
        ),
    ),
    Public(
        "AReaL#1468",
        Command(
            "moments of zero after ten steps",
            moments_made_anew,
            ("check", "resumed"),
            ("exp_avg", "zero|0", "10"),
        ),
    ),
)
