"""Lines that make a loss of other labels than the unsharded model's, or of micro-batches' means.

Labels may be of fewer rows, or of other rows. Micro-batches that each divide by their own count make a mean of means.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.calls import SELECTS
from shardviz.check.step.lines.fault import Fault, at, fault_at
from shardviz.check.step.lines.search import DIVISIONS
from shardviz.explain.step.line_rows import LabelsOfOtherRows, OtherLabels, RowsLeftOut, TargetsOfOtherMicroBatch
from shardviz.explain.step.lines import MisplacedLine, WrongLine, WrongLines
from shardviz.explain.step.losses import MeanOfMeans
from shardviz.layout.region import Region
from shardviz.relate.tolerance import SINGLE, STEP
from shardviz.relate.values import magnitude, part_of
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import LineRecord
    from shardviz.explain.cause import Cause

LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "kl_div", "smooth_l1_loss"),
    *("binary_cross_entropy", "ctc_loss", "huber_loss", "l1_loss", "multi_margin_loss", "poisson_nll_loss"),
    *("multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss"),
)
"""Functions of rows and their labels."""

PAIRED = (*LOSSES, "sub", "gather")
"""These, and what a loss begins with that is written by hand."""

MAX_LISTED = 4

MAX_COMPARED = 1 << 24
"""Numbers that are compared at most to find rows in others."""


def may_be_of_labels(fault: Fault | None) -> bool:
    """Whether no line is known for a loss, or one that takes or orders slices: labels may be other rows', or fewer."""
    cause = fault.cause if fault is not None else None
    is_of_slices = fault is not None and type(cause) is WrongLine and fault.function in SELECTS
    is_of_slices |= isinstance(cause, MisplacedLine) and not cause.is_of_rank
    return cause is None or isinstance(cause, WrongLines) or is_of_slices


def means_fault(states: States) -> Fault | None:
    """Return the line that divides each micro-batch's sum by its own count, if both add up to the whole batch's."""
    lines = states.lines
    axes, mesh, ranks = states.batch_axes, states.mesh, _ranks_of_batch(states)
    for calls, of_whole in lines.rounds.values():
        operands = {len(call.inputs) for call in calls} | {len(line.inputs) for line in of_whole}
        if calls[0].function not in DIVISIONS or operands != {2} or len(calls) < 2 or not of_whole:
            continue
        wanted = [states.whole(number) for number in of_whole[-1].inputs]
        sums, counts = (_numbers(states, calls, operand, ranks) for operand in (0, 1))
        if len(set(counts)) < 2 or not (_adds_up(sums, wanted[0]) and _adds_up(counts, wanted[1])):
            continue
        shown = ", ".join(f"{count:.5g}" for count in counts[: len(calls)])
        sentence = f"{at(calls[0].line)} divides each micro-batch's sum by its own count: {shown} on rank {ranks[0]}"
        size = mesh.size_over(axes)
        return fault_at(calls[0], sentence, MeanOfMeans(" and ".join(axes), size, calls[0].place, len(calls)))
    return None


def _ranks_of_batch(states: States) -> list[int]:
    """Return one rank for each part of the batch."""
    mesh = states.mesh
    others = [mesh.axis_index(axis) for axis in mesh.axes if axis not in states.batch_axes]
    return [rank for rank in mesh.ranks if not any(mesh.coord_of(rank)[index] for index in others)]


def _adds_up(numbers: Sequence[float], whole: NDArray[np.float64] | None) -> bool:
    is_number = whole is not None and whole.size == 1 and bool(numbers)
    return is_number and whole is not None and math.isclose(sum(numbers), whole.item(), rel_tol=SINGLE)


def _numbers(states: States, calls: Sequence[Call], operand: int, ranks: Sequence[int]) -> list[float]:
    """Return the one number that each call gets on each rank, rank after rank; none if one isn't there."""
    held = [states.held(call.inputs[operand]) for call in calls]
    if not all(rank in arrays and arrays[rank].size == 1 for arrays in held for rank in ranks):
        return []
    return [arrays[rank].item() for rank in ranks for arrays in held]


def labels_fault(states: States) -> Fault | None:
    """Return the line that gives a loss other labels, of all ranks together, than the unsharded model's."""
    lines = states.lines
    for rank, own in lines.sharded.items():
        for function in PAIRED:
            whole, calls = (_of_pairs(side.lines, function) for side in (lines.unsharded, own))
            paired = _micro_batches_of(states, whole[0], rank, calls) if len(whole) == 1 < len(calls) else {}
            if paired:
                return _of_other_micro_batch(calls, paired)
    for function in LOSSES:
        whole = _of_pairs(lines.unsharded.lines, function)
        of_ranks = {rank: _of_pairs(own.lines, function) for rank, own in lines.sharded.items()}
        if len(whole) != 1 or not all(of_ranks.values()):
            continue
        fault = _left_out(lines, whole[0], of_ranks)
        if fault is None and all(len(calls) == 1 for calls in of_ranks.values()):
            fault = _exchanged(states, whole[0], {rank: calls[0] for rank, calls in of_ranks.items()})
        if fault is not None:
            return fault
    return None


def _of_pairs(lines: Iterable[LineRecord], function: str) -> list[LineRecord]:
    """Return the calls of a function that are given rows and something for each of them."""
    return [line for line in lines if line.function == function and len(line.inputs) > 1]


