"""Lines that take a wrong part: at a wrong offset, the same slices on every rank, another rank's, or by another axis.

A stretch of a dim begins where another part does, or the rank's own place is computed as its coordinate times the
length of its part, although an axis does not divide the dim: parts before its own are longer.

A head of keys that is chosen by the wrong number is a part of the unsharded model's tensor, but not this rank's. It is
wrong where it meets a tensor of which the rank has its own part, if all that comes of the two is wrong. Without such a
partner it may be meant: an index into the rank's own part starts at 0, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.fault import Fault, at, fault_at, given_fault, reached
from shardviz.explain.step.parts import (
    CutByAnotherAxis,
    DealtToOthers,
    MisplacedOperand,
    MisplacedWeight,
    OffsetOfUnequalParts,
    PermutedWeights,
    SameSlices,
    ShiftedPart,
)
from shardviz.groups import walk
from shardviz.layout.layout import Layout
from shardviz.layout.splits import axes_in
from shardviz.relate.tolerance import SINGLE
from shardviz.relate.values import error_of, finite_magnitude, part_of, slices_of
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States

WEIGHT = "weight "
"""What the origin of a weight begins with."""

MOST_LISTED = 8
"""Lengths of parts that are listed at most."""

MAX_COMPARED = 1 << 22
"""Numbers that are compared to find slices among those of the whole."""

MAX_LENGTH = 4096
"""Stretches of a longer dim are not looked for."""


@dataclass(frozen=True)
class Stretch:
    """What one rank has of a dim, and what it should have.

    Attributes:
        first: The first index that it has.
        due: The first index that it should have.
        length: How many it has.
    """

    rank: int
    dim: int
    first: int
    due: int
    length: int


def shifted_fault(states: States) -> Fault | None:
    """Return the line that takes a stretch at a wrong offset; None if no call combines it with the rank's own part."""
    for call, layouts in _combining(states):
        for value in call.inputs:
            stretch = next((one for layout in layouts if (one := _stretch(states, value, layout))), None)
            if stretch is not None and spoils(states, call):
                return _fault_of_stretch(states, value, call, stretch, layouts)
    return None


def _combining(states: States) -> Iterator[tuple[Call, list[Layout]]]:
    """Yield the calls that make something wrong of a rank's own part, with the layouts of such parts."""
    for call in states.lines.calls if states.wrong_results else ():
        layouts = [layout for value in call.inputs if (layout := split_layout_of(states, value)) is not None]
        if layouts and call.outputs and all(states.placed(value).is_wrong for value in call.outputs):
            yield call, layouts


def split_layout_of(states: States, value: Value) -> Layout | None:
    """Return the layout of which ranks have their own parts of a right tensor; None without one."""
    state = states.forward(value)
    return state.layout if state.kind == "right" and state.split_layout else None


def _stretch(states: States, value: Value, layout: Layout) -> Stretch | None:
    """Return the stretch of the first rank that has a wrong one, if every rank has one stretch of a dim."""
    whole = states.reference_of(value) if states.forward(value).kind != "right" else None
    held = states.held(value) if whole is not None else {}
    if whole is None or not held or len(held) < states.mesh.size or not whole.ndim:
        return None
    first = next(iter(held.values()))
    dims = [dim for dim in range(whole.ndim) if first.ndim == whole.ndim and first.shape[dim] < whole.shape[dim]]
    if len(dims) != 1 or any(array.shape != first.shape for array in held.values()):
        return None
    starts = {rank: starts_of(array, whole, dims[0]) for rank, array in held.items()}
    due = begins_of(states, layout, whole.shape[dims[0]])
    if due is None or any(len(own) != 1 for own in starts.values()):
        return None
    off = next((rank for rank, own in starts.items() if own[0] != due[rank]), None)
    return None if off is None else Stretch(off, dims[0], starts[off][0], due[off], first.shape[dims[0]])


def is_stretch(states: States, value: Value) -> bool | None:
    """Whether each rank has some stretch of a dim of the whole; None if that isn't known."""
    whole, held = states.reference_of(value), states.held(value)
    if whole is None or not held or any(array.ndim != whole.ndim for array in held.values()):
        return None
    sizes = {tuple(array.shape) for array in held.values()}
    dims = [dim for dim, size in enumerate(whole.shape) if {shape[dim] for shape in sizes} != {size}]
    return all(starts_of(array, whole, dims[0]) for array in held.values()) if len(dims) == 1 else None


