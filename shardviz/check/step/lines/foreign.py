"""Lines that read other numbers: at moved indices, unwritten memory, padding, other rows.

An index outside of a rank's part is moved into it; what is read there must be masked before it is summed.

A collective gets room for its result: `out = torch.empty_like(x)`. If it does not run, or writes elsewhere, what is
read from there is whatever the memory held, on each rank something else.

A vocabulary is padded to divide it among ranks. The unsharded model takes only the first words of the logits. A rank
that has a part of them must give the padding in it one number that adds nothing, such as -inf.

A rank's part may be taken for the first of the whole: queries of a causal mask, rows of a table, rounds of a loop.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.calls import SELECTS, Call, Lines, Value
from shardviz.check.step.lines.exchanges import MOVES, ROOM
from shardviz.check.step.lines.fault import Fault, at, fault_at, reached
from shardviz.check.step.lines.masks import (
    ATTENTION,
    mask_fault,
    ring_mask_fault,
    same_block_fault,
    unweighted_fault,
    values_order_fault,
)
from shardviz.check.step.lines.offsets import is_same_part, is_stretch, spoils
from shardviz.explain.step.buffers import BufferOfOwnSizes
from shardviz.explain.step.line_rows import CausalMaskOfPart, ForeignNumbersSummed, LoopFromZero
from shardviz.explain.step.lines import ELEMENTWISE, UnwrittenMemory
from shardviz.explain.step.losses import PaddingSummed
from shardviz.explain.step.parts import CutAsOneWeight, UnlikeOperands
from shardviz.groups import the_only
from shardviz.layout.splits import axes_in
from shardviz.relate.tolerance import STEP
from shardviz.relate.values import error_of, magnitude, part_of, slices_of
from shardviz.text import join_numbers, listed, named_ranks, starred

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import LineRecord
    from shardviz.layout.layout import Layout

    Array = NDArray[np.float64]

BOUNDS = ("clamp", "clip", "where", "masked_fill", "clamp_", "masked_fill_", "setitem", "minimum", "maximum")
"""Functions by which code moves an index that is not of a rank's part into it."""


def foreign_fault(states: States) -> Fault | None:
    """Return the line that reads at indices which were moved into the rank's part, if the result is summed unmasked."""
    for call in states.lines.calls:
        moved = _moved(call, states) if call.function in BOUNDS else {}
        if not any(mask.any() for mask in moved.values()):
            continue
        calls = list(states.lines.following(call))
        read = next((one for one in calls if one.outputs and not states.is_index(one.outputs[0])), None)
        summed = next((one for one in calls if one.function == "all_reduce"), None)
        if read is None or summed is None or summed.order <= read.order:
            continue
        held = states.held(summed.inputs[0])
        rows = [_rows_at(held.get(rank), mask) for rank, mask in moved.items() if mask.any()]
        if all(row is not None for row in rows) and any(np.any(row) for row in rows if row is not None):
            line, place = read.line, read.place
            where = "" if call.place == place else f" by {at(call.line, line)}"
            clause = f"{at(line)} uses indices that were moved into the rank's part{where}"
            cause = ForeignNumbersSummed(place, read.function, summed.place)
            return fault_at(read, f"{clause}; {at(summed.line, line)} sums what comes of them", cause)
    return None


def buffer_fault(states: States) -> Fault | None:
    """Return the line that reads a buffer which all ranks hold alike, in the shape of their parts, if it spoils all."""
    for call in states.lines.calls if states.wrong_results else ():
        for value in call.inputs:
            whole, held = states.reference_of(value), list(states.held(value).values())
            is_buffer = states.lines.origin(value).startswith("buffer") and states.placed(value).is_wrong
            is_alike = is_buffer and is_same_part(states, value) and not is_stretch(states, value)
            if not is_alike or whole is None or not spoils(states, call):
                continue
            name = states.lines.weight_name(value)
            reads = f"{reached(call)} reads {name}, which has the same {held[0].size:,} numbers on all ranks"
            differ = f"the unsharded model's has {whole.size:,}, and these are no part of it"
            return fault_at(call, f"{reads}; {differ}", BufferOfOwnSizes(name))
    return None


def fused_fault(states: States) -> Fault | None:
    """Return the line that reads a weight of several of which ranks have stretches: it was cut as a whole.

    Ranks that have experts of their own have tensors of the same names, but for numbers.
    """
    made = [dict(record.made_of) for record in states.dump.files.ranks.values()]
    for call in states.lines.calls if states.wrong_results and all(made) else ():
        for name in filter(None, map(states.lines.weight_name, call.inputs)):
            of_ranks = [of_rank.get(name, ()) for of_rank in made]
            row = [source for source, _ in groupby(source for of_rank in of_ranks for source in of_rank)]
            kinds = {frozenset(map(starred, of_rank)) for of_rank in of_ranks}
            if len(kinds) > 1 and all(of_ranks) and len({*row}) == len(row) > len(of_ranks[0]):
                has = f"{reached(call)} reads {name}, of which rank 0 has elements of {listed(of_ranks[0])}"
                cause = CutAsOneWeight(call.inner_line.place, name, of_ranks[0], tuple(row))
                return fault_at(call, f"{has}, and other ranks of others", cause)
    return None


