"""After the optimizer's step: what a weight must be, and where nothing can say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.report import NotChecked
from shardviz.check.step.update.compare import check_unsharded_update
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.explain.finding import Finding
from tests.check.steps import ROWS_OVER_TP, WANTED, Step, on_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

STEP = 0.1


def updated(path: Path, stepped: object, *, before: bool = True, gradient: float = 1.0) -> list[Finding | NotChecked]:
    """Check a weight after a step, whose gradient is `gradient` times that of another weight."""
    step = Step(path).add("w", "grad", on_all(WANTED * gradient), WANTED * gradient).add("v", "grad", on_all(WANTED))
    for rank in range(4):
        step.put(rank, "w", "param", "step", stepped)
    step.put(0, "w", "param", "updated", WANTED - STEP * np.sign(WANTED))
    if before:
        step.put(0, "w", "param", "reference", WANTED)
    step.check()
    return list(check_unsharded_update(dump_of(read_files(path / "step")), frozenset(), {}))


def test_a_wrong_step_is_found_where_the_gradient_is_more_than_rounding(tmp_path: Path) -> None:
    wrong = WANTED + STEP * np.sign(WANTED)
    (found,) = updated(tmp_path / "a", wrong)
    assert isinstance(found, Finding)
    (said,) = updated(tmp_path / "b", wrong, gradient=1e-15)
    assert isinstance(said, NotChecked)
    assert "may be rounding alone" in said.why


@pytest.mark.parametrize("stepped", [WANTED, WANTED * 2])
def test_a_weight_of_which_no_start_is_known_is_not_called_right(tmp_path: Path, stepped: object) -> None:
    (said,) = updated(tmp_path, stepped, before=False)
    assert isinstance(said, NotChecked)
    assert said.why == "the weight after the step: its value before the step was not captured"


@pytest.mark.parametrize(
    ("role", "name", "says", "never"),
    [
        ("optim", "w.exp_avg", "loaded in a different order", "learning rate"),
        ("param", "w", "parameter group", "loaded in a different order"),
    ],
    ids=["optim-w.exp_avg-loaded in a different order-learning rate", "param-w-count of steps-loaded in another order"],
)
def test_a_learning_rate_is_a_cause_of_a_wrong_weight_and_not_of_a_wrong_state(
    tmp_path: Path, role: str, name: str, says: str, never: str
) -> None:
    step = Step(tmp_path).add("w", "grad", on_all(WANTED), WANTED)
    for rank in range(4):
        step.put(rank, name, role, "step", WANTED**3 + 1)
    step.put(0, name, role, "updated", WANTED + 1 if role == "optim" else WANTED)
    step.put(0, "w", "param", "reference", 2 * WANTED)
    step.check()
    (found,) = check_unsharded_update(dump_of(read_files(tmp_path / "step")), frozenset(), {})
    assert isinstance(found, Finding)
    assert says in found.cause
    assert never not in found.cause


def shards_stepped_by(
    path: Path,
    step_of: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    shape: tuple[int, int] = (8, 4),
    of_whole: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]] | None = None,
) -> list[str]:
    """Step each rank's rows of a matrix by what an optimizer makes of the gradient's rows, and name what is found.

    With `of_whole`, each rank has its rows of what that makes of the whole step and weight.
    """
    gradient, start = (np.random.default_rng(seed).normal(size=shape) for seed in (5, 6))
    step = Step(path).add("loss", "scalar", on_all(1.0), wanted=1.0)
    step.add("w", "grad", {rank: np.split(gradient, 2)[rank % 2] for rank in range(4)}, gradient, ROWS_OVER_TP)
    step.put(0, "w", "param", "reference", start).put(0, "w", "param", "updated", start - step_of(gradient))
    rows = [np.split(array, 2) for array in (start, gradient)]
    after = {rank: rows[0][rank % 2] - step_of(rows[1][rank % 2]) for rank in range(4)}
    if of_whole is not None:
        stepped = np.split(start - of_whole(step_of(gradient), start), 2)
        after = {rank: stepped[rank % 2] for rank in range(4)}
    step.hold_rows("w", "param", after, shape)
    found = check_unsharded_update(step.dump(), frozenset(), {})
    return [one.cause_id if isinstance(one, Finding) else one.why for one in found]


def orthogonal(gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    left, _, right = np.linalg.svd(gradient, full_matrices=False)
    whole: NDArray[np.float64] = 0.1 * left @ right
    return whole


def factored(gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide by the root of means over rows and over columns, as Adafactor does."""
    square = gradient**2
    rows, columns = square.mean(1, keepdims=True), square.mean(0, keepdims=True)
    step: NDArray[np.float64] = 0.1 * gradient / np.sqrt(rows * columns / square.mean())
    return step


