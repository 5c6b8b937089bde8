"""What lines do to a rank's part that needs the whole's order, or a neighbor's slices.

After an exchange or a gather has put ranks' parts along a dim of their own, a permutation of the dims that makes the
result right on every rank is the proof, and the fix.

A rank that has one stretch of a dim has all of some segments and nothing of others: gates, or queries, keys and values.
Taken apart into as many segments as the whole, it gives others. Flipped, sorted or indexed by itself, it keeps its own
numbers, although in the whole they go from one rank's part to another's.

A halo, or one token of a shift, is a neighbor's: it may be missing, with zeros in its place, or its gradient isn't sent
back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, islice, permutations, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.exchanges import COPIES
from shardviz.check.step.lines.fault import Fault, fault_at, reached
from shardviz.check.step.lines.offsets import distances, starts_of
from shardviz.check.step.lines.operands import splits
from shardviz.explain.step.line_reductions import HaloNotSentBack
from shardviz.explain.step.line_rows import DimsMerged, NeighborLeftOut, PartOfAnotherDim
from shardviz.explain.step.lines import ELEMENTWISE, ReorderedPart, RolledPart, SegmentsOfPart, VarianceOfPart
from shardviz.explain.step.parts import CutByOtherSegments
from shardviz.layout.region import indices
from shardviz.layout.splits import axes_in
from shardviz.relate.tolerance import ELEMENT, EXACT, SINGLE
from shardviz.relate.values import error_of, finite_magnitude, is_alike, magnitude, part_of, slices_of
from shardviz.text import listed, spans_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States
    from shardviz.explain.cause import Cause
    from shardviz.layout.layout import Layout

    Arrays = Mapping[int, NDArray[np.float64]]

MERGES = ("reshape", "view", "flatten")
"""Functions that may merge dims."""

SPREADS = ("var", "std", "var_mean", "std_mean")
"""Functions that take a mean, and the variance around it."""

MAX_DIMS = 6
"""Dims that are tried in every order."""

PARTS = ("chunk", "tensor_split", "split", "unsafe_chunk", "glu")
"""Functions that give or combine the segments of a dim."""

STRETCHES = ("getitem", "narrow")
"""Functions that may give one segment of a dim."""

UNFOLDS = ("unflatten", "view", "reshape")
"""Functions that may put the segments of a dim along a dim of their own."""

ATTENTION, HEADS = "scaled_dot_product_attention", 1
"""Torch's function for attention, and the dim of its inputs that has the heads."""

MOST_LISTED = 4
"""Ranks of whose rows a sentence says which they are."""


def merged_fault(states: States) -> Fault | None:
    """Return the line that merges dims in a wrong order; None if no order of them makes its result right."""
    for call in states.lines.calls:
        made = call.outputs[0] if call.function in MERGES and call.outputs and call.inputs else None
        if made is None or states.forward(made).moved != "order":
            continue
        whole, held = states.reference_of(made), states.held(made)
        near = ELEMENT.get(states.held_dtype(made), EXACT)
        parts = list(splits(states.mesh, whole, held)) if whole is not None and held else []
        if order := _right_order(states.held(call.inputs[0]), parts, near):
            function, place = call.function, call.inner_line.place
            makes = f"{function} returns {states.forward(made).text}"
            sentence = (
                f"{reached(call)} is the first wrong line: {makes}, and with permute{order} before, the rank's part"
            )
            return fault_at(call, sentence, DimsMerged(place, function, str(order)))
    return None


def _right_order(given: Arrays, parts: list[dict[int, NDArray[np.float64]]], near: float) -> tuple[int, ...]:
    """Return the order of dims in which what ranks have is the rank's part of the whole on all of them; else ()."""
    first = next(iter(given.values()), None)
    for order in permutations(range(first.ndim)) if first is not None and 2 < first.ndim <= MAX_DIMS else ():
        for part in parts:
            if given.keys() == part.keys() and all(
                array.size == part[rank].size
                and error_of(array.transpose(order).reshape(part[rank].shape), part[rank]) <= near
                for rank, array in given.items()
            ):
                return order
    return ()


