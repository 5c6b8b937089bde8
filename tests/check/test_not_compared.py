"""What of a training run nothing was compared with, said beside a good verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.verdicts import not_compared
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from tests.check.steps import Step, on_all

if TYPE_CHECKING:
    from pathlib import Path


def of(step: Step, folder: Path) -> list[str]:
    step.check()
    return not_compared(dump_of(read_files(folder / "step")))


def test_a_step_compares_all_but_activations_and_without_an_optimizer_its_state(tmp_path: Path) -> None:
    step = Step(tmp_path).add("w", "grad", on_all(np.ones((4, 4))), np.ones((4, 4)))
    assert of(step, tmp_path) == ["activations", "optimizer state"]


def test_a_step_of_the_unsharded_optimizer_compares_the_state_too(tmp_path: Path) -> None:
    step = Step(tmp_path).add("w", "grad", on_all(np.ones((4, 4))), np.ones((4, 4)))
    assert of(step.put(0, "w", "param", "updated", np.ones((4, 4))), tmp_path) == ["activations"]
