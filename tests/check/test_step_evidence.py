"""What is right in a step bounds what is wrong in it: causes that only several results together can prove."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.dump.records.tensors import LayoutRecord
from tests.check.steps import COPIES, ROWS_OVER_TP, WANTED, Step, by_tp, on_all, rows_over_tp

if TYPE_CHECKING:
    from pathlib import Path

    from tests.check.steps import Values

SHAPE = (4, 4)
HALVES = {0: (0, 2), 1: (2, 4), 2: (2, 4), 3: (0, 2)}
PART = np.full((2, 4), 0.25)


def two_parts_on_four_ranks(path: Path, gradients: Values) -> Step:
    """Hold each half of a plain weight on two ranks, as key and value heads that are fewer than ranks are."""
    step = Step(path).stamp("k", SHAPE)
    for rank, rows in HALVES.items():
        step.hold(rank, "k", SHAPE, rows, (0, 4)).put(rank, "k", "grad", "step", gradients[rank], SHAPE)
    return step.put(0, "k", "grad", "reference", WANTED)


def halves(first: float, second: float) -> Values:
    """Divide the gradient of each half among the two ranks that hold it."""
    parts = {rank: WANTED[slice(*rows)] for rank, rows in HALVES.items()}
    return {rank: first * part + PART if rank < 2 else second * part - PART for rank, part in parts.items()}


def test_the_gradient_of_a_part_that_some_ranks_share_is_summed_over_those(tmp_path: Path) -> None:
    (found,), _ = two_parts_on_four_ranks(tmp_path, halves(0.25, 0.75)).check()
    assert (found.kind, found.tensor) == ("unreduced-gradient", "k")
    assert "the sum over those that do is the unsharded model's" in found.summary
    assert "ReduceOp.SUM" in found.fix
    assert "new_subgroups_by_enumeration([(0, 3), (1, 2)])" in found.fix


def test_a_part_that_some_ranks_share_is_right_where_each_has_the_whole_gradient(tmp_path: Path) -> None:
    whole = {rank: WANTED[slice(*rows)] for rank, rows in HALVES.items()}
    assert two_parts_on_four_ranks(tmp_path, whole).check() == ([], [])


def tied_on_two_stages(path: Path, on_first: object, on_last: object) -> Step:
    step = Step(path).stamp("embed", SHAPE).stamp("head", SHAPE, "embed")
    for rank in (0, 1):
        step.put(rank, "embed", "grad", "step", on_first).put(rank + 2, "head", "grad", "step", on_last)
    return step.put(0, "embed", "grad", "reference", WANTED).put(0, "head", "grad", "reference", WANTED)


def test_copies_of_a_tied_weight_on_two_stages_are_unreduced_where_nothing_summed_them(tmp_path: Path) -> None:
    findings, _ = tied_on_two_stages(tmp_path, WANTED - 1, np.ones(SHAPE)).check()
    assert [(found.kind, found.tensor, found.ranks) for found in findings] == [
        ("unreduced-gradient", "embed", (0, 1)),
        ("unreduced-gradient", "head", (2, 3)),
    ]
    assert "one tensor with head" in findings[0].summary


def test_copies_of_a_tied_weight_that_both_have_the_sum_are_right(tmp_path: Path) -> None:
    assert tied_on_two_stages(tmp_path, WANTED, WANTED).check() == ([], [])


def test_copies_of_a_tied_weight_whose_sum_is_wrong_too_are_not_called_unreduced(tmp_path: Path) -> None:
    findings, _ = tied_on_two_stages(tmp_path, WANTED**2, np.ones(SHAPE)).check()
    assert {found.kind for found in findings} == {"wrong-value"}


def norm_logged(path: Path, value: float) -> Step:
    """Log a norm of two gradients, of which tp splits one and no axis the other."""
    step = Step(path).add("w", "grad", rows_over_tp(WANTED), claim=ROWS_OVER_TP).add("v", "grad", on_all(WANTED))
    return step.add("grad_norm", "scalar", on_all(value), np.sqrt(2 * np.sum(WANTED**2)))


def test_a_norm_that_counts_copies_is_named_with_the_axes_and_a_weight(tmp_path: Path) -> None:
    (found,), _ = norm_logged(tmp_path, np.sqrt(3 * np.sum(WANTED**2))).check()
    assert (found.kind, found.tensor) == ("wrong-scale", "grad_norm")
    assert found.summary.endswith("with the squares of each rank's summed over tp")
    assert found.cause == "Ranks along tp have copies of the gradient of v, and the norm counts each copy"


def test_a_norm_that_counts_each_part_once_is_right(tmp_path: Path) -> None:
    assert norm_logged(tmp_path, np.sqrt(2 * np.sum(WANTED**2))).check() == ([], [])


def test_a_norm_that_no_set_of_axes_gives_is_a_value(tmp_path: Path) -> None:
    (found,), _ = norm_logged(tmp_path, 1.2345).check()
    assert (found.kind, found.tensor) == ("wrong-value", "grad_norm")


def step_with_right_outputs(path: Path) -> Step:
    return Step(path).add("output", "output", on_all(WANTED))


def test_of_right_outputs_a_wrong_loss_is_the_one_finding_and_gradients_come_of_it(tmp_path: Path) -> None:
    step = step_with_right_outputs(tmp_path).add(
        "loss", "scalar", on_all(2.345), 4.0, ("Partial('avg')", "Replicate()")
    )
    (found,), (said,) = step.add("w", "grad", on_all(WANTED**2)).add("v", "grad", on_all(WANTED**3)).check()
    assert (found.kind, found.tensor) == ("wrong-value", "loss")
    assert "unequal numbers of tokens" in found.cause
    assert said.why == "2 of the step's gradients that no rule explains: the loss is wrong, too"


def test_of_a_right_loss_a_wrong_gradient_is_looked_for_in_backward(tmp_path: Path) -> None:
    step = step_with_right_outputs(tmp_path).add("loss", "scalar", on_all(4.0), 4.0)
    (found,), _ = step.add("w", "grad", on_all(WANTED**2)).check()
    assert found.cause.endswith("in backward, although the outputs and the loss are right")
    assert "a collective without a backward" in found.fix


def test_a_weight_that_no_gradient_flows_back_to_is_named_with_those_that_it_makes_wrong(tmp_path: Path) -> None:
    step = step_with_right_outputs(tmp_path).add("loss", "scalar", on_all(4.0), 4.0)
    step.put(0, "router", "grad", "reference", WANTED)
    (found,), (said,) = step.add("w", "grad", on_all(WANTED**2)).check()
    assert "nothing flows back to router (.grad is None)" in found.cause
    assert said.tensor == "router"


def test_a_gradient_that_no_rule_explains_is_told_beside_one_that_lacks_a_reduction(tmp_path: Path) -> None:
    step = step_with_right_outputs(tmp_path).add("loss", "scalar", on_all(4.0), 4.0)
    step.add("norm", "grad", by_tp(WANTED - 1, np.ones(SHAPE))).add("w", "grad", on_all(WANTED**2))
    findings, _ = step.check()
    assert [(found.kind, found.tensor) for found in findings] == [("unreduced-gradient", "norm"), ("wrong-value", "w")]


def test_an_output_whose_rows_are_in_another_order_says_what_stands_where(tmp_path: Path) -> None:
    turned = np.roll(WANTED, 1, axis=0)
    (found,), _ = Step(tmp_path).add("output", "output", by_tp(WANTED, turned)).check()
    assert (found.kind, found.ranks) == ("misordered", (1, 3))
    assert found.summary.endswith("4 of 4 slices are out of place, position 0 holds the slice that belongs at 3")


def test_shards_of_an_output_that_ranks_have_of_each_other_are_misordered(tmp_path: Path) -> None:
    first, second = np.split(WANTED, 2)
    (found,), _ = Step(tmp_path).add("output", "output", by_tp(second, first), claim=ROWS_OVER_TP).check()
    assert (found.kind, found.cause_id) == ("misordered", "part-of-another-rank")
    assert "the output of rank 0 is the part that rank 1 along tp has" in found.summary


def test_columns_in_another_order_name_their_dim(tmp_path: Path) -> None:
    (found,), _ = Step(tmp_path).add("output", "output", on_all(WANTED[:, [0, 2, 1, 3]])).check()
    assert "with dim 1 in another order" in found.summary


def test_a_row_that_stands_twice_is_no_other_order(tmp_path: Path) -> None:
    (found,), _ = Step(tmp_path).add("output", "output", on_all(WANTED[[0, 0, 2, 3]])).check()
    assert found.kind == "wrong-value"


def test_a_reference_that_is_not_finite_is_reported_and_the_rest_is_compared(tmp_path: Path) -> None:
    odd = WANTED.copy()
    odd[0, 1], odd[2, 2] = np.nan, np.inf
    step = Step(tmp_path).add("odd", "grad", on_all(odd), odd).add("finite", "grad", on_all(WANTED), odd)
    step.add("right", "grad", on_all(WANTED)).add("wrong", "grad", on_all(2 * WANTED)).add(
        "loss", "scalar", on_all(1.0), np.nan
    )
    findings, unchecked = step.check()
    assert [(found.kind, found.tensor) for found in findings] == [("wrong-scale", "wrong")]
    why = "2 of 16 elements of the unsharded model's are NaN or infinite"
    assert {(one.tensor, one.why) for one in unchecked} == {
        ("odd", f"its grad: {why}"),
        ("finite", f"its grad: {why}"),
        ("loss", "its scalar: 1 of 1 elements of the unsharded model's are NaN or infinite"),
    }


def test_a_rank_that_claims_another_shape_than_the_others_is_not_compared(tmp_path: Path) -> None:
    step = Step(tmp_path).add("w", "grad", dict.fromkeys((0, 1, 2), WANTED))
    step.layouts.append(LayoutRecord(0, COPIES, (8, 4)))
    step._put(3, "w", "grad", "step", np.ones((8, 4)), 1, (8, 4))
    findings, unchecked = step.check()
    assert findings == []
    assert "its grad: rank 3 claims a part that lies outside [4, 4]" in unchecked[0].why


@pytest.mark.parametrize(
    ("lost", "cause"),
    [
        ({0: [1], 2: [1]}, "slices-without-gradient"),  # both ranks that have the row
        ({1: [0], 3: [0]}, "slices-without-gradient"),
        ({0: [0], 2: [1]}, "rank-dependent-code"),  # copies that lost different rows
        ({0: [0, 1], 2: [0, 1]}, "unexplained-loss"),  # all that they have
    ],
)
def test_rows_that_no_gradient_comes_back_to_are_named_if_no_rank_has_them(tmp_path, lost, cause):
    values = {rank: WANTED[2 * (rank % 2) :][:2].copy() for rank in range(4)}
    for rank, rows in lost.items():
        values[rank][rows] = 0
    (found,), _ = step_with_right_outputs(tmp_path).add("w", "grad", values, claim=ROWS_OVER_TP).check()
    assert found.cause_id == cause
