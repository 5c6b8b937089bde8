"""Lines that make a loss of other labels than the unsharded model's: of fewer rows, or of other rows' labels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.fault import Fault, at, place_of
from shardviz.explain.step.own_rows import LabelsOfOtherRows, RowsLeftOut
from shardviz.relate.tolerance import STEP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.step.lines.calls import Lines
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.lines import LineRecord

LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "kl_div", "smooth_l1_loss")
"""Functions of rows and their labels."""

MAX_COMPARED = 1 << 24
"""Numbers that are compared at most to find rows in others."""


def labels_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line that gives a loss other labels, of all ranks together, than the unsharded model's."""
    for function in LOSSES:
        whole = [line for line in lines.unsharded.lines if line.function == function and len(line.inputs) > 1]
        of_ranks = {
            rank: [line for line in own.lines if line.function == function and len(line.inputs) > 1]
            for rank, own in lines.sharded.items()
        }
        if len(whole) != 1 or not all(of_ranks.values()):
            continue
        fault = _left_out(lines, whole[0], of_ranks)
        if fault is None and all(len(calls) == 1 for calls in of_ranks.values()):
            fault = _exchanged(states, whole[0], {rank: calls[0] for rank, calls in of_ranks.items()})
        if fault is not None:
            return fault
    return None


def _left_out(lines: Lines, whole: LineRecord, of_ranks: Mapping[int, list[LineRecord]]) -> Fault | None:
    wanted = math.prod(lines.wholes[whole.inputs[1]].shape)
    held = {
        rank: sum(math.prod(lines.records[rank, line.inputs[1]].shape) for line in calls)
        for rank, calls in of_ranks.items()
    }
    total, (rank, calls) = sum(held.values()), next(iter(of_ranks.items()))
    if total >= wanted:
        return None
    line, function = calls[0].frames[calls[0].innermost], whole.function
    gets = f"{at(line)} gives {function} {held[rank]} labels on rank {rank} and {total} on all ranks"
    cause = RowsLeftOut(place_of(line), function, total, wanted)
    return Fault(line, function, f"{gets}; the unsharded model's loss is of {wanted}", cause)


def _exchanged(states: States, whole: LineRecord, calls: Mapping[int, LineRecord]) -> Fault | None:
    """Return the fault of a loss that gets the unsharded model's rows with labels that no row like them has."""
    rows, labels = (states.whole(number) for number in whole.inputs[:2])
    of_rows, of_labels = (
        states.held(tuple((rank, line.inputs[at_input]) for rank, line in calls.items())) for at_input in (0, 1)
    )
    if rows is None or labels is None or (rows.ndim, labels.ndim) != (2, 1) or not labels.size:
        return None
    for rank, line in calls.items():
        rows_held, labels_held = of_rows.get(rank), of_labels.get(rank)
        if (
            rows_held is None
            or labels_held is None
            or rows_held.shape[1:] != rows.shape[1:]
            or len(rows_held) != len(labels_held)
        ):
            return None
        if rows_held.size * len(rows) > MAX_COMPARED:
            return None
        is_same = np.abs(rows_held[:, None] - rows[None]).max(-1) <= STEP * float(np.max(np.abs(rows)))
        is_right = (is_same & (labels_held[:, None] == labels[None])).any(1)
        if not is_same.any(1).all():
            return None
        if not is_right.all():
            row = int(np.argmin(is_right))
            label, wanted = int(labels_held[row]), int(labels[int(np.argmax(is_same[row]))])
            frame, function = line.frames[line.innermost], whole.function
            gives = f"{at(frame)} gives {function} label {label} for row {row} on rank {rank}"
            cause = LabelsOfOtherRows(place_of(frame), function, int(np.count_nonzero(~is_right)), len(rows_held))
            return Fault(frame, function, f"{gives}; in the unsharded model this row has {wanted}", cause)
    return None
