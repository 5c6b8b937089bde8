"""Why an output is wrong though every weight is right: parts, stages and slices that stand elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.step.words import spans
from shardviz.dump.records.tensors import LayoutRecord
from shardviz.relate.orders import places_of
from tests.check.steps import COPIES, MESH, ROWS_OVER_TP, WANTED, Step, by_tp, on_all, rows_over_tp

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (4, 4)
WRONG = WANTED**2 - 1
BIAS = np.array([0.3, -0.7, 1.1, 0.9])


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


def with_bias(path: Path, own: object) -> Step:
    return Step(path).add("output", "output", own).put(0, "down.bias", "param", "reference", BIAS)


def test_terms_of_a_sum_that_each_have_the_bias_are_not_summed(tmp_path: Path) -> None:
    terms = WANTED - BIAS
    (found,), _ = with_bias(tmp_path, by_tp(0.3 * terms + 0.1 + BIAS, 0.7 * terms - 0.1 + BIAS)).check()
    assert found.kind == "unreduced-output"
    assert "less down.bias, the sum of the ranks' outputs over tp is the unsharded model's" in found.summary


def test_a_sum_that_was_averaged_before_a_bias_is_named(tmp_path: Path) -> None:
    (found,), _ = with_bias(tmp_path, on_all((WANTED - BIAS) / 2 + BIAS)).check()
    assert (found.kind, found.cause.split(",")[0]) == (
        "wrong-scale",
        "The code averages the ranks' terms over dp or tp instead of summing them",
    )


def test_an_output_that_no_sum_beside_a_bias_explains_is_a_value(tmp_path: Path) -> None:
    (found,), _ = with_bias(tmp_path, on_all(WRONG)).check()
    assert (found.kind, found.generic) == ("wrong-value", True)


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


def test_stages_whose_layers_are_exchanged_are_misordered(tmp_path: Path) -> None:
    (found,), _ = pipeline(tmp_path, (2, 3), (0, 1), odd=(0, 1, 2, 3)).check()
    assert (found.kind, found.tensor, found.held) == ("misordered", "layers", "layers 0 to 3 on dp=1, 1, 0, 0")
    assert "stage 0 (ranks 0, 1) has layers.2, layers.3" in found.summary


def test_layers_dealt_out_in_turn_are_misordered_where_the_first_gap_is_wrong(tmp_path: Path) -> None:
    (found,), _ = pipeline(tmp_path, (0, 2), (1, 3), odd=(1, 2, 3)).check()
    assert "layers are placed round-robin" in found.summary


def test_layers_in_turn_are_not_the_cause_where_the_second_of_them_is_right(tmp_path: Path) -> None:
    (found,), _ = pipeline(tmp_path, (0, 2), (1, 3), odd=(3,)).check()
    assert found.kind == "wrong-value"


def test_stages_in_order_are_not_the_cause(tmp_path: Path) -> None:
    (found,), _ = pipeline(tmp_path, (0, 1), (2, 3), odd=(3,)).check()
    assert found.kind == "wrong-value"
    assert found.cause_id == "unexplained-forward"


def test_a_layer_that_runs_on_two_stages_is_duplicated(tmp_path: Path) -> None:
    (found,), _ = pipeline(tmp_path, (0, 1, 2), (2, 3), odd=(3,)).check()
    assert (found.kind, found.tensor) == ("duplicated", "layers.2")


def test_a_layer_on_no_stage_is_missing(tmp_path: Path) -> None:
    (found,), _ = pipeline(tmp_path, (0,), (1, 2), odd=(1, 2)).check()
    assert (found.kind, found.tensor) == ("missing", "layers.3")


def heads(path: Path, starts: tuple[int, int]) -> Step:
    """Cut a query and a key weight over tp, the key's rows beginning at these."""
    step = Step(path).stamp("wq.weight", SHAPE).stamp("wk.weight", SHAPE)
    for rank in MESH.ranks:
        step.hold(rank, "wq.weight", SHAPE, (2 * (rank % 2), 2 * (rank % 2) + 2), (0, 4))
        step.hold(rank, "wk.weight", SHAPE, (starts[rank % 2], starts[rank % 2] + 2), (0, 4))
        step.put(rank, "wk", "activation", "step", WANTED[:, starts[rank % 2] :][:, :2])
    step.put(0, "wk", "activation", "reference", WANTED)
    return step.add("output", "output", on_all(WRONG))


