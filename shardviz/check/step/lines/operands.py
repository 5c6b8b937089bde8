"""What calls are given: another tensor than their result needs, other numbers or words, or DTensors.

A sum, a product or a quotient can be undone: what the unsharded model has of a result, and one operand, say what the
other must have been. If the rank has exactly that in a different tensor, the line reads the wrong one; if it has what
an operand must be multiplied by, or what must be added to it, that is left out there.

A function of DTensors returns what it returns of whole tensors, whatever their placements are, and its backward does
so, too. If what goes in is right, a rule of torch's for that function is wrong.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import islice, product
from typing import TYPE_CHECKING
from warnings import catch_warnings, simplefilter

import numpy as np

from shardviz.check.step.lines.calls import ADDITIONS, Call, Value
from shardviz.check.step.lines.fault import Fault, at, fault_at, reached
from shardviz.check.step.lines.state import MAX_RATIO
from shardviz.errors import LayoutError
from shardviz.explain.step.line_reductions import WrongLineBackward, WrongOperator
from shardviz.explain.step.lines import DRAWS, INDEXING, LACKS, Lack, OtherOperand
from shardviz.explain.templates import number as written
from shardviz.groups import the_only, walk
from shardviz.layout.layout import Layout, placements_of
from shardviz.layout.placements import Partial, Placement, Replicate, Shard, parse_placements
from shardviz.relate.factors import REDUCTIONS, over
from shardviz.relate.tolerance import ELEMENT, EXACT, SINGLE
from shardviz.relate.values import error_of, part_of
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import FrameRecord, LineRecord
    from shardviz.layout.mesh import Mesh

    Array = NDArray[np.float64]
    Arrays = Mapping[int, Array]

DIFFERENCES = ("sub", "sub_", "isub")
PRODUCTS = ("mul", "mul_", "imul", "rmul")
QUOTIENTS = ("div", "div_", "truediv", "itruediv")
SAME = ("unsqueeze", "squeeze", "view", "reshape", "flatten", "unflatten", "contiguous", "clone", "to", "float")
"""Functions that leave every number where it is in memory."""

MAX_RESULTS = 16
"""Of more wrong results the first are undone."""

MAX_TENSORS = 32
"""Tensors before a result that are looked at."""

MAX_LISTED = 4
MAX_SLICES = 16
MAX_COMPARED = 1 << 26
"""Numbers of a rank that are compared at most."""

SAMPLE, UNLIKE = 64, 1e-2
"""Of so many numbers most are farther apart than this if two tensors have nothing in common."""

NEAR = 10 * SINGLE
LEAST = 8
"""Fewer numbers may be equal by chance."""

ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "truediv", "rtruediv", "pow", "rpow", "remainder", "clamp")
"""Functions of a tensor and a number that is no size of their result."""

OWN_ROWS = (Partial("sum"), Partial("avg"))
"""What ranks may have of a number along the axes of other rows, which a DTensor of a part of the mesh does not name."""


def operand_fault(states: States) -> Fault | None:
    """Return the line that lacks a tensor which makes its result right on all ranks; None without proof."""
    lines = states.lines
    if not any(states.placed(value).is_wrong for value, _ in lines.returned):
        return None
    wrong = (value for value in lines.values if value in lines.wanted and states.placed(value).kind == "none")
    of_ranks = {rank: CallsOfRank(states, rank) for rank in lines.sharded}
    for value in islice(wrong, MAX_RESULTS):
        whole, held = states.whole(lines.wanted[value]), states.held(value)
        for parts in splits(states.mesh, whole, held) if whole is not None else ():
            numbers = {rank: number for rank, number in value if not _is_near(held[rank], parts[rank])}
            lacking = [list(of_ranks[rank].lacking(number, parts[rank])) for rank, number in numbers.items()]
            shared = [each for each in next(iter(lacking), []) if all(each in of_rank for of_rank in lacking[1:])]
            if shared:
                line, cause = min(reversed(shared), key=lambda each: LACKS.index(each[1].lack))
                ways = {"itself": "in place of an operand", "term": "as a further term"}
                how = ways.get(cause.lack, "as a further factor")
                sentence = (
                    f"{at(line)} is the first wrong line: with {cause.source} {how}, its result on "
                    f"{named_ranks(tuple(numbers))} is the unsharded model's"
                )
                return Fault(line, cause.function, sentence, cause)
    return None


def splits(mesh: Mesh, whole: Array, held: Mapping[int, Array]) -> Iterator[dict[int, Array]]:
    """Yield each rank's part of a tensor, for each split that gives them these shapes."""
    regions = {rank: dict(placements_of(whole.shape, array.shape, mesh, rank)) for rank, array in held.items()}
    for placements in next(iter(regions.values()), {}):
        if all(placements in of_rank for of_rank in regions.values()):
            yield {rank: part_of(whole, of_rank[placements]) for rank, of_rank in regions.items()}