def starts_of(held: NDArray[np.float64], whole: NDArray[np.float64], dim: int) -> list[int]:
    """Return where in a dim of the whole a rank's stretch begins, for every place that fits."""
    whole, held = np.moveaxis(whole, dim, 0), np.moveaxis(held, dim, 0)
    if len(whole) > MAX_LENGTH or held.shape[1:] != whole.shape[1:] or not held.size:
        return []
    near = _near(whole)
    return [
        start
        for start in range(len(whole) - len(held) + 1)
        if np.all(distances(whole[start], held[0]) <= near)
        and np.all(distances(whole[start : start + len(held)], held) <= near)
    ]


def _near(whole: NDArray[np.float64]) -> float:
    """Return how far equal numbers of a tensor may be apart."""
    return SINGLE * finite_magnitude(whole)


def distances(held: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far numbers are apart; those of a mask are infinite, and equal."""
    with np.errstate(invalid="ignore"):
        return np.where(held == whole, 0.0, np.abs(held - whole))


def begins_of(states: States, layout: Layout, length: int) -> dict[int, int] | None:
    """Return where each rank's part begins in a dim of this length that an axis splits; None without one."""
    chains = {
        chain for size, chain in zip(layout.shape, layout.chains, strict=True) if size == length and len(chain) == 1
    }
    if len(chains) != 1:
        return None
    split = Layout(states.mesh, (length,), (chains.pop(),))
    due = {rank: region.dims[0][0][0] for rank, region in split.regions() if region.size}
    return due if len(due) == states.mesh.size else None


def _fault_of_stretch(
    states: States, value: Value, call: Call, stretch: Stretch, layouts: list[Layout]
) -> Fault | None:
    """Return the fault of the line that decides the offset: the last with a number of the rank's, or the first."""

    def is_shifted(maker: Call, given: Value) -> bool:
        is_made = not maker.counts_by_rank and states.lines.producer(given) is not None
        return is_made and _stretch(states, given, layouts[0]) is not None

    maker = states.lines.producer(states.lines.source(value, is_shifted))
    if maker is None:
        return None
    for cut in maker.inputs:
        if states.lines.weight_name(cut) and _stretch(states, cut, layouts[0]):  # it was cut elsewhere
            return _misplaced_weight(states.lines, cut, call, (stretch.rank,))
    first, due, length = stretch.first, stretch.due, stretch.length
    given = f"{reached(maker)} gives rank {stretch.rank} elements {first} to {first + length - 1} of dim {stretch.dim}"
    sentence = f"{given}; {at(call.line, maker.line)} combines them with its part, {due} to {due + length - 1}"
    places = maker.place, maker.function, call.place
    return fault_at(maker, sentence, ShiftedPart(*places, stretch.rank, stretch.dim, first, due, length))


def same_slices_fault(states: States) -> Fault | None:
    """Return the line that gives all ranks the same slices; None if no call combines these with the rank's own part."""
    for call, layouts in _combining(states):
        same = (value for layout in layouts for value in call.inputs if _are_same_slices(states, value, layout))
        if (value := next(same, None)) is None or not spoils(states, call):
            continue
        begin = states.lines.source(value, lambda _, given: is_same_part(states, given))
        if (maker := states.lines.producer(begin)) is not None:
            gives = f"{reached(maker)} is the first wrong line: {maker.function} gives every rank the same"
            combines = f"{at(call.line, maker.line)} combines the slices with the rank's own part"
            cause = SameSlices(maker.inner_line.place, maker.function, call.place)
            return fault_at(maker, f"{gives}; {combines}", cause)
    return None


def _are_same_slices(states: States, value: Value, layout: Layout) -> bool:
    """Whether ranks have the same slices of a dim that a layout splits, and some need others."""
    whole = states.reference_of(value)
    if whole is None or not is_same_part(states, value):
        return False
    held = next(iter(states.held(value).values()))
    dims = [dim for dim, size in enumerate(whole.shape) if held.shape[dim] != size]
    due = begins_of(states, layout, whole.shape[dims[0]]) if len(dims) == 1 else None
    if due is None or whole.size * held.shape[dims[0]] > MAX_COMPARED:
        return False
    nearest = distances(slices_of(held, dims[0])[:, None], slices_of(whole, dims[0])[None]).max(-1, initial=0.0)
    length = held.shape[dims[0]]
    needed = [np.take(whole, range(first, first + length), dims[0]) for first in due.values()]
    return bool((nearest.min(1) <= _near(whole)).all()) and any(error_of(held, part) > SINGLE for part in needed)


def is_same_part(states: States, value: Value) -> bool:
    """Whether all ranks have the same of a tensor, and less than the unsharded model."""
    whole = states.reference_of(value)
    held = list(states.held(value).values())
    if whole is None or len(held) < max(states.mesh.size, 2) or held[0].ndim != whole.ndim or not held[0].size:
        return False
    is_same = all(array.shape == held[0].shape and error_of(array, held[0]) <= SINGLE for array in held[1:])
    return is_same and held[0].size < whole.size


@dataclass(frozen=True)
class UnequalSplit:
    """A dim that an axis does not divide.

    Attributes:
        lengths: The length of each part.
        coords: Each rank's coordinate along the axis.
    """

    size: int
    axis: str
    lengths: tuple[int, ...]
    coords: Mapping[int, int]

    @property
    def begins(self) -> dict[int, int]:
        """Where each rank's part begins."""
        return {rank: min(at * self.lengths[0], self.size) for rank, at in self.coords.items()}

    @property
    def guesses(self) -> Iterator[tuple[str, dict[int, int]]]:
        """Lengths that code takes all parts to have, in words, and where each rank's part would then begin."""
        yield "the length of its own part", {rank: at * self.lengths[at] for rank, at in self.coords.items()}
        number = len(self.lengths)
        whole = self.size // number
        yield f"({self.size} // {number})", {rank: at * whole for rank, at in self.coords.items()}


def unequal_fault(states: States) -> Fault | None:
    """Return the line that takes a rank's coordinate times one length for where its part begins."""
    counting = [call for call in states.lines.calls if call.counts_by_rank and not _is_known(states, call)]
    numbers = {call: list(_numbers(call)) for call in counting}
    for split in _unequal_splits(states) if counting else ():
        for length, guessed in split.guesses:
            if guessed == split.coords:
                continue  # the number of a rank says nothing of a length
            wrong = next((rank for rank, begin in split.begins.items() if guessed[rank] != begin), None)
            call = next((call for call in counting if guessed in numbers[call]), None)
            if call is not None and wrong is not None:
                return _fault_of_unequal(call, split, wrong, length)
    return None


def _is_known(states: States, call: Call) -> bool:
    """Whether what a call returns is known to be right, or terms of what is."""
    return any(states.placed(value).is_known for value in call.outputs)


def _unequal_splits(states: States) -> Iterator[UnequalSplit]:
    """Yield the dims of a module's right tensors of which ranks have parts of several lengths."""
    mesh, known = states.mesh, set[tuple[int, str]]()
    for value in states.lines.values:
        state = states.forward(value)
        layout = state.layout if state.kind == "right" else None
        for size, chain in zip(layout.shape, layout.chains, strict=True) if layout is not None else ():
            axis = str(chain[0]) if len(chain) == 1 and isinstance(chain[0], str) else ""
            if axis and size % mesh.axis_size(axis) and (size, axis) not in known:
                known.add((size, axis))
                part = -(-size // mesh.axis_size(axis))
                lengths = tuple(max(min(part, size - part * at), 0) for at in range(mesh.axis_size(axis)))
                coords = {rank: mesh.coord_of(rank)[mesh.axis_index(axis)] for rank in mesh.ranks}
                yield UnequalSplit(size, axis, lengths, coords)


def _numbers(call: Call) -> Iterator[dict[int, int]]:
    """Yield each whole number among a call's arguments, by rank."""
    by_rank = {rank: re.findall(r"-?[0-9]+", record.numbers) for rank, record in call.records.items()}
    for numbers in zip(*by_rank.values(), strict=False):
        yield dict(zip(by_rank, map(int, numbers), strict=True))


def _fault_of_unequal(call: Call, split: UnequalSplit, rank: int, length: str) -> Fault:
    line, coord = call.first.since, split.coords[rank]
    where, first = at(line) if line is not None else reached(call), dict(split.guesses)[length][rank]
    sentence = (
        f"{where} begins the part of rank {rank} at {first}, {coord} times {length}; of {split.size} along "
        f"{split.axis} it begins at {split.begins[rank]}"
    )
    parts, place = listed(split.lengths, MOST_LISTED), (line or call.line).place
    cause = OffsetOfUnequalParts(place, split.axis, split.size, parts, length)
    return replace(fault_at(call, sentence, cause), line=line or call.line)


def other_axis_fault(states: States) -> Fault | None:
    """Return the line that multiplies rows by parts of a weight that differ along the axis of the rows alone.

    Ranks along an axis of as many ranks as there are parts lack some of them: it is the one to cut the weight by.
    """
    lines = states.lines
    for call in lines.calls:
        weights = [value for value in call.inputs if lines.origin(value).startswith(WEIGHT)]
        weights = [value for value in weights if not lines.records[value[0]].placements]  # of a DTensor, they are right
        others = [value for value in call.inputs if value not in weights]
        rows = [axis for value in others for axis in _axes_of_rows(states, value)] if weights else []
        for weight in weights if rows and not call.first.is_collective else ():
            name = lines.weight_name(weight)
            if (cause := _cut(states, weight, rows, name)) is not None:
                has = f"ranks along {cause.rows} have different parts of {name}, and those along {cause.axis} not all"
                sentence = f"{reached(call)} gives {call.function} rows that {cause.rows} splits; {has}"
                return fault_at(call, sentence, cause)
    return None


def misplaced_weight_fault(states: States) -> Fault | None:
    """Return the line that reads weights whose parts have right numbers in another order, if others are right."""
    lines = states.lines
    read = {value: call for call in reversed(lines.calls) for value in call.inputs if lines.weight_name(value)}
    wrong = sorted((value for value in read if states.placed(value).is_wrong), key=lambda value: read[value].order)
    if not wrong or len(wrong) == len(read) or any(states.forward(value).moved != "order" for value in wrong):
        return None
    names, call = [lines.weight_name(value) for value in wrong], read[wrong[0]]
    sentence = f"{reached(call)} reads {names[0]}: each rank has the right numbers of its part, in another order"
    return fault_at(call, sentence, PermutedWeights(listed(names, MOST_LISTED)))


def _axes_of_rows(states: States, value: Value) -> Iterator[str]:
    """Yield the axes that split the rows of a tensor, or of what a rank makes it of without an exchange."""
    makers = list(states.lines.makers(value))
    if any(call.first.ranks for call in makers):
        return
    sources = [value] if states.forward(value).is_known else [one for call in makers for one in call.inputs]
    for source in sources:
        layout = None if states.lines.origin(source).startswith(WEIGHT) else split_layout_of(states, source)
        chains = () if layout is None else layout.chains[:-1] or layout.chains
        yield from (axis for chain in chains for axis in axes_in(chain))


def _cut(states: States, weight: Value, rows: Sequence[str], name: str) -> CutByAnotherAxis | None:
    """Return the cause of a weight whose parts differ along an axis of rows, and are not all there along another."""
    whole, held, mesh = states.reference_of(weight), states.held(weight), states.mesh
    if whole is None or len(held) < mesh.size or len({array.shape for array in held.values()}) > 1:
        return None
    parts = {rank: array.tobytes() for rank, array in held.items()}
    count = len(set(parts.values()))
    number = {axis: [len({parts[rank] for rank in group}) for group in mesh.groups(axis)] for axis in mesh.axes}
    cut = [axis for axis in mesh.axes if axis not in rows and mesh.axis_size(axis) == count]
    differing = [axis for axis in rows if max(number[axis]) > 1 and axis in states.batch_axes]
    if count < 2 or next(iter(held.values())).size * count != whole.size or len(cut) != 1 or not differing:
        return None
    together = max(number[cut[0]])
    return CutByAnotherAxis(name, cut[0], differing[0], together, count) if together < count else None


def misplaced_fault(states: States) -> Fault | None:
    """Return the line that takes another rank's part; None if no call combines it with the rank's own part."""
    lines = states.lines
    for call in lines.calls if states.wrong_results else ():
        if not call.outputs or not all(states.placed(value).is_wrong for value in call.outputs):
            continue
        given = {value: states.forward(value) for value in call.inputs}
        moved = next((value for value, state in given.items() if state.moved == "rank"), None)
        is_mixed = moved is not None and any(state.split_layout for state in given.values())
        if moved is not None and is_mixed and spoils(states, call):
            begin = lines.source(moved, lambda _, given: states.forward(given).moved == "rank")
            ranks = tuple(_strangers(states, moved))
            if (maker := lines.producer(begin)) is None:
                weight = _misplaced_weight(lines, begin, call, ranks)
                return given_fault(call) if weight is None and not lines.is_cut else weight
            gives = f"{reached(maker)} gives {named_ranks(ranks)} another rank's part"
            combines = f"{at(call.line, maker.line)} combines it with the rank's own part"
            if (dealt := _ordered_before(states, maker)) is not None:
                cause = DealtToOthers(dealt.inner_line.place, dealt.function, maker.place, call.place, ranks)
                return fault_at(dealt, f"{reached(dealt)} orders slices that are exchanged; {gives}; {combines}", cause)
            return fault_at(
                maker, f"{gives}; {combines}", MisplacedOperand(maker.place, maker.function, call.place, ranks)
            )
    return None


def _ordered_before(states: States, taken: Call) -> Call | None:
    """Return the first call that ranks alone make of a right tensor before they exchange it; None if it may be right.

    The calls from the exchange on are right if they give ranks their own part of another tensor.
    """
    lines = states.lines

    def is_twin(call: Call) -> bool:
        return (call.line.place, call.inner_line.place, call.function) == own and call != taken

    own = (taken.line.place, taken.inner_line.place, taken.function)
    twins = [call for call in lines.calls if is_twin(call) and all(states.placed(one).is_known for one in call.outputs)]
    through = _sharded_only(states, taken)
    shared = {(call.inner_line.place, call.function) for twin in twins for call in _sharded_only(states, twin)}
    before = [call for call in through if (call.inner_line.place, call.function) not in shared and call != taken]
    is_exchanged = any(call.first.is_collective for call in through)
    return min(before, key=lambda call: call.order, default=None) if twins and is_exchanged else None


def _sharded_only(states: States, call: Call) -> list[Call]:
    """Return a call and those before it, back to what is compared."""

    def makers(made: Call) -> list[Call]:
        open_inputs = (value for value in made.inputs if not states.placed(value).is_known)
        return [maker for value in open_inputs if (maker := states.lines.producer(value)) is not None]

    return list(walk([call], makers))


def _misplaced_weight(lines: Lines, value: Value, call: Call, ranks: tuple[int, ...]) -> Fault | None:
    """Return that ranks hold another rank's part of a weight; None if it is no weight."""
    if not (weight := lines.weight_name(value)):
        return None
    hold, own = ("holds", "its") if len(ranks) == 1 else ("hold", "their")
    sentence = (
        f"{named_ranks(ranks)} {hold} another rank's part of {weight}; {reached(call)} combines it with {own} own"
    )
    return fault_at(call, sentence, MisplacedWeight(weight, call.place, ranks))


def spoils(states: States, call: Call) -> bool:
    """Whether nothing right comes of a call's result, and what the module returns does."""
    later = (value for following in states.lines.following(call) for value in following.outputs)
    is_spoiled = all(states.forward(value).kind == "none" for value in call.outputs)
    return (
        is_spoiled
        and not any(states.placed(value).is_known for value in later)
        and not states.lines.derived(call).isdisjoint(states.wrong_results)
    )


def _strangers(states: States, moved: Value) -> Iterator[int]:
    """Yield the ranks that don't have their own part."""
    held, whole, layout = states.held(moved), states.reference_of(moved), states.forward(moved).layout
    for rank, region in layout.regions() if whole is not None and layout is not None else ():
        if whole is not None and rank in held and error_of(held[rank], part_of(whole, region)) > SINGLE:
            yield rank
