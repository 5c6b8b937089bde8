"""Lines that combine right numbers with a tensor that is not the one which their result needs.

A sum, a product or a quotient can be undone: what the unsharded model has of a result, and one operand, say what the
other must have been. If the rank has exactly that in a different tensor, the line reads the wrong one; if it has what
an operand must be multiplied by, or what must be added to it, that is left out there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING
from warnings import catch_warnings, simplefilter

import numpy as np

from shardviz.check.step.lines.fault import Fault, at, place_of
from shardviz.explain.step.lines import LACKS, OtherOperand
from shardviz.layout.candidates import placements_of
from shardviz.relate.tolerance import SINGLE
from shardviz.relate.values import part_of
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.lines import FrameRecord, LineRecord
    from shardviz.explain.step.lines import Lack
    from shardviz.layout.mesh import Mesh

    Array = NDArray[np.float64]

SUMS = ("add", "add_", "iadd", "radd")
DIFFERENCES = ("sub", "sub_", "isub")
PRODUCTS = ("mul", "mul_", "imul", "rmul")
QUOTIENTS = ("div", "div_", "truediv", "itruediv")
SAME = ("unsqueeze", "squeeze", "view", "reshape", "flatten", "unflatten", "contiguous", "clone", "to", "float")
"""Functions that leave every number where it is in memory."""

MAX_RESULTS = 16
"""Of more wrong results the first are undone."""

MAX_TENSORS = 32
"""Tensors before a result that are looked at."""

MAX_SLICES = 16
MAX_COMPARED = 1 << 26
"""Numbers of a rank that are compared at most."""

SAMPLE, UNLIKE = 64, 1e-2
"""Of so many numbers most are farther apart than this if two tensors have nothing in common."""

NEAR = 10 * SINGLE
LEAST = 8
"""Fewer numbers may be equal by chance."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """What makes a rank's result right.

    Attributes:
        line: The line that combines something else.
        function: What it calls.
        lack: What the tensor is for an operand of it.
        source: Where the tensor comes from: a line with its text, or what the module is given.
    """

    line: FrameRecord
    function: str
    lack: Lack
    source: str


def operand_fault(states: States) -> Fault | None:
    """Return the line that lacks a tensor which makes its result right on all ranks; None without proof."""
    lines = states.lines
    if not any(states.placed(value).is_wrong for value, _ in lines.returned):
        return None
    wrong = (value for value in lines.values if value in lines.wanted and states.placed(value).kind == "none")
    of_ranks = {rank: _Rank(states, rank) for rank in lines.sharded}
    for value in islice(wrong, MAX_RESULTS):
        whole, held = states.whole(lines.wanted[value]), states.held(value)
        for parts in splits(states.mesh, whole, held) if whole is not None else ():
            numbers = {rank: number for rank, number in value if not _is_near(held[rank], parts[rank])}
            lacking = [list(of_ranks[rank].lacking(number, parts[rank])) for rank, number in numbers.items()]
            shared = [each for each in next(iter(lacking), []) if all(each in of_rank for of_rank in lacking[1:])]
            if shared:
                best = min(shared, key=lambda each: LACKS.index(each.lack))
                return _fault(best, tuple(numbers))
    return None


def _fault(lacking: Lacking, ranks: Sequence[int]) -> Fault:
    cause = OtherOperand(place_of(lacking.line), lacking.function, lacking.lack, lacking.source)
    how = {"itself": "in place of an operand", "factor": "as a further factor", "term": "as a further term"}
    sentence = (
        f"{at(lacking.line)} is the first wrong line: with {lacking.source} {how[lacking.lack]}, its result on "
        f"{named_ranks(ranks)} is the unsharded model's"
    )
    return Fault(lacking.line, lacking.function, sentence, cause)


def splits(mesh: Mesh, whole: Array, held: Mapping[int, Array]) -> Iterator[dict[int, Array]]:
    """Yield each rank's part of a tensor, for each split that gives them these shapes."""
    regions = {rank: dict(placements_of(whole.shape, array.shape, mesh, rank)) for rank, array in held.items()}
    for placements in next(iter(regions.values()), {}):
        if all(placements in of_rank for of_rank in regions.values()):
            yield {rank: part_of(whole, of_rank[placements]) for rank, of_rank in regions.items()}


