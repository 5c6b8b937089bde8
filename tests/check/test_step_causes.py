"""What a step's numbers come of: the finding that is the cause is told, and what follows from it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.step.contradictions import check_raised
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from tests.check.records import change_rank
from tests.check.steps import ROWS_OVER_TP, WANTED, Step, by_tp, on_all, rows_over_tp

if TYPE_CHECKING:
    from pathlib import Path


def test_an_output_that_every_rank_has_its_part_of_is_unreduced_and_the_rest_comes_of_it(tmp_path: Path) -> None:
    part = np.full(WANTED.shape, 0.5)
    step = Step(tmp_path).add("output", "output", by_tp(part, WANTED - part))
    step.add("w", "grad", by_tp(WANTED * 2.5, WANTED + 1)).add("loss", "scalar", by_tp(0.25, 0.5), 4.0)
    (found,), (said,) = step.check()
    assert (found.kind, found.held) == ("unreduced-output", "each rank's own part (+tp)")
    assert found.summary.endswith("their sum over tp is the unsharded model's")
    assert "RowwiseParallel" in found.fix
    assert said.why == "the step's loss and gradients: they are computed from a wrong output"


def test_an_output_that_is_labeled_as_a_pending_sum_is_right(tmp_path: Path) -> None:
    part = np.full(WANTED.shape, 0.5)
    step = Step(tmp_path).add("output", "output", by_tp(part, WANTED - part), claim=("Replicate()", "Partial()"))
    assert step.check() == ([], [])


def test_ranks_that_compute_different_things_are_not_called_unreduced(tmp_path: Path) -> None:
    step = Step(tmp_path).add("output", "output", by_tp(WANTED**2, WANTED**3))
    step.add("loss", "scalar", by_tp(0.25, 0.5), 4.0)
    (found,), _ = step.check()
    assert (found.kind, found.tensor) == ("wrong-value", "output")
    assert "differ from rank to rank along tp" in found.cause
    assert found.generic


def test_what_the_ranks_that_are_right_have_and_the_others_lack_is_the_cause(tmp_path: Path) -> None:
    step = Step(tmp_path).add("output", "output", {0: WANTED, 1: WANTED**2, 2: WANTED**2, 3: WANTED**2})
    step.put(0, "scale", "buffer", "initial", [1.0, 2.0])
    (found,), _ = step.check()
    assert (found.kind, found.ranks) == ("wrong-value", (1, 2, 3))
    assert found.cause == "scale is missing on ranks 1-3, and the ranks that are right compute with it"
    assert not found.generic


def test_gradients_that_are_right_on_some_ranks_are_not_called_unreduced(tmp_path: Path) -> None:
    step = Step(tmp_path).add("w", "grad", {0: WANTED, 1: WANTED**2, 2: WANTED, 3: WANTED})
    (found,), _ = step.check()
    assert (found.kind, found.ranks) == ("wrong-value", (1,))
    assert "something different from the other ranks, which are right" in found.cause


def test_shards_that_were_averaged_as_if_they_were_copies_are_named(tmp_path: Path) -> None:
    mean = (WANTED[:2] + WANTED[2:]) / 2
    (found,), _ = Step(tmp_path).add("w", "grad", on_all(mean), claim=ROWS_OVER_TP).check()
    assert found.kind == "wrong-value"
    assert found.summary == "every rank has the mean over tp of all parts of the gradient, which are different parts"
    assert "leave tp out of the reduction's group" in found.fix


def test_shards_that_each_rank_scaled_by_its_own_number_are_named_with_the_numbers(tmp_path: Path) -> None:
    first, second = np.split(WANTED, 2)
    values = by_tp(first * 0.375123, second * 0.75321)
    (found,), _ = Step(tmp_path).add("w", "grad", values, claim=ROWS_OVER_TP).check()
    assert found.kind == "wrong-scale"
    assert found.summary.startswith("the gradient is scaled by 0.37512 on rank 0, 0.75321 on rank 1")
    assert "clip_grad_norm_" in found.fix


def test_one_number_on_every_rank_that_is_no_axis_size_is_a_scale_too(tmp_path: Path) -> None:
    values = rows_over_tp(WANTED * 0.31415)
    (found,), _ = Step(tmp_path).add("w", "grad", values, claim=ROWS_OVER_TP).check()
    assert found.summary == "the gradient is 0.31415 times the unsharded model's on every rank"
    assert "loss scale" in found.cause


def test_a_shard_whose_gradient_is_zero_does_not_hide_the_ratio_of_the_others(tmp_path: Path) -> None:
    wanted = WANTED * np.array([[1], [1], [0], [0]])
    step = Step(tmp_path).add("w", "grad", rows_over_tp(wanted * 2), wanted, ROWS_OVER_TP)
    (found,), _ = step.check()
    assert found.summary == "the gradient is 2 times the unsharded model's, the size of dp or tp"


def test_a_loss_that_is_divided_twice_is_one_finding_with_its_gradients(tmp_path: Path) -> None:
    step = Step(tmp_path).add("loss", "scalar", on_all(2.0), 4.0)
    step.add("v", "grad", on_all(WANTED / 2)).add("w", "grad", on_all(WANTED / 2))
    (found,), _ = step.check()
    assert (found.kind, found.tensor) == ("wrong-scale", "loss")
    assert (
        found.summary
        == "the value is 1/2 of the unsharded model's, 1 over the size of dp or tp, and so are 2 gradients"
    )
    assert "already a mean" in found.cause


def test_gradients_off_by_another_ratio_than_the_loss_are_told_beside_it(tmp_path: Path) -> None:
    step = Step(tmp_path).add("loss", "scalar", on_all(2.0), 4.0).add("w", "grad", on_all(WANTED * 2))
    findings, _ = step.check()
    assert sorted(found.tensor for found in findings) == ["loss", "w"]


def test_a_norm_of_each_ranks_own_shards_is_told_how_to_be_summed(tmp_path: Path) -> None:
    parts = {0: 3.0, 1: 4.0, 2: 3.0, 3: 4.0}
    (found,), _ = Step(tmp_path).add("norm", "scalar", parts, 5.0).check()
    assert found.kind == "unreduced-scalar"
    assert found.summary.endswith("their norm over tp is the unsharded model's value")
    assert "all_reduce the squares over tp" in found.fix


def test_a_value_that_no_reduction_makes_right_is_not_called_a_part_of_a_sum(tmp_path: Path) -> None:
    (found,), _ = Step(tmp_path).add("accuracy", "scalar", {0: 0.3, 1: 0.9, 2: 0.3, 3: 0.9}, 0.45).check()
    assert (found.kind, found.held) == ("unreduced-scalar", "a value of each rank's own")
    assert "no sum or mean of these is right" in found.cause


@pytest.mark.parametrize(
    ("times", "cause"),
    [(2, "Every rank along dp or tp adds all of"), (3, "before and after a sum over ranks"), (0, "leaves out")],
)
def test_a_bias_added_too_often_or_never_has_its_own_cause(tmp_path: Path, times: int, cause: str) -> None:
    bias = np.array([0.5, 1.0, -1.0, 2.0])
    step = Step(tmp_path).add("output", "output", on_all(WANTED + (times - 1) * bias))
    step.put(0, "out.bias", "param", "reference", bias)
    (found,), _ = step.check()
    assert (found.kind, found.tensor) == ("wrong-scale", "out.bias")
    assert f"the output has out.bias added {times} times" in found.summary
    assert cause in found.cause


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("RuntimeError in step (m.py:3): mat1 and mat2 shapes cannot be multiplied (4x3 and 6x8)", "choose one that"),
        ("ValueError in step (m.py:3): 7 is not divisible by 2", "choose one that"),
        ("RuntimeError: aten.mm: got mixed torch.Tensor and DTensor", "make the plain tensor a DTensor"),
        ("NotImplementedError: aten.foo does not have a sharding strategy registered", "local_map"),
        ("RuntimeError in step (m.py:3): no such group", ""),
        ("KeyError in step (m.py:9): 'resize'", ""),
    ],
)
def test_the_fix_of_an_exception_fits_what_it_speaks_of(tmp_path: Path, error: str, words: str) -> None:
    Step(tmp_path).add("w", "grad", on_all(WANTED)).check()
    change_rank(tmp_path / "step", 1, raised=(("step", error),))
    (found,) = check_raised(dump_of(read_files(tmp_path / "step")))
    assert words in found.fix
    assert ("size" in found.fix) == (words == "choose one that")
