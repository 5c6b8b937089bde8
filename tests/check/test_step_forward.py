"""Why an output is wrong though every weight is right: parts, stages and slices that stand elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.step.words import spans
from shardviz.dump.records.tensors import LayoutRecord
from shardviz.relate.orders import places_of
from tests.check.steps import COPIES, MESH, ROWS_OVER_TP, WANTED, Step

if TYPE_CHECKING:
    from pathlib import Path


def test_terms_that_were_concatenated_are_told_from_copies(tmp_path: Path) -> None:
    terms = (0.25 * WANTED + 1, 0.75 * WANTED - 1)
    step = Step(tmp_path)
    step.layouts.append(LayoutRecord(0, COPIES, (4, 8)))
    for rank in MESH.ranks:
        step._put(rank, "output", "output", "step", np.concatenate(terms, 1), 0, (4, 8))
    (found,), _ = step.put(0, "output", "output", "reference", WANTED).check()
    assert found.kind == "wrong-shape"
    assert "concatenates them along dim 1 instead of adding them" in found.cause


def test_columns_under_the_label_of_rows_are_a_wrong_placement(tmp_path: Path) -> None:
    step = Step(tmp_path)
    step.layouts.append(LayoutRecord(0, ROWS_OVER_TP, (8, 2)))
    for rank in MESH.ranks:
        step._put(rank, "output", "output", "step", np.split(WANTED, 2, 1)[rank % 2], 0, (8, 2))
    (found,), _ = step.put(0, "output", "output", "reference", WANTED).check()
    assert (found.kind, found.held) == ("wrong-placement", "[4, 4/tp]")


@pytest.mark.parametrize("padding", [0.0, -np.inf])
def test_padding_of_an_output_is_a_finding_unless_a_softmax_leaves_it_out(tmp_path: Path, padding: float) -> None:
    step = Step(tmp_path)
    step.layouts.append(LayoutRecord(0, COPIES, (4, 6)))
    for rank in MESH.ranks:
        padded = np.pad(WANTED, ((0, 0), (0, 2)), constant_values=padding)
        step._put(rank, "output", "output", "step", padded, 0, (4, 6))
    findings, not_checked = step.put(0, "output", "output", "reference", WANTED).check()
    assert [found.explanation.id for found in findings] == ([] if padding else ["padding-read"])
    assert any("[4, 6] over all ranks" in one.why for one in not_checked) is bool(padding)


@pytest.mark.parametrize(
    ("claim", "cause", "fix"),
    [
        (COPIES, "the code labels a part along dp or tp as the whole", "label it as split over dp or tp"),
        (ROWS_OVER_TP, "the step splits a part that BATCH_AXES or a sampler already split", "split dim 0 over tp once"),
    ],
)
def test_a_dim_that_was_split_twice_is_not_called_whole(
    tmp_path: Path, claim: tuple[str, ...], cause: str, fix: str
) -> None:
    step = Step(tmp_path)
    step.layouts.append(LayoutRecord(0, claim, (2, 4)))
    for rank in MESH.ranks:
        held = WANTED[:2] if claim == COPIES else WANTED[[2 * (rank % 2)]]
        step._put(rank, "output", "output", "step", held, 0, (2, 4))
    (found,), _ = step.put(0, "output", "output", "reference", WANTED).check()
    assert found.kind == "wrong-shape"
    assert cause in found.cause
    assert fix in found.fix


def test_slices_are_found_wherever_they_stand() -> None:
    found = places_of(WANTED[[2, 0]], WANTED, 1e-9)
    assert found is not None
    assert (found[0], found[1].tolist()) == (0, [2, 0])
    assert places_of(np.ones((2, 4)), np.ones((4, 4)), 1e-9) is None
    assert spans([0, 1, 2, 9, 10, 4]) == "0:3+9:11+4"