class CallsOfRank:
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

    def lacking(self, number: int, due: Array) -> Iterator[tuple[FrameRecord, OtherOperand]]:
        """Yield what would make a tensor the due one, of the call that makes it or of those before, with its line."""
        waiting, seen = [(number, due)], {number}
        while waiting and self._left > 0:
            made, due_of_made = waiting.pop(0)
            self._left -= due_of_made.size
            line = self.maker.get(made)
            for operand, needed in self._undone(line, due_of_made) if line is not None else ():
                held = self.array(operand)
                if line is None or held is None or _is_near(np.broadcast_to(held, needed.shape), needed):
                    continue
                for lack, source in self.lacks(held, needed, set(line.inputs), made):
                    frame = line.frames[line.innermost]
                    yield frame, OtherOperand(frame.place, line.function, lack, source)
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
            if line.function in ADDITIONS:
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

    def lacks(self, held: Array, needed: Array, inputs: set[int], made: int) -> Iterator[tuple[Lack, str]]:
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
        yield from self._factors(ways["factor"], made)

    def _factors(self, factor: Array, made: int) -> Iterator[tuple[Lack, str]]:
        """Yield what a factor is that is the same at all positions, and another one for each head or channel."""
        dim, constant = _constant(factor)
        if not constant.size:
            return
        before = [number for number in self._origins if number < made and self._source(number, is_slice=False)]
        before.sort(key=self.maker.__contains__)
        arrays = ((number, self.array(number)) for number in before)  # what the module holds first
        alike = ((number, array) for number, array in arrays if array is not None and array.size == constant.size)
        number, power = next(((one, power) for one, array in alike if (power := _power(array, constant))), (0, 0))
        if power:
            source = self._source(number, is_slice=False)
            ways = {1: source, -1: f"1 / {source}"}
            yield "factor", ways.get(power, f"{source} to the power of {power}")
        else:
            yield "numbers", f"{listed(map(written, constant), MAX_LISTED)} for the slices of dim {dim}"

    def _is_due(self, array: Array, due: Array) -> bool:
        """Whether an array is the due one, of which a few numbers are compared first."""
        self._left -= SAMPLE
        if not _may_be_near(array, due):
            return False
        self._left -= due.size
        return _is_near(array, due)


def _constant(factor: Array) -> tuple[int, Array]:
    """Return the dim along which alone a factor varies, and its numbers; none if that is not one dim."""
    for dim in range(factor.ndim) if factor.size and not np.isinf(factor).any() else ():
        rows = np.moveaxis(factor, dim, 0).reshape(factor.shape[dim], -1)
        if not (np.count_nonzero(np.isfinite(rows), 1) >= LEAST).all():  # zero of zero is any number
            continue
        mean: Array = np.nanmean(rows, 1)
        if np.nanmax(np.abs(rows - mean[:, None])) <= NEAR * np.abs(mean).min() < np.ptp(mean):
            return dim, mean
    return 0, np.empty(0)


def _power(array: Array, wanted: Array) -> int:
    """Return the power of an array that some numbers are; 0 if they are none."""
    base = array.ravel()
    if not min(base.min(), wanted.min()) > 0 or not np.ptp(base) or (base == 1).any():
        return 0
    powers = np.log(wanted) / np.log(base)
    power = round(float(powers[0]))
    return power if np.abs(powers - power).max() <= NEAR * max(abs(power), 1) else 0


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


def other_number(call: Call) -> tuple[float, float] | None:
    """Return the one number that all ranks give a call and the unsharded model does not, and the unsharded model's."""
    pairs = list(_other_arguments(call))
    if len(pairs) != 1:
        return None
    if all(map(_is_size, pairs[0])) and call.function not in ARITHMETIC:
        return None
    with suppress(ValueError):  # `True` is no number, nor is what a damaged file has
        return float(pairs[0][0]), float(pairs[0][1])
    return None