def _moved(call: Call, states: States) -> Mapping[int, NDArray[np.bool_]]:
    """Return for each rank which indices a call changes; empty if it changes none."""
    out = call.outputs[0] if call.outputs and states.is_index(call.outputs[0]) else None
    after = states.held(out) if out is not None else {}
    for value in call.inputs if after else ():
        before = states.held(value) if states.is_index(value) and value != out else {}
        if before.keys() == after.keys() and all(before[rank].shape == after[rank].shape for rank in after):
            return {rank: before[rank] != after[rank] for rank in after}
    return {}


def _rows_at(held: NDArray[np.float64] | None, mask: NDArray[np.bool_]) -> NDArray[np.float64] | None:
    """Return a tensor's rows for some indices; None if it has not one for each, or for several."""
    if held is None:
        return None
    if held.shape[: mask.ndim] == mask.shape:
        rows: NDArray[np.float64] = held[mask]
        return rows
    if held.shape[:1] == (mask.size,):
        return held[mask.ravel()]
    of_others = mask.reshape(len(mask), -1).all(axis=1)  # several indices make a row: it is empty if all are others'
    return held[of_others] if held.shape[:1] == of_others.shape else None


EMPTY = frozenset(function for function in ROOM if "empty" in function)

COPYING = frozenset(("cat", "stack", "pad", "clone", "roll", "contiguous"))
"""Moves that read what they are given, though they leave its numbers as they are."""

WRITERS = (
    *("setitem", "getattr", "size", "numel", "len", "zip"),
    *("index_copy", "index_put", "scatter", "masked_scatter", "slice_scatter", "select_scatter"),
    *("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"),  # FSDP2's own
)
"""Functions that are given a tensor to write into it, or for something else than its numbers."""


def unwritten_fault(lines: Lines) -> Fault | None:
    """Return the line that reads what a function like `empty` made and nothing wrote to; None without one."""
    room: dict[Value, Call] = {}
    for call in lines.calls:
        if call.function in EMPTY:
            if "empty" not in (call.inner_line.source or "empty"):
                continue  # torch's own code makes it, as FSDP2 before a module that the line calls, and fills it
            room |= {value: call for value in call.outputs if all(0 not in lines.records[one].shape for one in value)}
            continue
        made = next((room[value] for value in call.inputs if value in room), None)
        if made is None:
            continue
        if call.function in MOVES - COPYING:
            room |= dict.fromkeys(call.outputs, made)
        elif not _writes(call):
            before = made.inner_line
            sentence = f"{at(before)} makes room that nothing writes to; {reached(call, before)} reads it"
            return fault_at(call, sentence, UnwrittenMemory(before.place, made.function, call.place))
    return None


def _writes(call: Call) -> bool:
    """Whether a call may write into a tensor that it is given, or reads only its shape."""
    function = call.function
    is_like = function in ROOM or function.endswith("_like") or function.startswith("new_")
    is_in_place = function.endswith("_") or function in WRITERS or "out=" in call.inner_line.source
    return call.first.is_collective or bool(call.first.ranks) or is_like or is_in_place


SUMS_OVER_DIM = ("sum", "mean")
OF_POWERS = ("logsumexp", "softmax", "log_softmax", "cross_entropy")
"""Functions over a dim in which every element counts, or its power."""

PRODUCTS = ("linear", "matmul")
"""Products of what each is given first with a weight."""

MIXING = (
    *("mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention", "embedding", "gather", "index_select"),
    *("take_along_dim", "conv1d", "conv2d", "cumsum", "flip", "roll", "sort", "topk"),
)
"""Functions that add up a dim of what they are given, read it by an index or give it another order."""

NO_POWER = -1000.0
"""The power of e of a smaller number is 0."""


def padding_fault(states: States) -> Fault | None:
    """Return the line that sums over padding; None if ranks cut it off too, or have one number there."""
    for cut, dim, size in _cuts(states):
        if any(states.forward(value).is_known for value in states.lines.of_wanted(cut.outputs[0])):
            continue
        for value in states.lines.of_wanted(cut.inputs[0]):
            layout = states.forward(value).layout if states.forward(value).kind == "right" else None
            call = _sum_over(states, value, layout, dim, size) if layout is not None else None
            if call is not None and layout is not None:
                return _summed(call, layout, dim, size, cut)
    for value in states.lines.values:
        whole, layout = states.reference_of(value), states.placed(value).layout
        if whole is None or layout is None or len(layout.shape) != whole.ndim or states.placed(value).kind != "right":
            continue
        for dim in (dim for dim in range(whole.ndim) if layout.shape[dim] > whole.shape[dim]):
            call = _sum_over(states, value, layout, dim, whole.shape[dim])
            if call is not None:
                return _summed(call, layout, dim, whole.shape[dim])
    return None


