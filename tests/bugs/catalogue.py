"""All cases, by family."""

from __future__ import annotations

from tests.bugs import (
    accumulation,
    backward,
    buffers,
    context_parallel,
    cut_by_hand,
    experts,
    gradients,
    hooks,
    loads,
    logs,
    losses,
    norms,
    optimizer,
    order,
    outputs,
    own_part,
    permutations,
    pipeline,
    random_numbers,
)
from tests.bugs.case import Bug, Healthy

WEIGHTS = (order, permutations, loads, buffers, random_numbers)
STEPS = (gradients, accumulation, backward, losses, logs, norms, outputs, optimizer, own_part)
AXES = (pipeline, context_parallel, experts, hooks, cut_by_hand)

FAMILIES = {module.__name__.rpartition(".")[2]: module.CASES for module in (*WEIGHTS, *STEPS, *AXES)}

BUGS = [case for cases in FAMILIES.values() for case in cases if isinstance(case, Bug)]
HEALTHY = [case for cases in FAMILIES.values() for case in cases if isinstance(case, Healthy)]