def other_arguments(states: States, call: Call) -> tuple[str, str]:
    """Return what ranks give a call instead of what the unsharded model gives it; empty if a part may need it.

    Whole numbers may be sizes or indices, of which a part has others if anything is split.
    """
    is_split = bool(states.mesh.long_axes)
    pairs = [pair for pair in _other_arguments(call) if not (is_split and all(map(_is_size, pair)))]
    return ", ".join(given for given, _ in pairs), ", ".join(wanted for _, wanted in pairs)


def is_compared(states: States, value: Value) -> bool:
    """Whether whole numbers, or what is computed of them, are compared, and never index anything."""

    def numbers_of(number: Value) -> list[Value]:
        made = (made for call in states.lines.readers(number) for made in call.outputs)
        return list(filter(states.is_index, made))

    reading = [(one, call) for one in walk([value], numbers_of) for call in states.lines.readers(one)]
    is_index = any(
        call.function == "embedding" or (call.function in INDEXING and one in call.inputs[1:]) for one, call in reading
    )
    return not is_index and any(states.held_dtype(made) == "bool" for _, call in reading for made in call.outputs)


def counts_of_part(*calls: Call) -> str:
    """Say which numbers ranks give calls in place of which: `arange gets 3 for 5 and div gets 2 for 4`."""
    pairs_of = {call: list(_other_arguments(call)) for call in calls}
    return " and ".join(
        f"{call.function} gets {', '.join(map(' for '.join, pairs))}" for call, pairs in pairs_of.items() if pairs
    )


def is_of_sizes(call: Call) -> bool:
    """Whether both sides multiply by different numbers that are small ratios, or roots of such, as no norm is."""
    different = [number for pair in _other_arguments(call) for number in pair]
    with suppress(ValueError, OverflowError):
        squares = [float(number) ** 2 for number in different]
        return bool(squares) and all(
            math.isclose(square, Fraction(square).limit_denominator(MAX_RATIO), rel_tol=EXACT) for square in squares
        )
    return False


def is_of_axis(number: float, wanted: float, mesh: Mesh) -> bool:
    """Whether a number is another one times an axis's size or its root: it may be made of the size of a part."""
    small, large = sorted((abs(number), abs(wanted)))
    ratio = large / small if small else 0.0
    sizes = [mesh.axis_size(axis) for axis in mesh.long_axes]
    return any(math.isclose(power, size, rel_tol=SINGLE) for size in sizes for power in (ratio, ratio**2))


def generator_of(states: States, call: Call) -> str:
    """Say what ranks draw random numbers from, if they draw as many as the unsharded model; else nothing."""
    whole = states.whole(call.whole.outputs[0]) if call.whole is not None and call.whole.outputs else None
    held = states.held(call.outputs[0]) if call.outputs and call.function in DRAWS else {}
    if whole is None or not held or any(drawn.shape != whole.shape for drawn in held.values()):
        return ""
    are_equal = all((drawn == next(iter(held.values()))).all() for drawn in held.values())
    return "a generator in another state" if are_equal else "a seed or generator of each rank's own"


def _other_arguments(call: Call) -> Iterator[tuple[str, str]]:
    """Yield the arguments that all ranks give a call and the unsharded model does not, with the unsharded model's."""
    if call.whole is None or call.counts_by_rank:
        return
    given, wanted = call.first.numbers.split(), call.whole.numbers.split()
    if len(given) == len(wanted):
        yield from (pair for pair in zip(given, wanted, strict=True) if pair[0] != pair[1])


def _is_size(word: str) -> bool:
    """Whether an argument may be a size or an index: a whole number."""
    return word.lstrip("-").isdecimal()


def operator_fault(states: States, calls: Iterable[Call] | None = None) -> Fault | None:
    """Return the first function that returns something else of DTensors than of the whole; None if there is none.

    Args:
        calls: The calls that it may be; None for all.
    """
    for call in states.lines.calls if calls is None else sorted(calls, key=lambda call: call.order):
        if not _is_operator(states, call) or all(_is_as_claimed(states, value) is not False for value in call.outputs):
            continue
        if all(_is_as_claimed(states, value) for value in call.inputs):
            function, labels = call.function, _labels(states, call)
            made = ", ".join(_label(states, value) for value in call.outputs)
            sentence = (
                f"{reached(call)} is the first wrong line: {function} gets {labels}, all as they claim, and what it "
                f"returns as {made} is not the unsharded model's"
            )
            return fault_at(call, sentence, WrongOperator(call.place, function, labels))
    return None


