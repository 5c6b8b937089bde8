"""Work of any size that reads no folder: findings to group, and a plan of a mesh."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import TYPE_CHECKING

from shardviz.check.grouping import grouped
from shardviz.explain.step import WeightOnSomeRanks
from tests.gauges.growth.uses import verb

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding
    from tests.gauges.growth.measure import Work


def findings_of_one_tensor(num: int) -> Work:
    """Group findings of one tensor that are all alike, as a weight and its states may have them."""
    return partial(grouped, [_finding("weight") for _ in range(num)])


def tensors_of_one_finding(num: int) -> Work:
    """Group findings that differ in their tensor alone."""
    return partial(grouped, [_finding(f"layers.{at}.weight") for at in range(num)])


def _finding(tensor: str) -> Finding:
    return WeightOnSomeRanks((0, 1), "bias").finding(tensor, (0, 1), "the gradient is off by up to 0.25 on rank 0")


def planned(num: int) -> Work:
    """Plan a mesh of as many ranks, with as many rows in the batch."""
    return partial(_plan, f"fsdp={num // 8},tp=8", f"{num},12")


def _plan(mesh: str, batch: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        verb("plan", "tp_fsdp", "--mesh", mesh, "--batch", batch, "-o", f"{folder}/plan.shardviz")
