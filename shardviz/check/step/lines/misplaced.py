"""The line that takes a wrong part of a tensor, which a later call combines with the rank's own part.

A head of keys that is chosen by the wrong number is a part of the unsharded model's tensor, but not this rank's. It is
wrong where it meets a tensor of which the rank has its own part, if all that comes of the two is wrong. Without such a
partner it may be meant: an index into the rank's own part starts at 0, too.

Labels, positions and slices are counted from an offset that is made of the rank's number: `rank + arange(n)` where
`rank * n + arange(n)` is due. What comes of it is a stretch of the unsharded model's tensor, and no rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.fault import Fault, at, fault_at, given_fault, place_of, reached
from shardviz.explain.step.forward import MisplacedOperand, ShiftedPart
from shardviz.layout.layout import Layout
from shardviz.relate.tolerance import SINGLE
from shardviz.relate.values import error_of, part_of
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Lines, Value
    from shardviz.check.step.lines.states import States


def wrong_results(lines: Lines, states: States) -> list[Value]:
    """Return what a module returns wrong, or the loss of a step around the model."""
    loss = [lines.results["loss"]] if lines.is_step and "loss" in lines.results else []
    return [value for value, _ in (*lines.returned, *loss) if states.placed(value).is_wrong]


def misplaced_fault(lines: Lines, states: States) -> Fault | None:
    """Return the line that takes another rank's part; None if no call combines it with the rank's own part."""
    wrong = wrong_results(lines, states)
    for call in lines.calls if wrong else ():
        if not call.outputs or not all(states.placed(value).is_wrong for value in call.outputs):
            continue
        given = {value: states.forward(value) for value in call.inputs}
        moved = next((value for value, state in given.items() if state.moved == "rank"), None)
        is_mixed = moved is not None and any(state.split_layout for state in given.values())
        if moved is not None and is_mixed and spoils(lines, states, call, wrong):
            maker = lines.producer(moved)
            earlier: Value | None = moved
            while maker is not None and earlier is not None:
                earlier = next((value for value in maker.inputs if states.forward(value).moved == "rank"), None)
                maker = maker if earlier is None else lines.producer(earlier)
            if maker is None:
                return given_fault(call)
            ranks = tuple(_strangers(lines, states, moved))
            gives = f"{reached(maker)} gives {named_ranks(ranks)} another rank's part"
            cause = MisplacedOperand(place_of(maker.line), maker.first.function, place_of(call.line), ranks)
            return fault_at(maker, f"{gives}; {at(call.line, maker.line)} combines it with the rank's own part", cause)
    return None


def spoils(lines: Lines, states: States, call: Call, wrong: list[Value]) -> bool:
    """Whether nothing right comes of a call's result, and what the module returns does."""
    derived = set(call.outputs)
    if any(states.forward(value).kind != "none" for value in derived):
        return False
    for later in lines.calls[call.order + 1 :]:
        if derived & {*later.inputs}:
            if any(states.placed(value).is_known for value in later.outputs):
                return False
            derived |= {*later.outputs}
    return any(value in derived for value in wrong)


def _strangers(lines: Lines, states: States, moved: Value) -> Iterator[int]:
    """Yield the ranks that don't have their own part."""
    held, whole, layout = states.held(moved), states.whole(lines.wanted[moved]), states.forward(moved).layout
    for rank, region in layout.regions() if whole is not None and layout is not None else ():
        if whole is not None and rank in held and error_of(held[rank], part_of(whole, region)) > SINGLE:
            yield rank


MAX_LENGTH = 4096
"""Stretches of a longer dim are not looked for."""


@dataclass(frozen=True)
class Stretch:
    """What one rank has of a dim, and what it should have.

    Attributes:
        rank: The rank.
        dim: The dim.
        first: The first index that it has.
        due: The first index that it should have.
        length: How many it has.
    """

    rank: int
    dim: int
    first: int
    due: int
    length: int