def with_operator(states: States, fault: Fault | None) -> Fault | None:
    """Return a fault in backward, or that of the function of DTensors of which only the backward is wrong."""
    if fault is None or not isinstance(fault.cause, WrongLineBackward):
        return fault
    for call in states.lines.calls:
        is_here = call.line == fault.line and call.function == fault.cause.function
        if not is_here or not _is_operator(states, call):
            continue
        of_call = [*call.inputs, *call.outputs]
        if all(_is_as_claimed(states, value, with_rows=True) for value in of_call):
            labels = _labels(states, call)
            cause = WrongOperator(call.place, call.function, labels, is_backward=True)
            return replace(fault, sentence=f"{fault.sentence}; it is given {labels}, all as they claim", cause=cause)
    return fault


def _is_operator(states: States, call: Call) -> bool:
    """Whether a call is a function of torch's on DTensors alone, the same as the unsharded model's."""
    function, whole = call.function, call.whole
    is_same = whole is not None and {record.numbers for record in call.records.values()} == {whole.numbers}
    is_torchs = function.islower() and function not in DRAWS and not call.first.is_collective
    return (
        is_same
        and is_torchs
        and bool(call.inputs and call.outputs)
        and all(_label(states, value) for value in (*call.inputs, *call.outputs))
    )


def _label(states: States, value: Value) -> str:
    """Return the placements that a DTensor has on all ranks; empty if it is none, or ranks differ."""
    labels = {states.lines.records[pair].placements for pair in value}
    return labels.pop() if len(labels) == 1 else ""


def _labels(states: States, call: Call) -> str:
    return " and ".join(dict.fromkeys(f"[{_label(states, value)}]" for value in call.inputs))


def _is_as_claimed(states: States, value: Value, *, with_rows: bool = False) -> bool | None:
    """Whether a DTensor is what it claims to be of the unsharded model's; None if that is not known.

    Args:
        with_rows: Whether ranks may have different rows along axes that the DTensor doesn't span.
    """
    whole, held, mesh = states.reference_of(value), states.held(value), states.mesh
    if whole is None or len(held) < mesh.size:
        return None
    split = [Shard(dim) for dim in range(whole.ndim)]
    rows: tuple[Placement, ...] = (Replicate(), *split, *OWN_ROWS) if with_rows else (Replicate(),)
    near = ELEMENT.get(states.held_dtype(value), EXACT)
    try:
        claimed = _claimed(states, value, whole.ndim)
        ways = product(*((claimed[axis],) if axis in claimed else rows for axis in mesh.axes))
        return any(_has_placements(states, held, whole, placements, near) for placements in ways) if claimed else None
    except LayoutError:
        return None


def _claimed(states: States, value: Value, num_dims: int) -> dict[str, Placement]:
    """Return the placements of a DTensor by axis; empty if ranks differ, or axes are none of the mesh's.

    Raises:
        LayoutError: The dump has what no DTensor can have.
    """
    axes = the_only({states.lines.records[pair].axes for pair in value}) or ()
    placements = parse_placements(_label(states, value), num_dims)
    is_possible = len(placements) == len(axes) and set(axes) <= set(states.mesh.axes)
    return dict(zip(axes, placements, strict=True)) if is_possible else {}


def _has_placements(states: States, held: Arrays, whole: Array, placements: Sequence[Placement], near: float) -> bool:
    mesh = states.mesh
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Partial):
            held = over(axis, placement.op, held, mesh) if placement.op in REDUCTIONS else {}
    settled = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    layout = Layout.from_placements(mesh, whole.shape, settled)
    return len(held) == mesh.size and all(
        held[rank].shape == region.shape and error_of(held[rank], part_of(whole, region)) <= near
        for rank, region in layout.regions()
    )


def of_own_part(states: States, call: Call) -> str:
    """Return what else the line of a call makes wrongly of right tensors alone: a statistic of each rank's own part."""
    lines = states.lines
    others = (other for other in lines.calls if other.inner_line == call.inner_line and other is not call)
    wrong = (
        other.function
        for other in others
        if other.inputs
        and all(states.placed(value).kind == "right" for value in other.inputs)
        and any(states.placed(value).is_wrong for value in other.outputs)
        and not any(reader.first.is_collective for value in other.outputs for reader in lines.readers(value))
    )
    return listed(dict.fromkeys(wrong))


def wrong_buffers(states: States, values: Iterable[Value]) -> list[str]:
    """Return the buffers of floats among what a module reads that are no part of the unsharded model's."""
    origins = ((value, states.lines.origin(value)) for value in values)
    return [
        f"the {origin}"
        for value, origin in origins
        if origin.startswith("buffer ") and states.placed(value).is_wrong and "float" in states.held_dtype(value)
    ]