def cause_of_part(states: States, call: Call, given: str) -> Cause | None:
    """Return the cause of a call that does with a rank's part what is right for the whole: takes it apart, or reorders.

    Args:
        call: The first call with a wrong result.
        given: What ranks have of what it is given.
    """
    value = call.inputs[0] if call.inputs and call.outputs and call.whole is not None else None
    if value is None or states.forward(value).kind != "right" or not states.forward(value).split_layout:
        return None
    if call.function in SPREADS:
        return _spread_of_part(states, call)
    if (other := _split_elsewhere(states, call)) is not None:
        return PartOfAnotherDim(call.inner_line.place, call.function, *other)
    segments = next((pair for dim in _stretched(states, value) if (pair := _segments(states, call, dim))), None)
    if segments is not None:
        weight, rows, dim = _cut(states, call, segments)
        return SegmentsOfPart(call.place, call.function, given, *segments, weight, rows, dim)
    if (unlike := _unlike_segments(states, call)) is not None:
        return CutByOtherSegments(call.inner_line.place, call.function, *unlike)
    cause_class = RolledPart if call.function == "roll" else ReorderedPart
    is_own = call.function not in (*MERGES, *COPIES) and _reorders_part(states, call)
    return cause_class(call.inner_line.place, call.function, is_of_rank=False) if is_own else None


def unlike_dim(states: States, inputs: Sequence[Value], function: str) -> str:
    """Return the dim of which two tensors have different slices on a rank; a matrix product has dims of its own."""
    layouts = [state.layout for value in inputs if (state := states.forward(value)).kind == "right"]
    if function == "linear" and len(layouts) == 3 and layouts[1] is not None and layouts[2] is not None:
        of_weight, of_bias = layouts[1].chains[0], layouts[2].chains[0]
        return "0" if of_weight != of_bias and axes_in(of_weight) == axes_in(of_bias) else ""
    for pair in combinations([layout for layout in layouts if layout is not None], 2):
        first, second = sorted(pair, key=lambda layout: -len(layout.shape))
        before = len(first.shape) - len(second.shape) if function in ELEMENTWISE else 0
        last = len(first.shape) if function in ELEMENTWISE else len(first.shape) - 2
        for dim in range(before, min(last, before + len(second.shape))):
            sizes = first.shape[dim], second.shape[dim - before]
            chains = first.chains[dim], second.chains[dim - before]
            axes = [axes_in(chain) for chain in chains]
            if sizes[0] == sizes[1] and axes[0] and axes[0] == axes[1] and chains[0] != chains[1]:
                return str(dim)
            is_one_whole = bool(axes[0]) != bool(axes[1]) and min(sizes) > 1
            if is_one_whole and dim == HEADS and function == ATTENTION:
                return str(dim)  # shapes agree, as fewer key heads are repeated for all query heads
    return ""


def _spread_of_part(states: States, call: Call) -> VarianceOfPart | None:
    """Return the cause of a call that takes the variance of a rank's part over the dim that is split."""
    layout, whole = states.forward(call.inputs[0]).layout, call.whole
    shapes = {states.lines.records[made[0]].shape for made in call.outputs}
    is_over_split = whole is not None and shapes == {states.lines.wholes[made].shape for made in whole.outputs}
    if layout is None or len(layout.split_axes) != 1 or not is_over_split:
        return None
    reductions = (later.function for later in states.lines.following(call) if later.first.ranks)
    return VarianceOfPart(call.inner_line.place, call.function, layout.split_axes[0], next(reductions, ""))