def _summed(call: Call, layout: Layout, dim: int, size: int, cut: LineRecord | None = None) -> Fault:
    ranks = tuple(rank for rank, region in layout.regions() if region.dims[dim][-1][1] > size)
    padded = layout.shape[dim]
    elements = f"element {size}" if padded == size + 1 else f"elements {size} to {padded - 1}"
    sentence = f"{reached(call)} sums over padding, {elements} of the whole, on {named_ranks(ranks)}"
    cutting = None if cut is None else cut.frames[cut.innermost]
    if cutting is not None:
        sentence = f"{sentence}; the unsharded model cuts these off in {at(cutting, call.line)}"
    place = "" if cutting is None else cutting.place
    return fault_at(call, sentence, PaddingSummed(call.place, call.function, place, dim, size, padded))


def _cuts(states: States) -> Iterator[tuple[LineRecord, int, int]]:
    """Yield the unsharded model's calls that keep the first elements of a dim, with the dim and how many."""
    for record in states.lines.unsharded.lines:
        if record.function not in SELECTS or not (record.inputs and record.outputs):
            continue
        given, kept = (states.whole(number) for number in (record.inputs[0], record.outputs[0]))
        if given is None or kept is None or given.ndim != kept.ndim:
            continue
        dims = [dim for dim in range(given.ndim) if kept.shape[dim] < given.shape[dim]]
        first = given[tuple(slice(size) for size in kept.shape)]
        if len(dims) == 1 and np.array_equal(first, kept):
            yield record, dims[0], kept.shape[dims[0]]


def _sum_over(states: States, value: Value, layout: Layout, dim: int, size: int) -> Call | None:
    """Return the first sum over a split dim to which its padding adds something."""
    lines = states.lines
    dims = {value: dim}
    for call in lines.calls if axes_in(layout.chains[dim]) else ():
        read = next((given for given in call.inputs if given in dims), None)
        if read is None:
            continue
        along, shape = dims[read], lines.records[read[0]].shape
        numbers = call.first.numbers.split()
        is_sum = call.function in (*SUMS_OVER_DIM, *OF_POWERS)
        if is_sum and (not numbers or numbers[0] in (str(along), str(along - len(shape)))):
            parts = _held_behind(states.held(read), layout, dim, size, along)
            if any(np.any(part != 0 if call.function in SUMS_OVER_DIM else part > NO_POWER) for part in parts):
                return call
        for result in call.outputs:
            found = _dim_in(call, read, along, shape, lines.records[result[0]].shape)
            dims |= {result: found} if found is not None else {}
    return None


def _dim_in(call: Call, read: Value, dim: int, shape: tuple[int, ...], made: tuple[int, ...]) -> int | None:
    """Return which dim of a result is a dim of what a call reads; None if it is none, or not known."""
    if call.function in ("T", "t"):
        return len(shape) - 1 - dim
    if call.function in PRODUCTS and call.inputs.index(read) == 1:
        is_kept = dim == (0 if call.function == "linear" else len(shape) - 1)
        return len(made) - 1 if is_kept else None
    if call.function in PRODUCTS:
        return dim if dim < len(shape) - 1 and made[:-1] == shape[:-1] else None
    if call.function in MIXING:
        return None
    if made == shape:
        return dim
    is_one = made.count(shape[dim]) == shape.count(shape[dim]) == 1
    return made.index(shape[dim]) if is_one and call.function in MOVES else None


def _held_behind(
    held: Mapping[int, NDArray[np.float64]], layout: Layout, dim: int, size: int, along: int
) -> Iterator[NDArray[np.float64]]:
    """Yield what ranks have behind the first elements of a dim, which is another one of what is made of it."""
    for rank, region in layout.regions():
        start = region.dims[dim][0][0]
        if rank in held:
            yield held[rank][(slice(None),) * along + (slice(max(size - start, 0), None),)]


MAX_COMPARED = 1 << 22
"""Numbers that are compared to find a rank's rows among those of the whole."""