class _Rank:
    """The calls of one rank, with what it has of their tensors."""

    def __init__(self, states: States, rank: int) -> None:
        record = states.lines.sharded[rank]
        self.maker = {number: line for line in reversed(record.lines) for number in line.outputs}
        self._states, self._rank = states, rank
        self._origins = {tensor.number: tensor.origin for tensor in record.values}
        self._arrays: dict[int, Array | None] = {}
        self._left = MAX_COMPARED

    def array(self, number: int) -> Array | None:
        """Return a tensor's numbers; None if they weren't kept."""
        if number not in self._arrays:
            self._arrays[number] = self._states.held(((self._rank, number),)).get(self._rank)
        return self._arrays[number]

    def lacking(self, number: int, due: Array) -> Iterator[Lacking]:
        """Yield what would make a tensor the due one: of the call that makes it, or of those before."""
        waiting, seen = [(number, due)], {number}
        while waiting and self._left > 0:
            made, due_of_made = waiting.pop(0)
            self._left -= due_of_made.size
            line = self.maker.get(made)
            for operand, needed in self._undone(line, due_of_made) if line is not None else ():
                held = self.array(operand)
                if line is None or held is None or _is_near(np.broadcast_to(held, needed.shape), needed):
                    continue
                for lack, source in self._lacks(held, needed, set(line.inputs), made):
                    yield Lacking(line.frames[line.innermost], line.function, lack, source)
                of_operand = _reduced(needed, held.shape)
                if of_operand is not None and operand not in seen and len(seen) < MAX_TENSORS:
                    seen.add(operand)
                    waiting.append((operand, of_operand))

    def _source(self, number: int, *, is_slice: bool) -> str:
        """Return where a tensor comes from: the line that makes it, or what it is of the module."""
        maker = self.maker.get(number)
        source = f"what {at(maker.frames[maker.innermost])} makes" if maker is not None else self._origins[number]
        return f"a slice of {source}" if is_slice else source

    def _undone(self, line: LineRecord, due: Array) -> Iterator[tuple[int, Array]]:
        """Yield each operand of a call, with what it must be for the call to make what is due."""
        if line.function in SAME and len(line.inputs) == 1:
            held = self.array(line.inputs[0])
            if held is not None and held.size == due.size:
                yield line.inputs[0], due.reshape(held.shape)
        if len(line.inputs) != 2:
            return
        first, second = (self.array(number) for number in line.inputs)
        if first is None or second is None or due.shape not in (first.shape, second.shape):
            return
        with np.errstate(all="ignore"):
            if line.function in SUMS:
                needed = due - second, due - first
            elif line.function in DIFFERENCES:
                needed = due + second, first - due
            elif line.function in PRODUCTS:
                needed = due / second, due / first
            elif line.function in QUOTIENTS:
                needed = due * second, first / due
            else:
                return
        yield from zip(line.inputs, needed, strict=True)

    def _lacks(self, held: Array, needed: Array, inputs: set[int], made: int) -> Iterator[tuple[Lack, str]]:
        """Yield the tensors, of those before a result, that are what an operand must be, or lacks to be it."""
        with np.errstate(all="ignore"):
            ways: dict[Lack, Array] = {"itself": needed, "factor": needed / held, "term": needed - held}
        for number in (number for number in self._origins if number < made and number not in inputs):
            array = self.array(number) if self._left > 0 else None
            if array is None or array.size < 2:
                continue
            for part, (lack, due) in product(_slices(array, needed.ndim), ways.items()):
                if _fits(part, due) and self._is_due(np.broadcast_to(part, due.shape), due):
                    yield lack, self._source(number, is_slice=part.ndim < array.ndim)

    def _is_due(self, array: Array, due: Array) -> bool:
        """Whether an array is the due one, of which a few numbers are compared first."""
        self._left -= SAMPLE
        if not _may_be_near(array, due):
            return False
        self._left -= due.size
        return _is_near(array, due)


def _slices(array: Array, ndim: int) -> Iterator[Array]:
    """Yield a tensor, and its slices that have so many dims."""
    yield array
    leads = array.shape[: array.ndim - ndim]
    if leads and np.prod(leads) <= MAX_SLICES:
        yield from array.reshape(-1, *array.shape[len(leads) :])


def _fits(array: Array, due: Array) -> bool:
    pairs = zip(array.shape, due.shape, strict=False)
    return array.ndim == due.ndim and all(size in (1, due_size) for size, due_size in pairs)


def _reduced(needed: Array, shape: tuple[int, ...]) -> Array | None:
    """Return what is needed of an operand that is repeated along some dims; None if that differs along them."""
    padded = (1,) * (needed.ndim - len(shape)) + shape
    dims = tuple(dim for dim, size in enumerate(padded) if size < needed.shape[dim])
    with np.errstate(all="ignore"), catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # of slices of which nothing is needed
        mean = np.nanmean(np.where(np.isfinite(needed), needed, np.nan), dims, keepdims=True) if dims else needed
    return mean.reshape(shape) if _is_near(np.broadcast_to(mean, needed.shape), needed) else None


def _may_be_near(array: Array, due: Array) -> bool:
    """Whether a few numbers of two arrays are near, as far as they are due."""
    step = max(due.size // SAMPLE, 1)
    some, wanted = array.flat[::step], due.flat[::step]
    is_due = np.isfinite(some) & np.isfinite(wanted)
    off = np.abs(some[is_due] - wanted[is_due])
    return not off.size or bool(np.median(off) <= UNLIKE * np.max(np.abs(wanted[is_due])))


def _is_near(array: Array, due: Array) -> bool:
    """Whether an array is the due one, at all places that are due any number, and these are many and different."""
    is_due = np.isfinite(due) & np.isfinite(array)
    wanted = due[is_due]
    is_equal = wanted.size >= LEAST and np.max(np.abs(array[is_due] - wanted)) <= NEAR * np.max(np.abs(wanted))
    return bool(is_equal) and len(np.unique(wanted)) >= LEAST