def _micro_batches_of(states: States, whole: LineRecord, rank: int, calls: Sequence[LineRecord]) -> dict[int, int]:
    """Return for each call with the targets of other rows the call that has these rows; none if that isn't all.

    Each call gets some rows of what the unsharded model gives one call, which a rank with parts of rows doesn't.
    """
    rows, targets = (_by_rows(states.whole(number)) for number in whole.inputs[:2])
    if rows is None or targets is None or len(rows) != len(targets):
        return {}
    due: list[NDArray[np.float64]] = []
    given: list[NDArray[np.float64]] = []
    wrong = []
    for call in calls:
        held, own = (_by_rows(states.held(((rank, number),)).get(rank)) for number in call.inputs[:2])
        if held is None or own is None or held.size * len(rows) > MAX_COMPARED:
            return {}
        if (held.shape[1:], own.shape) != (rows.shape[1:], (len(held), *targets.shape[1:])):
            return {}
        is_same = np.abs(held[:, None] - rows[None]).max(-1) <= STEP * magnitude(rows)
        if not is_same.any(1).all():
            return {}
        is_right = (is_same & (own[:, None] == targets[None]).all(-1)).any(1).all()
        wrong += [] if is_right else [len(given)]
        due.append(targets[is_same.argmax(1)])
        given.append(own)
    paired = {at: [other for other in range(len(calls)) if np.array_equal(given[at], due[other])] for at in wrong}
    if not all(paired.values()):
        return {}
    # Equal targets fit several calls: then a reversed order is the likeliest.
    mirrored = {at: len(calls) - 1 - at for at in paired}
    is_mirrored = all(mirrored[at] in others for at, others in paired.items())
    return mirrored if is_mirrored else {at: others[0] for at, others in paired.items()}


def _by_rows(array: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """Return an array with one dim besides its first; None if it has no rows."""
    return array.reshape(len(array), -1) if array is not None and array.ndim and array.size else None


def _of_other_micro_batch(calls: Sequence[LineRecord], paired: Mapping[int, int]) -> Fault:
    frame, function = calls[0].frames[calls[0].innermost], calls[0].function
    rows, targets = (listed(numbers, MAX_LISTED) for numbers in (paired.keys(), paired.values()))
    outputs = f"the outputs of {'micro-batches' if len(paired) > 1 else 'micro-batch'} {rows}"
    sentence = f"{at(frame)} gives {function} {outputs} with the targets of {targets}"
    is_reversed = all(own + other == len(calls) - 1 for own, other in paired.items())
    return Fault(frame, function, sentence, TargetsOfOtherMicroBatch(frame.place, function, is_reversed=is_reversed))


def other_labels_fault(states: States) -> Fault | None:
    """Return the line that gives a loss other labels than the unsharded model's for rows of which all else is right."""
    for call in states.lines.calls:
        if call.whole is None or call.function not in LOSSES or len(call.inputs) < 2:
            continue
        rows, labels, *others = call.inputs
        is_only = all(states.placed(value).is_known for value in (rows, *others))
        wanted, held = states.reference_of(labels), states.held(labels)
        if not (is_only and states.is_index(labels) and states.placed(labels).is_wrong) or wanted is None:
            continue
        region = _regions_of(states, rows, labels)
        for rank, array in held.items():
            due = part_of(wanted, region[rank]) if rank in region else None
            if due is None or due.shape != array.shape or np.array_equal(due, array):
                continue
            where, count = tuple(np.argwhere(due != array)[0].tolist()), int(np.count_nonzero(due != array))
            function, place = call.function, call.place
            first = f"label {list(where)} is {int(array[where])}, the unsharded model has {int(due[where])}"
            sentence = (
                f"on rank {rank} {count} of {array.size} labels that {at(call.line)} gives {function} differ from the "
                f"unsharded model's for the same rows: {first}"
            )
            parts = {region[other].dims: held[other].ravel() for other in held if other in region}
            is_moved = np.array_equal(np.sort(np.concatenate([*parts.values()])), np.sort(wanted, axis=None))
            of_rows = LabelsOfOtherRows(place, function, count, array.size)
            cause: Cause = of_rows if is_moved else OtherLabels(place, function)
            fault = fault_at(call, sentence, cause)
            return replace(fault, is_forward=True)
    return None


def _regions_of(states: States, rows: Value, labels: Value) -> dict[int, Region]:
    """Return the part of all labels that belongs to each rank's rows: both have as many rows along some dim."""
    layout, wanted, whole = states.placed(rows).layout, states.reference_of(rows), states.reference_of(labels)
    regions = dict(layout.regions()) if layout is not None else {}
    if wanted is None or whole is None or not whole.ndim:
        return {}
    dims = [dim for dim, size in enumerate(wanted.shape) if size == whole.shape[0]]
    split = [dim for dim in dims if any(region.shape[dim] < wanted.shape[dim] for region in regions.values())]
    if len(split) != 1:
        return {}
    around = Region.whole(whole.shape).dims
    return {rank: Region((region.dims[split[0]], *around[1:])) for rank, region in regions.items()}


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
    cause = RowsLeftOut(line.place, function, total, wanted)
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
        is_same = np.abs(rows_held[:, None] - rows[None]).max(-1) <= STEP * magnitude(rows)
        is_right = (is_same & (labels_held[:, None] == labels[None])).any(1)
        if not is_same.any(1).all():
            return None
        if not is_right.all():
            row = int(np.argmin(is_right))
            label, wanted = int(labels_held[row]), int(labels[int(np.argmax(is_same[row]))])
            frame, function = line.frames[line.innermost], whole.function
            gives = f"{at(frame)} gives {function} label {label} for row {row} on rank {rank}"
            cause = LabelsOfOtherRows(frame.place, function, int(np.count_nonzero(~is_right)), len(rows_held))
            return Fault(frame, function, f"{gives}; in the unsharded model this row has {wanted}", cause)
    return None
