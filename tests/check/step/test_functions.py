"""Losses over a split vocabulary: masks that tell where a backward is wrong, and maxima of each rank's own words."""

from types import SimpleNamespace

import numpy as np
import pytest

from shardviz.check.step.lines.calls import Lines
from shardviz.check.step.lines.functions import may_lack_sum, value_at
from shardviz.check.step.lines.peaks import own_peak_fault
from shardviz.check.step.lines.state import UNKNOWN, State
from shardviz.dump.records.trace import FrameRecord, LineRecord, LinesRecord, ValueRecord
from shardviz.explain.step.line_reductions import ExtremeOfPart
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.placements import Replicate, Shard

MESH = parse_mesh("tp=2")
WRONG = {0: np.array([[1, 0], [0, 0], [0, 1]], bool), 1: np.zeros((3, 2), bool)}
SET = {0: np.array([True, False, True]), 1: np.zeros(3, bool)}

LOGITS, PEAK, COLUMN, SHIFTED, POWERS, TOTAL, SUMMED = range(7)
CALLS = (
    ("amax", (LOGITS,), PEAK, "-1"),
    ("getitem", (PEAK,), COLUMN, ""),
    ("sub", (LOGITS, COLUMN), SHIFTED, ""),
    ("exp", (SHIFTED,), POWERS, ""),
    ("sum", (POWERS,), TOTAL, "-1"),
    ("all_reduce", (TOTAL,), SUMMED, ""),
)


def test_a_mask_that_is_set_where_gradients_are_wrong_is_known_either_way():
    assert value_at(SET, WRONG) == "True"
    assert value_at({rank: ~mask for rank, mask in SET.items()}, WRONG) == "False"


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {0: SET[0]},
        {**SET, 1: ~SET[1]},
        {**SET, 1: np.zeros(2, bool)},
        {rank: mask.any() for rank, mask in SET.items()},
    ],
)
def test_a_mask_that_is_set_elsewhere_tells_nothing(masks):
    assert value_at(masks, WRONG) == ""


def test_no_mask_tells_where_all_gradients_are_wrong_or_none():
    of_all = {rank: np.ones(3, bool) for rank in WRONG}
    assert value_at(of_all, {rank: np.ones((3, 2), bool) for rank in WRONG}) == ""
    assert value_at(of_all, {rank: np.zeros((3, 2), bool) for rank in WRONG}) == ""


def states_of(calls=CALLS, *, dim=1, differs=True):
    """Return the states of some calls on two ranks that have their parts of logits along a dim."""
    records = []
    for number, (function, inputs, output, numbers) in enumerate(calls):
        is_sum = function == "all_reduce"
        frames = (FrameRecord("loss.py", number, "loss", f"made = {function}"),)
        ranks = (0, 1) if is_sum else ()
        records.append(LineRecord(0, function, frames, 0, inputs, (output,), ranks, is_sum, numbers))
    values = tuple(ValueRecord(number, (4, 6)) for number in range(10))
    sharded = {rank: LinesRecord("m", tuple(records), values) for rank in MESH.ranks}
    lines = Lines("m", sharded, LinesRecord("m", is_unsharded=True), "m")
    shape = (8, 12) if dim is not None else ()
    parts = State("right", Layout.from_placements(MESH, shape, (Replicate() if dim is None else Shard(dim),)))
    return SimpleNamespace(
        lines=lines,
        mesh=MESH,
        forward=lambda value: parts if value[0][1] == LOGITS else UNKNOWN,
        differs_along=lambda value, axis: differs,
    )


def test_exponentials_relative_to_each_ranks_own_maximum_are_not_summed():
    fault = own_peak_fault(states_of())
    assert fault.cause == ExtremeOfPart("loss.py:0", "amax", "tp", "max")
    assert "loss.py:0 `made = amax` is the first wrong line" in fault.sentence
    assert "line 5 `made = all_reduce` sums exponentials relative to it over tp" in fault.sentence


def test_a_maximum_that_ranks_reduce_first_is_right():
    reduced = (CALLS[0], ("all_reduce", (PEAK,), 7, ""), ("getitem", (7,), COLUMN, ""), *CALLS[2:])
    assert own_peak_fault(states_of(reduced)) is None


def test_sums_that_are_rescaled_before_they_are_added_are_right():
    rescaled = (*CALLS[:5], ("mul", (TOTAL, 8), 7, ""), ("all_reduce", (7,), SUMMED, ""))
    assert own_peak_fault(states_of(rescaled)) is None


def test_a_maximum_of_whole_rows_is_right_if_ranks_have_other_rows():
    assert own_peak_fault(states_of(dim=0)) is None


def test_equal_maxima_are_right():
    assert own_peak_fault(states_of(differs=False)) is None


def test_an_extreme_of_two_tensors_or_of_a_number_is_of_no_dim():
    of_two = (("max", (LOGITS, 9), PEAK, ""), *CALLS[1:])
    assert own_peak_fault(states_of(of_two)) is None
    assert own_peak_fault(states_of(dim=None)) is None


def test_a_sum_may_be_missing_if_ranks_use_what_all_of_them_sum_for_their_own_parts():
    states = states_of()
    parts, whole = states.forward(((0, LOGITS),)), State("right", Layout.from_placements(MESH, (8,), (Replicate(),)))
    assert may_lack_sum(states, states.lines.calls, [parts])
    assert not may_lack_sum(states, states.lines.calls[:-1], [parts])
    assert not may_lack_sum(states, states.lines.calls, [whole])