def own_rows_fault(states: States) -> Fault | None:
    """Return the first line that mixes rows of other places, or a causal mask of a part; None if values prove none."""
    paired = [call for call in states.lines.calls if call.whole is not None and call.outputs]
    wrong = [call for call in paired if states.forward(call.outputs[0]).kind == "none"]
    fault = (values_order_fault(states) or _causal_fault(states, wrong[0])) if wrong else None
    fault = fault or (same_block_fault(states) or unweighted_fault(states) if wrong else None)
    fault = fault or mask_fault(states, wrong)
    fault = fault or (ring_mask_fault(states) if wrong else None)
    return fault or (_unlike_rows_fault(states, wrong[0]) if wrong else None)


def _causal_fault(states: States, call: Call) -> Fault | None:
    """Return the fault of an attention whose causal mask counts a rank's queries from 0, if its values prove that."""
    if call.function != ATTENTION or "True" not in call.first.numbers.split() or len(call.inputs) != 3:
        return None
    state, whole = states.forward(call.inputs[0]), states.reference_of(call.outputs[0])
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
    return fault_at(call, sentence, CausalMaskOfPart(call.place, call.function))


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


def _unlike_rows_fault(states: States, call: Call) -> Fault | None:
    """Return the fault of a call that combines two tensors whose rows on a rank come from different places."""
    if call.function not in ELEMENTWISE or len(call.inputs) != 2:
        return None
    sides = [(states.held(value), states.reference_of(value)) for value in call.inputs]
    sizes = [whole.ndim for held, whole in sides if whole is not None and held]
    for back in range(1, min(sizes) + 1) if len(sizes) == len(sides) else ():
        rows = [{rank: _rows(array, whole, -back) for rank, array in held.items()} for held, whole in sides]
        if not all(places for of_rank in rows for places in of_rank.values()):
            continue
        unlike = [rank for rank in rows[0] if rows[0][rank] != rows[1].get(rank)]
        if unlike:
            places = [join_numbers(of_rank.get(unlike[0], ())) for of_rank in rows]
            given = f"slices {places[0]} of one tensor with slices {places[1]} of the other on rank {unlike[0]}"
            sentence = f"{reached(call)} is the first wrong line: {call.function} combines {given}"
            cause = UnlikeOperands(call.place, call.function, given, max(sizes) - back)
            return fault_at(call, sentence, cause)
    return None


def _rows(held: Array, whole: Array | None, dim: int) -> tuple[int, ...]:
    """Return where a rank's slices along a dim stand in the whole; empty if it has all, or that isn't certain."""
    if whole is None or held.ndim != whole.ndim or held.shape[dim] >= whole.shape[dim]:
        return ()
    slices, all_slices = slices_of(held, dim), slices_of(whole, dim)
    if slices.shape[1] != all_slices.shape[1] or slices.size * len(all_slices) > MAX_COMPARED or not slices.size:
        return ()
    near = STEP * magnitude(whole)
    alike = np.abs(slices[:, None] - all_slices[None]).max(-1) <= near
    return tuple(map(int, alike.argmax(1))) if (alike.sum(1) == 1).all() else ()


def loop_fault(states: States) -> Fault | None:
    """Return the line of a loop over a rank's own slices that uses the loop's counter for the whole's slices."""
    rounds = list(_rounds(states))
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
            if is_wrong and calls[0].line.file == reading[0].line.file and _meet(states.lines, calls[0], reading[0]):
                return _fault_of_loop(calls, reading, rank, begin)
    return None


def _fault_of_loop(calls: Sequence[Call], reading: Sequence[Call], rank: int, begin: int) -> Fault:
    call, count = calls[0], len(calls)
    reads = f"{at(reading[0].line, call.line)} reads slices {begin}-{begin + count - 1} on rank {rank}"
    counts = f"{call.function} takes {call.first.numbers} to {calls[-1].first.numbers} there"
    sentence = f"{reached(call)} is the first wrong line: {reads}, and {counts}"
    cause = LoopFromZero(call.place, call.function, reading[0].place, count)
    return fault_at(call, sentence, cause)


def _rounds(states: States) -> Iterator[tuple[Sequence[Call], dict[int, int], list[Array]]]:
    """Yield the calls of a line that runs less often than in the unsharded model, with each rank's first round.

    The unsharded model's results are yielded with them. A rank's rounds follow each other in the unsharded model.
    """
    lines = states.lines
    for calls, of_whole in lines.rounds.values():
        count = len(calls)
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
    return the_only(
        [start for start in starts if all(_equal(own.get(rank), wholes[start + at]) for at, own in enumerate(held))]
    )


def _equal(held: Array | None, whole: Array) -> bool:
    return held is not None and held.shape == whole.shape and error_of(held, whole) <= STEP


def _meet(lines: Lines, first: Call, second: Call) -> bool:
    """Whether a call is given what comes of both of two calls."""
    of_first, of_second = map(lines.derived, (first, second))
    return any({*call.inputs} & of_first and {*call.inputs} & of_second for call in lines.calls)