def _split_elsewhere(states: States, call: Call) -> tuple[int, int, str] | None:
    """Return the dim along which a call gets a rank's part, the one along which its result has a part's size, the axis.

    None if a view of the part has the rank's part of the same dim, as it should.
    """
    layout, whole = states.forward(call.inputs[0]).layout, call.whole
    dims = list(_stretched(states, call.inputs[0]))
    if layout is None or whole is None or call.function not in (*MERGES, *UNFOLDS) or len(dims) != 1:
        return None
    wanted, held = states.lines.wholes[whole.outputs[0]].shape, states.lines.records[call.outputs[0][0]].shape
    apart = [dim for dim, size in enumerate(wanted) if held[dim] != size] if len(held) == len(wanted) else []
    start, stop = (math.prod(layout.shape[:end]) for end in (dims[0], dims[0] + 1))
    sizes = [math.prod(wanted[: dim + 1]) for dim in range(len(wanted))]
    homes = [dim for dim, size in enumerate(sizes) if size > start and size // wanted[dim] < stop]
    axis = str(layout.chains[dims[0]][0])
    is_part = len(apart) == 1 and held[apart[0]] * states.mesh.axis_size(axis) == wanted[apart[0]]
    return (dims[0], apart[0], axis) if is_part and homes and apart[0] not in homes else None


def _stretched(states: States, value: Value) -> Iterator[int]:
    """Yield the dims of which each rank has one stretch."""
    layout = states.forward(value).layout
    for dim, chain in enumerate(layout.chains if layout is not None else ()):
        if chain and isinstance(chain[0], str):
            yield dim


def _segments(states: States, call: Call, dim: int) -> tuple[int, int] | None:
    """Return a dim and the number of its segments, if both sides take the dim apart into as many; else None."""
    lines, function, whole = states.lines, call.function, call.whole
    if whole is None or len(call.outputs) != len(whole.outputs):
        return None
    given, made = (lines.records[value[0]].shape for value in (call.inputs[0], call.outputs[0]))
    whole_given, whole_made = (lines.wholes[number].shape for number in (whole.inputs[0], whole.outputs[0]))
    if function in UNFOLDS:
        is_led = given[:dim] == made[:dim] and len(made) > max(len(given), dim)
        number = whole_made[dim] if is_led and len(whole_made) == len(made) else 0
        return (dim, number) if 1 < number == made[dim] and whole_given[dim] > given[dim] else None
    if len(given) != len(made) or [at for at in range(len(given)) if given[at] != made[at]] != [dim]:
        return None
    if function in PARTS:
        number = 2 if function == "glu" else len(call.outputs)
        return (dim, number) if number > 1 else None
    number = whole_given[dim] // max(whole_made[dim], 1)
    is_segment = function in STRETCHES and number > 1 and number * made[dim] == given[dim]
    return (dim, number) if is_segment and _is_same_segment(states, call, dim) else None


def _is_same_segment(states: States, call: Call, dim: int) -> bool:
    """Whether a rank takes the same segment of its part as the unsharded model of the whole."""
    whole = call.whole
    sides = [states.whole(number) for number in (whole.inputs[0], whole.outputs[0])] if whole is not None else []
    held, made = (next(iter(states.held(value).values()), None) for value in (call.inputs[0], call.outputs[0]))
    pairs = [sides, [held, made]]
    starts = [starts_of(part, given, dim) for given, part in pairs if given is not None and part is not None]
    lengths = [given.shape[dim] for given, _ in pairs if given is not None]
    return len(starts) == 2 and all(map(len, starts)) and starts[0][0] * lengths[1] == starts[1][0] * lengths[0]


def _unlike_segments(states: States, call: Call) -> tuple[str, tuple[int, ...], int, int] | None:
    """Return the weight whose result a call takes apart into other segments than it is cut by, these, and how it is."""
    whole, layout = call.whole, states.forward(call.inputs[0]).layout
    if whole is None or layout is None or call.function not in PARTS or len(whole.outputs) < 2:
        return None
    for dim, chain in enumerate(layout.chains):
        sizes = tuple(states.lines.wholes[number].shape[dim] for number in whole.outputs)
        is_apart = sum(sizes) == layout.shape[dim] and len(chain) == 2 and isinstance(chain[0], int)
        if is_apart and isinstance(chain[0], int) and sizes != (layout.shape[dim] // chain[0],) * chain[0]:
            name, _, weight_dim = next(_weights_behind(states, call, layout.shape[dim]), ("", None, dim))
            return name, sizes, chain[0], weight_dim
    return None


def _weights_behind(states: States, call: Call, length: int) -> Iterator[tuple[str, Layout, int]]:
    """Yield weights that make what a call is given, with what ranks have of each, and the dim of a length."""
    for maker in states.lines.makers(call.inputs[0]):
        for value in (value for value in maker.inputs if states.lines.weight_name(value)):
            layout = states.forward(value).layout
            for dim, chain in enumerate(layout.chains if layout is not None else ()):
                if (
                    layout is not None
                    and chain
                    and layout.shape[dim] == length
                    and states.forward(value).kind == "right"
                ):
                    yield states.lines.weight_name(value), layout, dim


def _cut(states: States, call: Call, segments: tuple[int, int]) -> tuple[str, str, int]:
    """Return the weight whose result a call takes apart, if each rank has one stretch of a dim, what each has, the dim.

    Returns:
        Empty texts, and 0, if no weight makes it, or a rank has anything else.
    """
    length = states.lines.wholes[call.whole.inputs[0]].shape[segments[0]] if call.whole is not None else 0
    for name, layout, dim in _weights_behind(states, call, length):
        if isinstance(layout.chains[dim][0], str):
            word = "rows" if dim == 0 else "columns"
            held = {rank: spans_of(indices(region.dims[dim]).tolist()) for rank, region in layout.regions()}
            first = {rank: spans[0] for rank, spans in held.items() if spans}
            texts = (f"rank {rank} has {word} {start}-{stop - 1}" for rank, (start, stop) in first.items())
            return name, listed(texts, MOST_LISTED), dim
    return "", "", 0


def _reorders_part(states: States, call: Call) -> bool:
    """Whether a call reorders the whole, and on each rank its own part, although numbers go from part to part."""
    given, held = states.held(call.inputs[0]), states.held(call.outputs[0])
    wholes = [states.reference_of(value) for value in (call.inputs[0], call.outputs[0])]
    if not held or given.keys() != held.keys() or not _has_numbers(*wholes):
        return False
    due = list(splits(states.mesh, wholes[1], held)) if wholes[1] is not None else []
    is_of_part = all(_has_numbers(array, given[rank]) for rank, array in held.items())
    return is_of_part and bool(due) and not any(all(_has_numbers(part[r], given[r]) for r in held) for part in due)


def _has_numbers(first: NDArray[np.float64] | None, second: NDArray[np.float64] | None) -> bool:
    """Whether two arrays have the same numbers, wherever they stand."""
    if first is None or second is None or first.size != second.size:
        return False
    return error_of(np.sort(first, axis=None), np.sort(second, axis=None)) <= EXACT


MAX_RESULTS = 64
"""Of more wrong results the first are looked at."""

WINDOWS = ("conv1d", "conv2d", "conv3d", "unfold", "avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d")
"""Functions of which each result is one of neighboring slices."""


@dataclass(frozen=True)
class Border:
    """Slices of a dim that are wrong at one end of each part that has a neighbor there, while all others are right.

    Attributes:
        counts: How many at the start of a part, and at its end.
        axis: The axis that splits the dim.
    """

    dim: int
    counts: tuple[int, int]
    axis: str


def neighbor_fault(states: States) -> Fault | None:
    """Return the line that lacks slices of a rank's neighbors; None if more is wrong than what these decide.

    A shift by one token, a causal convolution or a difference needs the last slices of the previous rank. The first
    rank has none, and there the unsharded model has zeros, too.
    """
    lines = states.lines
    for value in islice((value for value in lines.values if states.placed(value).is_wrong), MAX_RESULTS):
        border = _border(states, value)
        makers, given = _makers(states, value, border.axis) if border is not None else ([], None)
        derived = lines.derived(makers[-1]) if makers else set()
        is_spoiled = not derived.isdisjoint(states.wrong_results) and not any(
            _is_right(states, made) for made in derived
        )
        if border is None or given is None or not is_spoiled:
            continue
        if any(call.function in WINDOWS for call in makers) or _is_shifted(states, value, given, border):
            call = makers[-1]
            cause = NeighborLeftOut(call.place, call.function, border.axis, *border.counts)
            gets = f"{call.function} gets {states.forward(given).text}"
            return fault_at(call, f"{reached(call)} is the first wrong line: {gets}, and {cause.lacks}", cause)
    return None


def _makers(states: States, value: Value, axis: str) -> tuple[list[Call], Value | None]:
    """Return the calls that make a tensor, back to one that is given a right part along an axis, and that part."""
    calls: list[Call] = []
    while (call := states.lines.producer(value)) is not None and call not in calls:
        calls.append(call)
        given = next((source for source in call.inputs if _is_split(states, source, axis)), None)
        value = next((source for source in call.inputs if not states.placed(source).is_known), value)
        if given is not None:
            return calls, given
    return calls, None


def _is_split(states: States, value: Value, axis: str) -> bool:
    state = states.forward(value)
    return state.kind == "right" and state.layout is not None and axis in state.layout.split_axes


def _is_right(states: States, value: Value) -> bool:
    """Whether a tensor is right and has different numbers: zero times anything is right."""
    return states.placed(value).is_known and not all(map(is_alike, states.held(value).values()))


def _border(states: States, value: Value) -> Border | None:
    """Return what is wrong at the borders of parts; None if all or none of them is, or also what is between."""
    whole, held, mesh = states.reference_of(value), states.held(value), states.mesh
    if whole is None or len(held) < mesh.size or any(array.ndim != whole.ndim for array in held.values()):
        return None
    near = ELEMENT.get(states.held_dtype(value), SINGLE) * finite_magnitude(whole)
    for parts in splits(mesh, whole, held):
        dims = [dim for dim in range(whole.ndim) if next(iter(parts.values())).shape[dim] < whole.shape[dim]]
        for dim, axis in product(dims, mesh.long_axes):
            off = {rank: _slices_off(parts[rank], array, dim, near) for rank, array in held.items()}
            counts = _counts(off, {rank: mesh.coord_of(rank)[mesh.axis_index(axis)] for rank in held})
            if counts is not None and any(counts):
                return Border(dim, counts, axis)
    return None


def _slices_off(due: NDArray[np.float64], held: NDArray[np.float64], dim: int, near: float) -> NDArray[np.bool_]:
    return np.asarray((distances(slices_of(held, dim), slices_of(due, dim)) > near).any(1))


def _counts(off: Mapping[int, NDArray[np.bool_]], coords: Mapping[int, int]) -> tuple[int, int] | None:
    """Return how many slices are wrong at the start and at the end of parts that have a neighbor there."""
    begins, ends, last = set[int](), set[int](), max(coords.values())
    for rank, is_off in off.items():
        begin, end = (int(np.argmin(side)) for side in (is_off, is_off[::-1]))
        if (
            is_off.all()
            or is_off.sum() != begin + end
            or (begin and not coords[rank])
            or (end and coords[rank] == last)
        ):
            return None
        begins |= {begin} if coords[rank] else set()
        ends |= {end} if coords[rank] < last else set()
    return (begins.pop(), ends.pop()) if len(begins) == len(ends) == 1 else None


def _is_shifted(states: States, value: Value, given: Value, border: Border) -> bool:
    """Whether the slices that are wrong at the start or end of a part are slices of the neighbor's part of `given`."""
    whole, source = states.reference_of(value), states.reference_of(given)
    if whole is None or source is None or whole.ndim != source.ndim:
        return False
    length = whole.shape[border.dim] // states.mesh.axis_size(border.axis)
    first, last = border.counts
    spans = [(length, first, range(length)), (length - last, last, range(length, whole.shape[border.dim]))]
    places = [
        (starts_of(whole.take(range(begin, begin + count), border.dim), source, border.dim), others)
        for begin, count, others in spans
        if count
    ]
    return all(len(starts) == 1 and starts[0] in others for starts, others in places)


def halo_not_sent_back(states: States, value: Value, call: Call) -> HaloNotSentBack | None:
    """Return the cause of a part's gradient that lacks, at some elements, what another rank hands back for its copy."""
    copies = [
        (rank, gradient)
        for other in states.lines.calls
        if other.first.frames[0] == call.first.frames[0]
        for made in other.outputs
        for rank, gradient in states.gradients(made).items()
    ]
    for rank, dim, first, lacking in _lacking(states, value):
        for other, gradient in copies:
            is_alike = other != rank and gradient.ndim == lacking.ndim
            if is_alike and gradient.shape[dim] >= lacking.shape[dim] and starts_of(lacking, gradient, dim):
                elements = (first, first + lacking.shape[dim] - 1)
                return HaloNotSentBack(call.place, call.function, dim, *elements, rank, other)
    return None


def _lacking(states: States, value: Value) -> Iterator[tuple[int, int, int, NDArray[np.float64]]]:
    """Yield each rank whose gradient is off in one stretch of a dim alone: the dim, its first element, what lacks."""
    layout, whole = states.forward(value).layout, states.reference_of(value, gradient=True)
    held = states.gradients(value)
    near = max(SINGLE, ELEMENT.get(states.held_dtype(value), SINGLE))
    if layout is None or whole is None:
        return
    for rank, region in layout.regions():
        due = part_of(whole, region)
        if rank not in held or held[rank].shape != due.shape or not due.size:
            continue
        lacking = due - held[rank]
        off = np.abs(lacking) > near * magnitude(whole)
        spans = [np.flatnonzero(slices_of(off, dim).any(1)) for dim in range(off.ndim)]
        short = [dim for dim, span in enumerate(spans) if len(span) and span[-1] - span[0] + 1 < due.shape[dim]]
        if len(short) == 1:
            (dim,) = short
            begin, end = int(spans[dim][0]), int(spans[dim][-1]) + 1
            yield rank, dim, begin, lacking.take(range(begin, end), dim)