def test_key_heads_in_another_order_than_query_heads_are_misordered(tmp_path: Path) -> None:
    (found,), _ = with_odd(heads(tmp_path, (2, 0)), "wo").check()
    assert (found.kind, found.tensor) == ("misordered", "wk.weight")
    assert "parts of dim 0 are 1, 0 along tp" in found.summary


def test_key_heads_that_a_right_module_has_read_are_not_the_cause(tmp_path: Path) -> None:
    (found,), _ = with_odd(with_activation(heads(tmp_path, (2, 0)), "wo"), "up").check()
    assert found.kind == "wrong-value"
    assert found.cause_id == "unexplained-forward"


def test_key_heads_in_order_are_not_the_cause(tmp_path: Path) -> None:
    (found,), _ = with_odd(heads(tmp_path, (0, 2)), "wo").check()
    assert found.kind == "wrong-value"
    assert found.cause_id == "unexplained-forward"


def fused(path: Path, *rows: tuple[int, int]) -> Step:
    """Cut a weight of 8 rows over tp, and the one that takes 4 features after it."""
    step = Step(path).stamp("gate_up.weight", (8, 4)).stamp("down.weight", SHAPE)
    for rank in MESH.ranks:
        spans_of = {0: ((0, 4),), 1: ((4, 8),)} if not rows else {0: rows, 1: tuple((a + 2, b + 2) for a, b in rows)}
        step.hold(rank, "gate_up.weight", (8, 4), spans_of[rank % 2][0], (0, 4))
        step.hold(rank, "down.weight", SHAPE, (0, 4), (2 * (rank % 2), 2 * (rank % 2) + 2))
    with_activation(step, "gate_up", ("Replicate()", "Shard(1)"), (4, 8))
    return with_odd(step, "down").add("output", "output", on_all(WRONG))


def test_a_fused_weight_in_one_stretch_is_a_wrong_segment(tmp_path: Path) -> None:
    (found,), _ = fused(tmp_path).check()
    assert (found.kind, found.tensor) == ("wrong-segment", "gate_up.weight")
    assert (found.claimed, found.held) == ("[8/2/tp, 4]", "[8/tp, 4]")


def test_a_weight_whose_features_are_all_taken_is_no_fused_one(tmp_path: Path) -> None:
    step = Step(tmp_path).stamp("up.weight", SHAPE).stamp("down.weight", SHAPE)
    for rank in MESH.ranks:
        half = (2 * (rank % 2), 2 * (rank % 2) + 2)
        step.hold(rank, "up.weight", SHAPE, half, (0, 4)).hold(rank, "down.weight", SHAPE, (0, 4), half)
    step = with_odd(with_activation(step, "up", ("Replicate()", "Shard(1)")), "down")
    (found,), _ = step.add("output", "output", on_all(WRONG)).check()
    assert found.kind == "wrong-value"


def embedded(path: Path, first: list[int], second: list[int]) -> Step:
    """Let an embedding put out these rows on the ranks of tp."""
    step = Step(path)
    for rank in MESH.ranks:
        step.put(rank, "embed", "activation", "step", WANTED[second if rank % 2 else first])
    step.put(0, "embed", "activation", "reference", WANTED)
    for rank in MESH.ranks:
        step.put(rank, "head", "activation", "step", WRONG[:2])
    return step.add("output", "output", on_all(WRONG))


def test_positions_that_start_again_are_named_with_their_module(tmp_path: Path) -> None:
    (found,), _ = embedded(tmp_path, [0, 1], [0, 1]).check()
    assert "every rank along dp or tp has slices 0:2 of dim 0 of the output of embed" in found.summary
    assert "Every rank along dp or tp counts the positions for" in found.cause


