"""Lines that take a rank's part for the first of the whole: queries of a mask, rows of a table, rounds of a loop."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.fault import Fault, at, fault_at, place_of, reached
from shardviz.explain.step.lines import ELEMENTWISE, UnlikeOperands
from shardviz.explain.step.own_rows import CausalMaskOfPart, LoopFromZero
from shardviz.relate.tolerance import STEP
from shardviz.relate.values import error_of, part_of, slices_of
from shardviz.text import join_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.lines import LineRecord

    Array = NDArray[np.float64]

ATTENTION = "scaled_dot_product_attention"
MAX_COMPARED = 1 << 22
"""Numbers that are compared to find a rank's rows among those of the whole."""


def own_rows_fault(lines: Lines, states: States) -> Fault | None:
    """Return the first line that mixes rows of other places, or a causal mask of a part; None if values prove none."""
    for call in lines.calls:
        if call.whole is not None and call.outputs and states.forward(call.outputs[0]).kind == "none":
            return _causal_fault(lines, states, call) or _unlike_rows_fault(lines, states, call)
    return None


def _causal_fault(lines: Lines, states: States, call: Call) -> Fault | None:
    """Return the fault of an attention whose causal mask counts a rank's queries from 0, if its values prove that."""
    if call.first.function != ATTENTION or "True" not in call.first.numbers.split() or len(call.inputs) != 3:
        return None
    state, whole = states.forward(call.inputs[0]), _whole(lines, states, call.outputs[0])
    held, queries, keys, values = [states.held(value) for value in (call.outputs[0], *call.inputs)]
    if state.kind != "right" or state.layout is None or whole is None or whole.ndim < 2:
        return None
    wrong: dict[int, list[int]] = {}
    for rank, region in state.layout.regions():
        if not all(rank in side for side in (held, queries, keys, values)):
            return None
        rows = [row for begin, end in region.dims[-2] for row in range(begin, end)]
        from_zero = _attention(queries[rank], keys[rank], values[rank], range(len(rows)))
        right = _attention(queries[rank], keys[rank], values[rank], rows)
        if from_zero is None or right is None or error_of(part_of(whole, region), right) > STEP:
            return None
        if error_of(held[rank], from_zero) > STEP:
            return None
        if error_of(from_zero, right) > STEP:
            wrong[rank] = rows
    if not wrong:
        return None
    rank, rows = next(iter(wrong.items()))
    has = f"rank {rank} has queries {join_numbers(rows)} of {state.layout.shape[-2]}"
    sentence = f"{reached(call)} is the first wrong line: {has}, and is_causal=True masks them as 0-{len(rows) - 1}"
    return fault_at(call, sentence, CausalMaskOfPart(place_of(call.line), call.first.function))


