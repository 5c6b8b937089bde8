"""What is common to all gradients of a step, and what a factor, a norm or a loss comes of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.dump.records.step import of_micro_batch
from shardviz.picture.text.report import step_text
from tests.check.steps import COPIES, ROWS_OVER_TP, WANTED, Step, by_tp, on_all, rows_over_tp

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.explain.finding import Finding

OVER_DP = ("Partial('avg')", "Replicate()")
ROWS_OVER_DP = ("Shard(0)", "Replicate()")


def with_loss(path: Path) -> Step:
    """Begin a step whose outputs and loss are right, with a batch that dp splits."""
    return Step(path).add("output", "output", on_all(WANTED)).add("loss", "scalar", on_all(4.0), 4.0, OVER_DP)


def the_one(step: Step) -> Finding:
    (found,), _ = step.check()
    return found


def test_a_factor_of_all_gradients_is_one_finding_of_another_loss(tmp_path: Path) -> None:
    step = (
        with_loss(tmp_path)
        .add("v", "grad", on_all(WANTED * 1024))
        .add("w", "grad", on_all(WANTED[:1] * 1024), WANTED[:1])
    )
    found = the_one(step)
    assert found.summary == "both gradients are 1024 times the unsharded model's; the loss is right"
    assert "loss scale" in found.cause
    assert "ReduceOp" not in found.fix


def test_a_factor_of_some_gradients_is_told_of_each(tmp_path: Path) -> None:
    step = with_loss(tmp_path).add("v", "grad", on_all(WANTED * 2)).add("w", "grad", on_all(WANTED))
    assert the_one(step).tensor == "v"


def halves_over_dp(values: np.ndarray) -> dict[int, np.ndarray]:
    return {rank: np.split(values, 2)[rank // 2] for rank in range(4)}


def test_a_factor_of_a_part_is_not_said_to_come_of_the_loss_that_all_come_from(tmp_path: Path) -> None:
    """What only the part has in common is named in its place: a module, an axis, a name."""
    step = with_loss(tmp_path / "module")
    for name, factor in (("a.v", 2), ("a.w", 2), ("b.v", 1), ("b.w", 1)):
        step.add(name, "grad", halves_over_dp(WANTED * factor), claim=ROWS_OVER_DP)
    found, _ = step.check()
    assert all("2 of 4 gradients have this factor: all those of a" in one.summary for one in found)
    assert "divide the loss" not in found[0].fix
    assert "the loss that backward runs on" not in found[0].cause
    step = with_loss(tmp_path / "axis").add("a.w", "grad", halves_over_dp(WANTED / 2), claim=ROWS_OVER_DP)
    for name in ("b.w", "a.v"):
        step.add(name, "grad", on_all(WANTED))
    split = the_one(step)
    assert "1 of 3 gradients has this factor: all that dp splits" in split.summary
    assert "the loss that backward runs on" not in split.cause
    step = with_loss(tmp_path / "names")
    for name, factor in (("a.bias", 3), ("a.w", 1), ("b.bias", 3), ("b.w", 1)):
        step.add(name, "grad", on_all(WANTED * factor))
    found, _ = step.check()
    assert "all those named bias" in found[0].summary
    assert "divide each micro-batch's loss" not in found[0].fix
    step = with_loss(tmp_path / "number").add("a.w", "grad", on_all(WANTED * 0.377)).add("b.w", "grad", on_all(WANTED))
    assert "a loss scale" not in the_one(step).cause


def test_a_factor_besides_a_missing_reduction_has_its_own_cause_and_fix(tmp_path: Path) -> None:
    """The mean over dp is missing, and the sum over tp is one too many: mending either leaves the other."""
    apart = {rank: WANTED * (3 if rank < 2 else 1) for rank in range(4)}
    found = the_one(with_loss(tmp_path / "both").add("v", "grad", apart))
    assert found.kind == "unreduced-gradient"
    assert "their mean over dp is 2 times the unsharded model's" in found.summary
    assert "it would still be 2 times the right gradient: " in found.cause
    assert "Its backward sums equal gradients" in found.cause
    assert "get_group('dp')" in found.fix
    assert "remove the all_reduce over tp" in found.fix
    alone = the_one(with_loss(tmp_path / "one").add("v", "grad", {rank: one / 2 for rank, one in apart.items()}))
    assert alone.kind == "unreduced-gradient"
    assert "would still be" not in alone.cause


def test_a_factor_besides_copies_that_are_apart_is_not_of_the_axis_along_which_they_are(tmp_path: Path) -> None:
    apart = {rank: part * (1 + 2 * (rank % 2)) for rank, part in halves_over_dp(WANTED).items()}
    found = the_one(with_loss(tmp_path).add("v", "grad", apart, claim=ROWS_OVER_DP))
    assert "their mean over tp is 2 times" in found.summary
    assert "it would still be 2 times the right gradient: FSDP sums over dp instead of averaging" in found.cause
    assert "sums equal gradients" not in found.cause


def test_a_factor_of_all_gradients_may_come_of_the_loss(tmp_path: Path) -> None:
    step = Step(tmp_path).add("loss", "scalar", on_all(4.0), 4.1, OVER_DP)  # wrong, so each gradient has its own
    for name in ("v", "w"):
        step.add(name, "grad", halves_over_dp(WANTED * 2), claim=ROWS_OVER_DP)
    step.add("frozen", "grad", on_all(WANTED * 0), WANTED * 0)  # zeros have any factor
    fixes = {one.fix for one in step.check()[0] if one.tensor in ("v", "w")}
    assert len(fixes) == 1
    assert "or divide the loss by 2" in fixes.pop()


def test_gradients_of_copies_over_the_batch_are_averaged_and_fsdp_is_told_so(tmp_path: Path) -> None:
    copies = the_one(with_loss(tmp_path / "a").add("v", "grad", on_all(WANTED * 2)))
    assert "op=ReduceOp.AVG to the all_reduce over dp" in copies.fix
    shards = the_one(with_loss(tmp_path / "b").add("v", "grad", halves_over_dp(WANTED * 2), claim=ROWS_OVER_DP))
    assert "set_gradient_divide_factor" in shards.fix
    assert "ReduceOp.AVG" not in shards.fix


def test_clipping_to_a_round_norm_is_no_error_and_to_another_one_is(tmp_path: Path) -> None:
    norm = math.sqrt(float(np.sum(WANTED**2)))
    step = with_loss(tmp_path / "a").add("w", "grad", rows_over_tp(WANTED * 0.5 / (norm + 1e-6)), claim=ROWS_OVER_TP)
    findings, (said,) = step.check()
    assert findings == []
    assert said.why.startswith("the size of the gradients: the step clips them to a norm of 0.5")
    odd = with_loss(tmp_path / "b").add("w", "grad", rows_over_tp(WANTED * 0.512345 / norm), claim=ROWS_OVER_TP)
    assert "Backward runs on 0." in the_one(odd).cause


def test_clipping_by_the_mean_of_the_ranks_norms_is_named(tmp_path: Path) -> None:
    parts = [math.sqrt(float(np.sum(part**2))) for part in np.split(WANTED, 2)]
    step = with_loss(tmp_path).add("w", "grad", rows_over_tp(WANTED * 0.5 / np.mean(parts)), claim=ROWS_OVER_TP)
    assert "clipped to 0.5 by the mean over tp of each rank's own" in the_one(step).cause


def test_a_logged_norm_of_clipped_gradients_is_not_called_wrong(tmp_path: Path) -> None:
    norm = math.sqrt(float(np.sum(WANTED**2)))
    step = with_loss(tmp_path).add("w", "grad", on_all(WANTED * 0.5 / norm)).add("norm", "scalar", on_all(0.5), norm)
    assert step.check()[0] == []


@pytest.mark.parametrize(("reduce", "name"), [(np.mean, "mean"), (np.sum, "sum")])
def test_norms_that_were_reduced_in_place_of_squares_are_named(tmp_path: Path, reduce: object, name: str) -> None:
    parts = [math.sqrt(float(np.sum(part**2))) for part in np.split(WANTED, 2)]
    step = Step(tmp_path).add("w", "grad", rows_over_tp(WANTED), claim=ROWS_OVER_TP)
    step.add("norm", "scalar", on_all(reduce(parts)), np.sqrt(np.sum(WANTED**2)))  # type: ignore[operator]
    found = the_one(step)
    assert found.summary.startswith(f"the value is the {name} over tp of each rank's own norm")
    assert "all_reduce the squares" in found.fix


def test_a_loss_off_by_the_logarithm_of_an_axis_counts_the_vocabulary_again(tmp_path: Path) -> None:
    step = Step(tmp_path).add("output", "output", on_all(WANTED))
    found = the_one(step.add("loss", "scalar", on_all(4.0 + math.log(2)), 4.0))
    assert "too large by log(2) = 0.69315" in found.cause


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ({0: 4.0, 1: 4.0, 2: 5.0, 3: 4.0}, "loss of rank 2 5, unsharded 4"),
        (on_all(5.0), "loss 5, unsharded 4"),
        (on_all(4.0), "loss 4, unsharded 4"),
    ],
    ids=["one rank's", "every rank's", "right"],
)
def test_the_line_of_a_step_has_the_loss_that_is_wrong(tmp_path: Path, losses: dict[int, float], text: str) -> None:
    assert step_text(Step(tmp_path).add("loss", "scalar", losses, 4.0, COPIES).dump()) == text


def test_unequal_numbers_of_tokens_are_a_cause_only_where_the_batch_is_split(tmp_path: Path) -> None:
    step = Step(tmp_path).add("output", "output", on_all(WANTED)).add("loss", "scalar", on_all(4.1), 4.0, COPIES)
    assert "unequal numbers of tokens" in the_one(step).cause
    split = Step(tmp_path / "split").add("w", "grad", rows_over_tp(WANTED), claim=ROWS_OVER_TP)
    split.add("output", "output", on_all(WANTED)).add("loss", "scalar", on_all(4.1), 4.0, COPIES)
    assert "a shard's own words" in the_one(split).cause


def test_the_mean_of_exp_is_not_exp_of_the_mean(tmp_path: Path) -> None:
    losses = {0: 3.0, 1: 3.0, 2: 5.0, 3: 5.0}
    step = Step(tmp_path).add("loss", "scalar", losses, 4.0, OVER_DP)
    step.add("perplexity", "scalar", on_all((math.exp(3) + math.exp(5)) / 2), math.exp(4))
    found = the_one(step)
    assert (found.tensor, found.kind) == ("perplexity", "wrong-value")
    assert "average the losses over dp first" in found.fix


def test_a_count_of_one_ranks_rows_is_summed_and_a_mean_is_divided_once(tmp_path: Path) -> None:
    step = with_loss(tmp_path).add("rows", "scalar", on_all(12.0), 24.0).add("logged", "scalar", on_all(2.0), 4.0)
    (logged, rows), _ = step.check()
    assert "ReduceOp.SUM" in rows.fix
    assert logged.fix == "remove that division: the reduction already takes the mean"


def of_micro_batches(path: Path, first: float, second: float, parts: int = 2) -> Step:
    """Count two micro-batches, whose gradients differ, so many times."""
    one, other = WANTED + 1.0, WANTED**2
    wanted = (one + other) / 2
    step = with_loss(path).add("w", "grad", on_all((first * one + second * other) / 2), wanted)
    for number, part in enumerate((one, other)[:parts]):
        step.put(0, of_micro_batch("w", number), "activation", "reference", part)
    return step


@pytest.mark.parametrize(
    ("times", "cause"),
    [
        ((0.0, 1.0), "Only the last micro-batch counts"),
        ((1.0, 0.0), "Micro-batch 1 (counted from 0) does not count"),
        ((2.0, 1.0), "Nothing clears .grad"),
        ((2.0, 0.0), "The step ran micro-batch 0 (counted from 0) in place of others"),
        ((0.7, 1.2), "that micro-batch's own number of rows"),
    ],
)
def test_how_often_each_micro_batch_counts_says_what_went_wrong(
    tmp_path: Path, times: tuple[float, float], cause: str
) -> None:
    assert cause in the_one(of_micro_batches(tmp_path, *times)).cause


def test_micro_batches_that_count_once_are_right_and_without_their_gradients_nothing_is_reported(
    tmp_path: Path,
) -> None:
    assert of_micro_batches(tmp_path / "a", 1.0, 1.0).check() == ([], [])
    assert "micro-batch" not in the_one(of_micro_batches(tmp_path / "b", 0.0, 1.0, parts=0)).cause


def test_gradients_that_another_stage_has_for_other_layers_were_reduced_over_the_stages(tmp_path: Path) -> None:
    mixed, wanted = WANTED * 0.7 + 1.0, {"layers.0": WANTED, "layers.1": WANTED[::-1]}
    step = Step(tmp_path)
    for stage, (name, whole) in enumerate(wanted.items()):
        for rank in (stage, stage + 2):
            step.put(rank, name, "grad", "step", mixed)
        step.put(0, name, "grad", "reference", whole)
    findings, _ = step.check()
    assert [found.tensor for found in findings] == ["layers.0", "layers.1"]
    assert {found.cause for found in findings} == {
        "The gradient reduction runs over tp, whose ranks have different layers, and mixes the layers"
    }


def test_averaged_gradients_of_a_tied_weight_are_summed_instead(tmp_path: Path) -> None:
    step = Step(tmp_path).stamp("embed", (4, 4)).stamp("head", (4, 4), "embed")
    for rank in (0, 1):
        step.put(rank, "embed", "grad", "step", WANTED / 2).put(rank + 2, "head", "grad", "step", WANTED / 2)
    step.put(0, "embed", "grad", "reference", WANTED).put(0, "head", "grad", "reference", WANTED)
    findings, _ = step.check()
    assert [(found.kind, found.tensor) for found in findings] == [("wrong-scale", "embed"), ("wrong-scale", "head")]
    assert "and don't divide by 2" in findings[0].fix


def test_a_plain_weight_without_a_gradient_on_any_rank_is_cut_off(tmp_path: Path) -> None:
    step = with_loss(tmp_path).add("w", "grad", on_all(WANTED)).put(0, "norm", "grad", "reference", WANTED[0])
    for rank in range(4):
        step.put(rank, "norm", "param", "initial", WANTED[0])
    found = the_one(step)
    assert (found.kind, found.tensor) == ("wrong-value", "norm")
    assert "nothing flows back" in found.cause


def test_a_weight_whose_gradient_is_zero_anyway_is_not_cut_off(tmp_path: Path) -> None:
    step = with_loss(tmp_path).add("w", "grad", on_all(WANTED)).put(0, "norm", "grad", "reference", WANTED[0] * 0)
    for rank in range(4):
        step.put(rank, "norm", "param", "initial", WANTED[0])
    findings, (said,) = step.check()
    assert findings == []
    assert said.why == "its gradient: .grad is None on every rank after the step"


def test_parts_that_ranks_share_and_that_all_ranks_summed_are_different_parts(tmp_path: Path) -> None:
    step = with_loss(tmp_path).stamp("k", (4, 4))
    for rank, rows in enumerate([(0, 2), (2, 4), (0, 2), (2, 4)]):
        step.hold(rank, "k", (4, 4), rows, (0, 4)).put(rank, "k", "grad", "step", WANTED[:2] + WANTED[2:], (4, 4))
    found = the_one(step.put(0, "k", "grad", "reference", WANTED))
    assert "which are different parts" in found.summary


def test_ranks_that_see_one_batch_and_sum_again_are_not_told_to_average(tmp_path: Path) -> None:
    step = Step(tmp_path).add("output", "output", on_all(WANTED)).add("loss", "scalar", on_all(4.0), 4.0)
    step.add("v", "grad", on_all(WANTED)).add("w", "grad", rows_over_tp(WANTED * 2), claim=ROWS_OVER_TP)
    found = the_one(step)
    assert "Its backward sums equal gradients" in found.cause
    assert "AVG" not in found.fix


def test_a_wrong_output_is_told_how_to_be_summed_without_summing_gradients_again(tmp_path: Path) -> None:
    part = np.full(WANTED.shape, 0.5)
    found = the_one(Step(tmp_path).add("output", "output", by_tp(part, WANTED - part)))
    assert "torch.distributed.nn.functional" not in found.fix
    assert "whose backward returns the gradient unchanged" in found.fix