def test_slices_in_head_tail_order_are_right_and_keys_that_were_not_gathered_come_after(tmp_path: Path) -> None:
    (found,), _ = embedded(tmp_path, [0, 3], [1, 2]).check()
    assert "up to embed each rank along tp has its own slices of dim 0, which are right; head is" in found.summary
    assert "uses only its own keys and values" in found.cause


def with_right_output_and_wrong_loss(path: Path, first: list[int], second: list[int]) -> Step:
    step = Step(path).add("output", "output", on_all(WANTED)).add("loss", "scalar", on_all(2.345), 4.0)
    for rank in MESH.ranks:
        step.put(rank, "embed", "activation", "step", WANTED[second if rank % 2 else first])
    return step.put(0, "embed", "activation", "reference", WANTED)


def test_of_tokens_in_head_tail_order_labels_in_another_order_are_a_cause_of_a_wrong_loss(tmp_path: Path) -> None:
    (found,), _ = with_right_output_and_wrong_loss(tmp_path, [0, 3], [1, 2]).check()
    assert found.cause.startswith("Tokens are in an order of their own at embed")


def test_of_tokens_in_no_order_of_their_own_no_other_order_of_labels_is_suspected(tmp_path: Path) -> None:
    (found,), _ = with_right_output_and_wrong_loss(tmp_path, [0, 1], [0, 1]).check()
    assert "order of their own" not in found.cause


def test_rows_that_stand_twice_are_a_part_that_was_used_twice(tmp_path: Path) -> None:
    (found,), _ = Step(tmp_path).add("output", "output", on_all(WANTED[[0, 1, 0, 1]])).check()
    assert "slices 0:2 of dim 0 appear 2 times" in found.summary


def routed(path: Path, right: set[int]) -> Step:
    """Send a row to each of four experts in chunks over tp; the rows of these are right."""
    scores = np.eye(4) * 2 + WANTED * 0.01
    step = Step(path).stamp("experts", (4, 2, 2))
    for rank in MESH.ranks:
        step.hold(rank, "experts", (4, 2, 2), (2 * (rank % 2), 2 * (rank % 2) + 2), (0, 2), (0, 2))
    step.layouts.append(LayoutRecord(0, COPIES, SHAPE))
    for rank in MESH.ranks:
        step._put(rank, "router", "activation", "step", scores, 0, SHAPE)
    rows = np.array([WANTED[at] if at in right else WRONG[at] for at in range(4)])
    return step.add("output", "output", on_all(rows))


def test_tokens_sent_as_if_experts_were_dealt_out_in_turn_are_named_by_the_experts_that_are_right(
    tmp_path: Path,
) -> None:
    (found,), _ = routed(tmp_path, {0, 3}).check()
    assert (found.kind, found.tensor) == ("misordered", "experts")
    assert "right are the rows of experts 0, 3 alone" in found.summary
    assert "as if they were placed round-robin" in found.cause


def test_experts_of_which_others_are_right_do_not_show_an_order(tmp_path: Path) -> None:
    (found,), _ = routed(tmp_path, {0, 1}).check()
    assert found.kind == "wrong-value"


def test_the_output_of_a_rank_without_the_last_stage_is_not_compared(tmp_path: Path) -> None:
    step = Step(tmp_path).add("output", "output", {2: WRONG, 3: WRONG})
    step.stages = {0: (0, 3), 1: (0, 3), 2: (1, 2), 3: (1, 2)}
    findings, (said,) = step.check()
    assert findings == []
    assert said.why == "the output: rank 2, 3 has it, and stage 3, the last, ran on rank 0, 1"


def test_slices_are_found_wherever_they_stand() -> None:
    found = places_of(WANTED[[2, 0]], WANTED, 1e-9)
    assert found is not None
    assert (found[0], found[1].tolist()) == (0, [2, 0])
    assert places_of(np.ones((2, 4)), np.ones((4, 4)), 1e-9) is None
    assert spans([0, 1, 2, 9, 10, 4]) == "0:3+9:11+4"


def test_rows_over_tp_that_are_right_stay_quiet(tmp_path: Path) -> None:
    step = Step(tmp_path).add("output", "output", rows_over_tp(WANTED), claim=ROWS_OVER_TP)
    assert step.check() == ([], [])
