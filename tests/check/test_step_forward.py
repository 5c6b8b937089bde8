"""Why an output is wrong though every weight is right: parts, stages and slices that stand elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.step.words import spans
from shardviz.dump.records.tensors import LayoutRecord
from shardviz.relate.orders import places_of
from tests.check.steps import COPIES, MESH, ROWS_OVER_TP, WANTED, Step, on_all

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (4, 4)
WRONG = WANTED**2 - 1


def with_activation(step: Step, name: str, claim: tuple[str, ...] = COPIES, shape: tuple[int, ...] = SHAPE) -> Step:
    """Let a module put out what is the unsharded model's under a claim."""
    step.layouts.append(LayoutRecord(0, claim, shape))
    for rank in MESH.ranks:
        step._put(rank, name, "activation", "step", np.ones(shape), len(step.layouts) - 1, shape)
    return step


def with_odd(step: Step, name: str) -> Step:
    for rank in MESH.ranks:
        step.put(rank, name, "activation", "step", WRONG)
    return step


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


def pipeline(path: Path, *layers: tuple[int, ...], odd: tuple[int, ...]) -> Step:
    """Divide four layers over dp, whose last coordinate has a wrong output; some layers' own outputs are wrong."""
    step = Step(path)
    for number in range(4):
        step.stamp(f"layers.{number}.weight", SHAPE)
    for rank in MESH.ranks:
        for number in layers[rank // 2]:
            step.hold(rank, f"layers.{number}.weight", SHAPE, (0, 4), (0, 4))
    for number in {number for own in layers for number in own}:
        whole = LayoutRecord(0, COPIES, SHAPE)
        step.layouts.append(whole)
        for rank in MESH.ranks:
            if number in layers[rank // 2]:
                at = None if number in odd else len(step.layouts) - 1
                step._put(rank, f"layers.{number}", "activation", "step", WRONG + number, at, SHAPE)
    return step.add("output", "output", {2: WRONG, 3: WRONG})


def test_stages_in_order_are_not_the_cause(tmp_path: Path) -> None:
    (found,), _ = pipeline(tmp_path, (0, 1), (2, 3), odd=(3,)).check()
    assert found.kind == "wrong-value"
    assert found.cause_id == "unexplained-forward"


def heads(path: Path, starts: tuple[int, int]) -> Step:
    """Cut a query and a key weight over tp, the key's rows beginning at these."""
    step = Step(path).stamp("wq.weight", SHAPE).stamp("wk.weight", SHAPE)
    for rank in MESH.ranks:
        step.hold(rank, "wq.weight", SHAPE, (2 * (rank % 2), 2 * (rank % 2) + 2), (0, 4))
        step.hold(rank, "wk.weight", SHAPE, (starts[rank % 2], starts[rank % 2] + 2), (0, 4))
        step.put(rank, "wk", "activation", "step", WANTED[:, starts[rank % 2] :][:, :2])
    step.put(0, "wk", "activation", "reference", WANTED)
    return step.add("output", "output", on_all(WRONG))


def test_key_heads_that_a_right_module_has_read_are_not_the_cause(tmp_path: Path) -> None:
    (found,), _ = with_odd(with_activation(heads(tmp_path, (2, 0)), "wo"), "up").check()
    assert found.kind == "wrong-value"
    assert found.cause_id == "unexplained-forward"


def test_key_heads_in_order_are_not_the_cause(tmp_path: Path) -> None:
    (found,), _ = with_odd(heads(tmp_path, (0, 2)), "wo").check()
    assert found.kind == "wrong-value"
    assert found.cause_id == "unexplained-forward"


def test_slices_are_found_wherever_they_stand() -> None:
    found = places_of(WANTED[[2, 0]], WANTED, 1e-9)
    assert found is not None
    assert (found[0], found[1].tolist()) == (0, [2, 0])
    assert places_of(np.ones((2, 4)), np.ones((4, 4)), 1e-9) is None
    assert spans([0, 1, 2, 9, 10, 4]) == "0:3+9:11+4"
