"""Plain outputs that ranks share in their own way: shown if what is computed from them is right, else a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.check.steps import MESH, WANTED, Step, on_all

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = {rank: np.split(WANTED, 2, axis=1)[rank % 2] for rank in MESH.ranks}
ROWS = {rank: np.split(WANTED, 2)[rank % 2] for rank in MESH.ranks}


def returning(path: Path, output: Any, loss: Any = 2.5, gradient: Any = WANTED) -> Step:
    losses = loss if isinstance(loss, dict) else on_all(loss)
    step = Step(path).return_plain(output).add("loss", "scalar", losses, wanted=2.5)
    return step.add("w", "grad", on_all(gradient))


@pytest.mark.parametrize("output", [COLUMNS, ROWS])
def test_parts_that_a_wrong_loss_reads_are_the_finding(tmp_path: Path, output: Any) -> None:
    apart = {rank: 2.0 + rank % 2 for rank in MESH.ranks}
    findings, _ = returning(tmp_path, output, loss=apart).check()
    assert [(finding.tensor, finding.cause_id) for finding in findings] == [("output", "wrong-output-label")]


def test_padding_that_a_wrong_loss_reads_is_named(tmp_path: Path) -> None:
    wanted = WANTED[:, :3]
    padded = {rank: np.pad(wanted, ((0, 0), (0, 1)))[:, 2 * (rank % 2) :][:, :2] for rank in MESH.ranks}
    step = Step(tmp_path).return_plain(padded, wanted).add("loss", "scalar", on_all(2.75), wanted=2.5)
    findings, _ = step.add("w", "grad", on_all(WANTED)).check()
    assert [(finding.tensor, finding.cause_id) for finding in findings] == [("loss", "padding-read")]


def test_padding_that_is_returned_is_named(tmp_path: Path) -> None:
    output = on_all(np.pad(WANTED[:, :3], ((0, 0), (0, 1))))
    findings, _ = Step(tmp_path).return_plain(output, WANTED[:, :3]).check()
    assert [(finding.tensor, finding.cause_id) for finding in findings] == [("output", "padding-read")]