def of_roots(gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    """Take the square roots of the singular values, as Shampoo does in its first step."""
    left, sizes, right = np.linalg.svd(gradient, full_matrices=False)
    whole: NDArray[np.float64] = 0.1 * (left * np.sqrt(sizes)) @ right
    return whole


def of_largest(gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    """Make the three largest singular values alike, as Muon does of a gradient of few rows of a batch."""
    left, _, right = np.linalg.svd(gradient, full_matrices=False)
    whole: NDArray[np.float64] = 0.1 * left[:, :3] @ right[:3]
    return whole


@pytest.mark.parametrize(
    "step_of",
    [orthogonal, factored, of_roots, of_largest, lambda gradient: 0.1 * gradient / np.linalg.norm(gradient)],
)
def test_an_optimizer_of_whole_matrices_that_runs_on_shards_is_named(
    tmp_path: Path, step_of: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> None:
    assert shards_stepped_by(tmp_path, step_of) == ["step-of-part"]


def test_an_optimizer_that_works_element_by_element_may_run_on_shards(tmp_path: Path) -> None:
    assert shards_stepped_by(tmp_path, lambda gradient: 0.1 * np.sign(gradient)) == []


def test_columns_that_all_ranks_step_by_the_same_other_numbers_are_no_statistics_of_parts(tmp_path: Path) -> None:
    found = shards_stepped_by(tmp_path, np.sign, (8, 16), lambda step, _start: step * np.linspace(1, 2, 16))
    assert found == ["unexplained-weight"]


@pytest.mark.parametrize(
    ("of_whole", "cause"),
    [
        (lambda step, _start: 2 * step, "repeated-step"),
        (lambda step, _start: 0.7 * step, "another-learning-rate"),
        (lambda step, start: step + 0.01 * start, "another-decay"),
    ],
)
def test_rows_of_an_orthogonal_step_are_orthogonal_too_and_have_causes_of_their_own(
    tmp_path: Path,
    of_whole: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
    cause: str,
) -> None:
    assert shards_stepped_by(tmp_path, orthogonal, (8, 16), of_whole) == [cause]


def test_a_weight_that_is_not_finite_after_an_orthogonal_step_is_no_step_of_a_part(tmp_path: Path) -> None:
    causes = shards_stepped_by(tmp_path, orthogonal, (8, 16), lambda step, _start: step * np.nan)
    assert "step-of-part" not in causes
    assert len(causes) == 1


def state_of(path: Path, held: Callable[[int], object], wanted: object) -> list[Finding | NotChecked]:
    """Check a state that each rank computed in the step; the weight itself moved rightly on all ranks."""
    step = Step(path).add("w", "grad", on_all(WANTED), WANTED)
    for rank in range(4):
        step.put(rank, "w.kept", "optim", "step", held(rank))
        step.put(rank, "w", "param", "step", WANTED**3 - STEP * WANTED)
    step.put(0, "w.kept", "optim", "updated", wanted)
    step.put(0, "w", "param", "updated", WANTED**3 - STEP * WANTED)
    step.put(0, "w", "param", "reference", WANTED**3)
    step.check()
    return list(check_unsharded_update(dump_of(read_files(path / "step")), frozenset(), {}))


OLD, NEW = WANTED**3, WANTED**3 - STEP * WANTED / 5


@pytest.mark.parametrize(
    ("held", "wanted", "cause"),
    [
        (lambda rank: WANTED + (-1) ** rank * WANTED**2, WANTED, "StateOfParts"),
        (lambda rank: OLD if rank else NEW, NEW, "StateOfOldWeight"),
        (lambda rank: OLD, NEW, "UnexplainedState"),
        (lambda rank: 0.3 * WANTED, WANTED, "ScaledState"),
        (lambda rank: 0.3 * WANTED**2, WANTED**2, "ScaledState"),
        (lambda rank: WANTED + rank * WANTED**2, WANTED, "UnexplainedState"),
        (lambda rank: NEW, NEW, None),
    ],
    ids=["own statistics", "old weight", "old everywhere", "scaled", "scaled squares", "own numbers", "right"],
)
def test_a_state_that_the_optimizer_computed_wrongly_was_not_loaded_wrongly(
    tmp_path: Path, held: Callable[[int], object], wanted: object, cause: str | None
) -> None:
    findings = [found for found in state_of(tmp_path, held, wanted) if isinstance(found, Finding)]
    assert [type(found.explanation).__name__ for found in findings] == ([cause] if cause else [])


def test_a_state_that_cannot_be_compared_does_not_hide_its_weight(tmp_path: Path) -> None:
    step = Step(tmp_path).add("w", "grad", on_all(WANTED), WANTED)
    for rank in range(4):
        step.put(rank, "w.kept", "optim", "step", np.ones(3))
        step.put(rank, "w", "param", "step", WANTED**2 - 4 * STEP * WANTED)
    step.put(0, "w.kept", "optim", "updated", WANTED)
    step.put(0, "w", "param", "updated", WANTED**2 - STEP * WANTED)
    step.put(0, "w", "param", "reference", WANTED**2)
    step.check()
    outcomes = list(check_unsharded_update(dump_of(read_files(tmp_path / "step")), frozenset(), {}))
    assert [type(outcome).__name__ for outcome in outcomes] == ["NotChecked", "Finding"]


@pytest.mark.parametrize("is_summed", [False, True], ids=["own rows", "all rows"])
def test_a_buffer_to_which_each_rank_adds_its_own_rows_is_not_the_sum(tmp_path: Path, is_summed: bool) -> None:
    """As the counts of a codebook: a share of the old counts, and the rows of all ranks."""
    counts = np.arange(1.0, 9)
    rows = {rank: (rank // 2 + 1) * counts**2 for rank in range(4)}
    step = Step(tmp_path).add("loss", "scalar", on_all(1.0), 1.0, ("Partial('avg')", "Replicate()"))
    every = rows[0] + rows[2]
    for rank in range(4):
        step.put(rank, "counts", "buffer", "step", 0.9 * counts + 0.1 * (every if is_summed else rows[rank]))
    step.put(0, "counts", "buffer", "updated", 0.9 * counts + 0.1 * every)
    step.put(0, "counts", "buffer", "reference", counts)
    step.check()
    outcomes = list(check_unsharded_update(dump_of(read_files(tmp_path / "step")), frozenset(), {}))
    causes = [type(found.explanation).__name__ for found in outcomes if isinstance(found, Finding)]
    assert causes == ([] if is_summed else ["UnreducedStatistics"])
