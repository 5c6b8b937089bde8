"""All public bugs, by place."""

from __future__ import annotations

from tests.bugs.public import (
    context_parallel,
    conversion,
    dtensor_ops,
    experts,
    lora,
    losses,
    merging,
    optimizer,
    resume,
    sync,
    tensor_parallel,
)

STEPS = (dtensor_ops, losses, tensor_parallel, experts, context_parallel)
FILES = (optimizer, resume, lora, conversion, merging, sync)

FAMILIES = {module.__name__.rpartition(".")[2]: module.CASES for module in (*STEPS, *FILES)}
PUBLIC = [public for cases in FAMILIES.values() for public in cases]
