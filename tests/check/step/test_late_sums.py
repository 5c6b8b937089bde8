"""Two matrices in a row, the second in parts: where the terms of its input's gradient are summed."""

from types import SimpleNamespace

import pytest

from shardviz.check.step.lines.backward import late_sum
from shardviz.check.step.lines.calls import Lines
from shardviz.check.step.lines.fault import Fault
from shardviz.check.step.lines.naming import without_module
from shardviz.check.step.lines.state import State
from shardviz.dump.records.trace import FrameRecord, LineRecord, LinesRecord, ValueRecord
from shardviz.explain.step.lines import WrongLine
from shardviz.explain.step.whole_step import UnexplainedForward

GIVEN, COPY, FIRST, LOW, SECOND, MADE = range(6)
CALLS = (("view_as", (GIVEN,), COPY), ("linear", (COPY, FIRST), LOW), ("linear", (LOW, SECOND), MADE))
ORIGINS = {GIVEN: "input 0", FIRST: "weight down.weight", SECOND: "weight up.weight"}


def lines_of(asked="block.up"):
    calls = [
        LineRecord(0, function, (FrameRecord("lora.py", at, "forward", function),), 0, inputs, (output,))
        for at, (function, inputs, output) in enumerate(CALLS)
    ]
    values = tuple(ValueRecord(number, (2, 2), ORIGINS.get(number, "")) for number in range(6))
    sharded = {rank: LinesRecord("block", tuple(calls), values) for rank in (0, 1)}
    return Lines("block", sharded, LinesRecord("block", is_unsharded=True), asked)


def line_of_sum(gradients, *, axis="tp", asked="block.up"):
    states = {number: State(kind, axes=("tp",) if kind == "terms" else ()) for number, kind in gradients.items()}
    placed = lambda value, gradient: states.get(value[0][1], State("unknown"))  # noqa: E731
    return late_sum(SimpleNamespace(lines=lines_of(asked), placed=placed), axis)


def test_a_line_behind_which_gradients_are_terms_and_in_front_right_sums_too_late():
    assert line_of_sum({GIVEN: "right", COPY: "none", LOW: "terms"}) == "lora.py:0"
    assert line_of_sum({GIVEN: "right", COPY: "terms", LOW: "terms"}) == "lora.py:0"


@pytest.mark.parametrize(
    "gradients",
    [
        {GIVEN: "right", COPY: "right", LOW: "right"},
        {GIVEN: "none", COPY: "none", LOW: "terms"},
        {GIVEN: "terms", COPY: "terms", LOW: "terms"},
        {GIVEN: "unknown", COPY: "none", LOW: "terms"},
    ],
)
def test_without_a_later_sum_none_is_too_late(gradients):
    assert line_of_sum(gradients) == ""


def test_terms_over_another_axis_or_of_no_module_of_torchs_tell_nothing():
    gradients = {GIVEN: "right", COPY: "none", LOW: "terms"}
    assert line_of_sum(gradients, axis="dp") == ""
    assert line_of_sum(gradients, asked="block") == ""


def details_with(line, asked):
    """Return what is left of a finding's details if a line is the first wrong one."""
    details = (f"{asked} is the first wrong module: its output doesn't match", "the output is off")
    finding = UnexplainedForward().finding("output", (0,), "wrong", details=details)
    frame = FrameRecord("lora.py", line, "forward", CALLS[line][0])
    fault = Fault(frame, CALLS[line][0], "", WrongLine(frame.place, CALLS[line][0]))
    return without_module(finding, lines_of(asked), fault).details


def test_a_module_of_torchs_is_not_wrong_if_a_line_after_it_is_first():
    assert len(details_with(2, "block.down")) == 1
    assert len(details_with(1, "block.down")) == len(details_with(0, "block.down")) == 2
    assert len(details_with(2, "block")) == 2
