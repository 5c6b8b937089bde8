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
OVERLAPPING = {rank: WANTED[:3] if rank % 2 == 0 else WANTED[1:] for rank in MESH.ranks}


def returning(path: Path, output: Any, loss: Any = 2.5, gradient: Any = WANTED) -> Step:
    losses = loss if isinstance(loss, dict) else on_all(loss)
    step = Step(path).return_plain(output).add("loss", "scalar", losses, wanted=2.5)
    return step.add("w", "grad", on_all(gradient))


@pytest.mark.parametrize("output", [COLUMNS, ROWS, on_all(WANTED)])
def test_parts_that_a_right_loss_reads_are_right(tmp_path: Path, output: Any) -> None:
    assert returning(tmp_path, output).check() == ([], [])


@pytest.mark.parametrize("output", [COLUMNS, ROWS])
def test_parts_that_a_wrong_loss_reads_are_the_finding(tmp_path: Path, output: Any) -> None:
    apart = {rank: 2.0 + rank % 2 for rank in MESH.ranks}
    findings, _ = returning(tmp_path, output, loss=apart).check()
    assert [(finding.tensor, finding.cause_id) for finding in findings] == [("output", "wrong-output-label")]


@pytest.mark.parametrize("output", [COLUMNS, ROWS])
def test_parts_that_ranks_put_one_loss_together_from_do_not_hide_why_it_is_wrong(tmp_path: Path, output: Any) -> None:
    findings, _ = returning(tmp_path, output, loss=2.0).check()
    is_right = output is COLUMNS or output is ROWS
    assert [(finding.tensor, finding.kind) for finding in findings] == [
        ("loss" if is_right else "output", "wrong-value")
    ]


def test_padding_that_a_right_loss_leaves_out_is_right(tmp_path: Path) -> None:
    wanted = WANTED[:, :3]
    padded = {rank: np.pad(wanted, ((0, 0), (0, 1)))[:, 2 * (rank % 2) :][:, :2] for rank in MESH.ranks}
    step = Step(tmp_path).return_plain(padded, wanted).add("loss", "scalar", on_all(2.5), wanted=2.5)
    assert step.add("w", "grad", on_all(WANTED)).check() == ([], [])


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


def test_a_right_part_does_not_hide_a_wrong_gradient(tmp_path: Path) -> None:
    findings, _ = returning(tmp_path, COLUMNS, gradient=2 * WANTED).check()
    assert [(finding.tensor, finding.kind) for finding in findings] == [("w", "wrong-scale")]


def test_parts_that_overlap_are_not_checked_by_name(tmp_path: Path) -> None:
    findings, [unchecked] = returning(tmp_path, OVERLAPPING).check()
    assert (findings, unchecked.tensor) == ([], "output")
    assert (
        "no placements of [4, 4], the unsharded model's, give every rank what it holds (rank 0: [3, 4])"
        in unchecked.why
    )


@pytest.mark.parametrize("wrong", [{"loss": 2.0}, {"gradient": WANTED + 1}])
def test_parts_that_overlap_are_a_finding_if_anything_behind_them_is_wrong(tmp_path: Path, wrong: Any) -> None:
    findings, _ = returning(tmp_path, OVERLAPPING, **wrong).check()
    assert "output" in [finding.tensor for finding in findings]


def test_values_that_no_layout_explains_are_a_finding_though_the_loss_is_right(tmp_path: Path) -> None:
    findings, _ = returning(tmp_path, on_all(WANTED + 0.5)).check()
    assert [finding.tensor for finding in findings] == ["output"]


@pytest.mark.parametrize("output", [np.concatenate([WANTED, WANTED], 1), np.concatenate([WANTED, WANTED[:1]])])
def test_more_than_the_whole_is_a_finding_though_the_loss_is_right(tmp_path: Path, output: Any) -> None:
    findings, _ = returning(tmp_path, on_all(output)).check()
    assert [(finding.tensor, finding.kind) for finding in findings] == [("output", "wrong-shape")]