def _attention(query: Array, key: Array, value: Array, rows: Sequence[int]) -> Array | None:
    """Return a causal attention of queries at some places of the sequence; None if it has another form."""
    is_of_one_form = query.ndim == key.ndim == value.ndim > 1 and key.shape[:-1] == value.shape[:-1]
    if not is_of_one_form or query.shape[-1] != key.shape[-1] or max(rows, default=key.shape[-2]) >= key.shape[-2]:
        return None
    if query.shape[-2] != len(rows) or query.shape[:-3] != key.shape[:-3] or not (query.size and key.size):
        return None
    if query.ndim > 2 and query.shape[-3] != key.shape[-3]:
        times, left = divmod(query.shape[-3], key.shape[-3])
        if left:
            return None
        key, value = key.repeat(times, -3), value.repeat(times, -3)
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    scores = np.where(np.arange(key.shape[-2]) <= np.array(rows)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended: Array = weights / weights.sum(-1, keepdims=True) @ value
    return attended


def _unlike_rows_fault(lines: Lines, states: States, call: Call) -> Fault | None:
    """Return the fault of a call that combines two tensors of which a rank has rows of different places."""
    if call.first.function not in ELEMENTWISE or len(call.inputs) != 2:
        return None
    sides = [(states.held(value), _whole(lines, states, value)) for value in call.inputs]
    sizes = [whole.ndim for held, whole in sides if whole is not None and held]
    for back in range(1, min(sizes) + 1) if len(sizes) == len(sides) else ():
        rows = [{rank: _rows(array, whole, -back) for rank, array in held.items()} for held, whole in sides]
        if not all(places for of_rank in rows for places in of_rank.values()):
            continue
        unlike = [rank for rank in rows[0] if rows[0][rank] != rows[1].get(rank)]
        if unlike:
            places = [join_numbers(of_rank.get(unlike[0], ())) for of_rank in rows]
            given = f"slices {places[0]} of one tensor with slices {places[1]} of the other on rank {unlike[0]}"
            sentence = f"{reached(call)} is the first wrong line: {call.first.function} combines {given}"
            cause = UnlikeOperands(place_of(call.line), call.first.function, given, max(sizes) - back)
            return fault_at(call, sentence, cause)
    return None


def _whole(lines: Lines, states: States, value: Value) -> Array | None:
    return states.whole(lines.wanted[value]) if value in lines.wanted else None


def _rows(held: Array, whole: Array | None, dim: int) -> tuple[int, ...]:
    """Return where a rank's slices along a dim stand in the whole; empty if it has all, or that isn't certain."""
    if whole is None or held.ndim != whole.ndim or held.shape[dim] >= whole.shape[dim]:
        return ()
    slices, all_slices = slices_of(held, dim), slices_of(whole, dim)
    if slices.shape[1] != all_slices.shape[1] or slices.size * len(all_slices) > MAX_COMPARED or not slices.size:
        return ()
    near = STEP * float(np.max(np.abs(whole), initial=0.0))
    alike = np.abs(slices[:, None] - all_slices[None]).max(-1) <= near
    return tuple(map(int, alike.argmax(1))) if (alike.sum(1) == 1).all() else ()


def loop_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line of a loop over a rank's own slices that uses the loop's counter for the whole's slices."""
    rounds = list(_rounds(lines, states))
    slices = [(calls, first) for calls, first, _ in rounds if len(set(first.values())) > 1]
    for calls, wholes in ((calls, wholes) for calls, first, wholes in rounds if set(first.values()) == {0}):
        numbers = [call.first.numbers for call in calls]
        if any(call.counts_by_rank for call in calls) or len(set(numbers)) != len(numbers):
            continue
        for reading, first in slices:
            rank, begin = max(first.items(), key=lambda pair: pair[1])
            is_wrong = any(
                not _equal(states.held(call.outputs[0]).get(rank), wholes[begin + at]) for at, call in enumerate(calls)
            )
            if is_wrong and calls[0].line.file == reading[0].line.file and _meet(lines, calls[0], reading[0]):
                return _fault_of_loop(calls, reading, rank, begin)
    return None


def _fault_of_loop(calls: Sequence[Call], reading: Sequence[Call], rank: int, begin: int) -> Fault:
    call, count = calls[0], len(calls)
    reads = f"{at(reading[0].line, call.line)} reads slices {begin}-{begin + count - 1} on rank {rank}"
    counts = f"{call.first.function} takes {call.first.numbers} to {calls[-1].first.numbers} there"
    sentence = f"{reached(call)} is the first wrong line: {reads}, and {counts}"
    cause = LoopFromZero(place_of(call.line), call.first.function, place_of(reading[0].line), count)
    return fault_at(call, sentence, cause)


def _rounds(lines: Lines, states: States) -> Iterator[tuple[list[Call], dict[int, int], list[Array]]]:
    """Yield the calls of a line that runs less often than in the unsharded model, with each rank's first round.

    The unsharded model's results are yielded with them. A rank's rounds follow each other in the unsharded model.
    """
    wholes: defaultdict[object, list[LineRecord]] = defaultdict(list)
    of_ranks: defaultdict[object, list[Call]] = defaultdict(list)
    for line in lines.unsharded.lines:
        wholes[_key(line)].append(line)
    for call in lines.calls:
        of_ranks[_key(call.first)].append(call)
    for key, calls in of_ranks.items():
        count, of_whole = len(calls), wholes.get(key, [])
        is_part = 1 < count < len(of_whole) and len(of_whole) % count == 0
        if not is_part or {len(call.outputs) for call in calls} | {len(line.outputs) for line in of_whole} != {1}:
            continue
        arrays = [states.whole(line.outputs[0]) for line in of_whole]
        results = [array for array in arrays if array is not None]
        held = [states.held(call.outputs[0]) for call in calls]
        firsts = {rank: _first(held, results, rank) for rank in lines.sharded} if len(results) == len(arrays) else {}
        first = {rank: number for rank, number in firsts.items() if number is not None}
        if first and len(first) == len(firsts):
            yield calls, first, results


def _first(held: Sequence[Mapping[int, Array]], wholes: Sequence[Array], rank: int) -> int | None:
    """Return the round of the unsharded model that is a rank's first, if one alone fits."""
    starts = range(0, len(wholes), len(held))
    fitting = [
        start for start in starts if all(_equal(own.get(rank), wholes[start + at]) for at, own in enumerate(held))
    ]
    return fitting[0] if len(fitting) == 1 else None


def _equal(held: Array | None, whole: Array) -> bool:
    return held is not None and held.shape == whole.shape and error_of(held, whole) <= STEP


def _key(line: LineRecord) -> object:
    return line.call, tuple((frame.file, frame.line) for frame in line.frames), line.function


def _meet(lines: Lines, first: Call, second: Call) -> bool:
    """Whether a call is given what comes of both of two calls."""
    of_first, of_second = ({*_derived(lines, call)} for call in (first, second))
    return any({*call.inputs} & of_first and {*call.inputs} & of_second for call in lines.calls)


def _derived(lines: Lines, call: Call) -> set[Value]:
    """Return what comes of a call."""
    derived = set(call.outputs)
    for later in lines.calls[call.order + 1 :]:
        derived |= {*later.outputs} if derived & {*later.inputs} else set()
    return derived