def shifted_fault(lines: Lines, states: States, wrong: list[Value]) -> Fault | None:
    """Return the line that takes a stretch at a wrong offset; None if no call combines it with the rank's own part."""
    for call in lines.calls if wrong else ():
        if not call.outputs or not all(states.placed(value).is_wrong for value in call.outputs):
            continue
        layouts = [layout for value in call.inputs if (layout := _split_layout(states, value)) is not None]
        for value in call.inputs if layouts else ():
            stretch = next((one for layout in layouts if (one := _stretch(lines, states, value, layout))), None)
            if stretch is not None and spoils(lines, states, call, wrong):
                return _fault_of_stretch(lines, states, value, call, stretch, layouts)
    return None


def _split_layout(states: States, value: Value) -> Layout | None:
    state = states.forward(value)
    return state.layout if state.kind == "right" and state.split_layout else None


def _stretch(lines: Lines, states: States, value: Value, layout: Layout) -> Stretch | None:
    """Return the stretch of the first rank that has a wrong one, if every rank has one stretch of a dim."""
    number = lines.wanted.get(value)
    whole = states.whole(number) if number is not None and states.forward(value).kind != "right" else None
    held = states.held(value) if whole is not None else {}
    if whole is None or not held or len(held) < states.mesh.size or not whole.ndim:
        return None
    first = next(iter(held.values()))
    dims = [dim for dim in range(whole.ndim) if first.ndim == whole.ndim and first.shape[dim] < whole.shape[dim]]
    if len(dims) != 1 or any(array.shape != first.shape for array in held.values()):
        return None
    starts = {rank: _starts(array, whole, dims[0]) for rank, array in held.items()}
    due = _due(states, layout, whole.shape[dims[0]])
    if due is None or any(len(own) != 1 for own in starts.values()):
        return None
    off = next((rank for rank, own in starts.items() if own[0] != due[rank]), None)
    return None if off is None else Stretch(off, dims[0], starts[off][0], due[off], first.shape[dims[0]])


def _starts(held: NDArray[np.float64], whole: NDArray[np.float64], dim: int) -> list[int]:
    """Return where in a dim of the whole a rank's stretch begins, for every place that fits."""
    whole, held = np.moveaxis(whole, dim, 0), np.moveaxis(held, dim, 0)
    if len(whole) > MAX_LENGTH or held.shape[1:] != whole.shape[1:] or not held.size:
        return []
    near = SINGLE * float(np.max(np.abs(whole)))
    return [
        start
        for start in range(len(whole) - len(held) + 1)
        if np.all(np.abs(whole[start] - held[0]) <= near)
        and np.all(np.abs(whole[start : start + len(held)] - held) <= near)
    ]


def _due(states: States, layout: Layout, length: int) -> dict[int, int] | None:
    """Return where each rank's part begins in a dim of this length that an axis splits; None without one."""
    chains = {
        chain for size, chain in zip(layout.shape, layout.chains, strict=True) if size == length and len(chain) == 1
    }
    if len(chains) != 1:
        return None
    split = Layout(states.mesh, (length,), (chains.pop(),))
    return {rank: region.dims[0][0][0] for rank, region in split.regions()}


def _fault_of_stretch(
    lines: Lines, states: States, value: Value, call: Call, stretch: Stretch, layouts: list[Layout]
) -> Fault | None:
    """Return the fault of the line that decides the offset: the last with a number of the rank's, or the first."""
    maker = lines.producer(value)
    while maker is not None and not maker.counts_by_rank:
        earlier = next((one for one in maker.inputs if _stretch(lines, states, one, layouts[0])), None)
        before = lines.producer(earlier) if earlier is not None else None
        if before is None:
            break
        maker = before
    if maker is None:
        return None
    first, due, length = stretch.first, stretch.due, stretch.length
    given = f"{reached(maker)} gives rank {stretch.rank} elements {first} to {first + length - 1} of dim {stretch.dim}"
    sentence = f"{given}; {at(call.line, maker.line)} combines them with its part, {due} to {due + length - 1}"
    places = place_of(maker.line), maker.first.function, place_of(call.line)
    return fault_at(maker, sentence, ShiftedPart(*places, stretch.rank, stretch.dim, first, due, length))
