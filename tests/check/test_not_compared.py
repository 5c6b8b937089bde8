"""What of a training run nothing was compared with, said beside a good verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.run import report_on
from shardviz.check.verdicts import not_compared, recorded, state_of, verdict_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from tests.check.steps import WANTED, Step, on_all

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


def states(step: Step) -> dict[tuple[str, str], str]:
    dump = step.dump()
    report = report_on(dump)
    marks = {verdict_on(dump, tensor, [name], report) for tensor, name in recorded(dump)}
    found = {(tensor.role, name): state_of(dump, tensor, name, report) for tensor, name in recorded(dump)}
    assert ("good" in marks) == ("held" in found.values())
    return found


def test_only_what_was_laid_beside_something_is_held(tmp_path: Path) -> None:
    ones = np.ones((4, 4))
    step = Step(tmp_path).add("w", "grad", on_all(ones), ones).add("layers.0", "activation", on_all(ones), ones)
    step.put(1, "w.exp_avg", "optim", "step", ones)
    assert states(step) == {
        ("grad", "w"): "held",
        ("activation", "layers.0"): "not checked",
        ("optim", "w.exp_avg"): "not checked",
    }


def test_a_gradient_whose_error_follows_from_an_output_is_neither_wrong_nor_right(tmp_path: Path) -> None:
    odd = WANTED + np.arange(16.0).reshape(4, 4) ** 2
    step = (
        Step(tmp_path)
        .add("output", "output", on_all(odd))
        .add("w", "grad", on_all(odd))
        .add("v", "grad", on_all(WANTED))
    )
    assert states(step) == {("output", "output"): "finding", ("grad", "w"): "cannot tell", ("grad", "v"): "held"}


def test_nobody_can_tell_a_gradient_that_rounding_could_make(tmp_path: Path) -> None:
    small = WANTED * 1e-20
    for number, held in enumerate((small, 0 * small)):
        step = Step(tmp_path / str(number)).add("w", "grad", on_all(WANTED)).add("v", "grad", on_all(held), small)
        assert states(step) == {("grad", "w"): "held", ("grad", "v"): "cannot tell"}


def test_a_sum_of_which_a_rank_is_missing_is_not_held(tmp_path: Path) -> None:
    parts = on_all(WANTED / 2)
    claim = ("Replicate()", "Partial()")
    whole = Step(tmp_path / "whole").add("w", "grad", parts, claim=claim)
    assert states(whole) == {("grad", "w"): "held"}
    del parts[3]
    lacking = Step(tmp_path / "lacking").add("w", "grad", parts, claim=claim)
    assert states(lacking)["grad", "w"] != "held"
