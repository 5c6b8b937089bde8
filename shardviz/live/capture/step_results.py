"""Results of a captured job's own training step: gradients, output, loss, logged values.

There is no unsharded model beside it, so that only copies can be compared: of gradients along axes that do not split
them, and of logged numbers over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.errors import ShardvizError
from shardviz.layout.placements import Replicate
from shardviz.live.capture.locals import Local, of_tensor
from shardviz.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.capture import Capture

KEYS = ("loss", "output", "log")


def check_step(step: object) -> None:
    """Make sure that a step is what `capture` takes, before any rank writes.

    Raises:
        ShardvizError: It is not a dictionary, has another key, or holds something that is not a number.
    """
    hint = 'write step={"loss": loss, "output": output, "log": {"grad_norm": norm}}'
    if not isinstance(step, Mapping):
        raise ShardvizError(f"step is a {type(step).__name__}, not a dictionary", hint)
    for key in step:
        if key not in KEYS:
            raise ShardvizError(f"step has {key!r}", did_you_mean(str(key), KEYS) or f"its keys are {', '.join(KEYS)}")
    logged = step.get("log", {})
    if not isinstance(logged, Mapping):
        raise ShardvizError(f'step["log"] is a {type(logged).__name__}, not a dictionary of numbers by name', hint)
    numbers = {f"log {name!r}": value for name, value in logged.items()} | {"loss": step.get("loss", 0.0)}
    for what, value in numbers.items():
        if not isinstance(value, int | float | torch.Tensor) or (torch.is_tensor(value) and value.numel() != 1):
            returned = list(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise ShardvizError(f"the step's {what} is {returned}, not one number", hint)
    if "output" in step and not torch.is_tensor(step["output"]):
        raise ShardvizError(f"the step's output is a {type(step['output']).__name__}, not a tensor", hint)


def add_step(capture: Capture, locals_: Sequence[Local], step: Mapping[str, Any], mesh: Mesh) -> None:
    """Record a step's results.

    Args:
        capture: The capture of this rank.
        locals_: The model's tensors, with their gradients.
        step: What the job gave of its step.
        mesh: The job's mesh, on which all ranks log the same numbers.
    """
    for local in locals_:
        if local.grad is not None:
            claim = local.grad_claim or local.claim
            capture.add_values(replace(local, role="grad", values=local.grad, claim=claim, grad=None), "step")
    everywhere = mesh, (Replicate(),) * mesh.ndim
    for name, value in step.get("log", {}).items():
        capture.add_values(Local(name, "scalar", (), _number(value), everywhere), "step")
    if "loss" in step and "loss" not in step.get("log", {}):
        capture.add_values(Local("loss", "scalar", (), _number(step["loss"])), "step")
    if "output" in step:
        capture.add_values(replace(of_tensor("output", "output", step["output"].detach()), grad=None), "step")


def _number(value: Any) -> torch.Tensor:
    """Return a value as a training loop would print it; for a pending sum, this rank's term."""
    return torch.tensor(float(value.detach()) if torch.is_tensor(value) else float(value), dtype=torch.float64)
