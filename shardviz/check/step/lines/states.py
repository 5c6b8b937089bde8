"""Relations of ranks' tensors inside a module to the unsharded model's, with gradients."""

from __future__ import annotations

import math
from functools import cached_property, partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardviz.check.step.lines.calls import ADDITIONS, Call, Lines, Value
from shardviz.check.step.lines.composed import candidates, steps_in
from shardviz.check.step.lines.flat import state_of_joined
from shardviz.check.step.lines.state import UNKNOWN, State, state_of
from shardviz.dump.records.trace import of_value
from shardviz.errors import ShardvizError
from shardviz.layout.layout import Layout, padded_shapes, shared_placements
from shardviz.layout.splits import segment_numbers
from shardviz.relate.factors import over, pairs_along
from shardviz.relate.relations import Pair
from shardviz.relate.search import relation_of
from shardviz.relate.tolerance import ELEMENT, EXACT, SINGLE, Bound
from shardviz.relate.values import error_of, padded_to, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump
    from shardviz.layout.region import Region

COLLECTIVES_OF_TERMS = ("all_reduce", "reduce")
INTEGERS = ("int", "uint")
MAX_BESIDE = 4
"""A tensor that more readers hand back gradients of is not looked at."""
MIN_DISTINCT = 16
"""Fewer different numbers stand in some order by chance."""
MIN_MEAN = 2
"""What a mean is of has at least so many elements."""
FIRST_COMPOSED = -(1 << 20)
"""The first number of a tensor that the unsharded model's functions compute on the way; others count down from it."""
MAX_SIZE = 1 << 20
"""A tensor of more elements is not related."""


class States:
    """Relates the tensors of a module's lines, each once."""

    def __init__(self, dump: Dump, lines: Lines) -> None:
        self.dump, self.lines, self.mesh = dump, lines, lines.mesh_in(dump)
        self._placed: dict[tuple[Value, bool], State] = {}
        self._refined_states: dict[tuple[Value, bool], State] = {}
        self.mean_axes: frozenset[str] = frozenset()
        self._scales = {
            rank: next((point.scale for point in record.trace if point.what.startswith("gradient")), 1.0)
            for rank, record in dump.files.ranks.items()
        }
        if any(self._is_loss(value, number) for value, number in lines.returned):
            self._scales = dict.fromkeys(self._scales, 1.0)
        self.mean_axes = frozenset(self._axes_of_batch()) if lines.is_step else self.mean_axes

    def _is_loss(self, value: Value, number: int) -> bool:
        """Whether a module returns a number whose gradient is the unsharded model's: a loss, which tells the scale."""
        held, whole = self._arrays(value, gradient=True), self.whole(number, gradient=True)
        is_number = whole is not None and whole.size == 1 and bool(held)
        return is_number and all(array.size == 1 and np.all(array == whole) for array in held.values())

    def _axes_of_batch(self) -> Iterator[str]:
        """Yield the axes that split the batch, of a step around the model: as is claimed, or by what the model gets."""
        yield from self.batch_axes
        for call in self.lines.calls:
            if any(self.lines.origin(value).startswith("output") for value in call.outputs):
                for value in (value for value in call.inputs if value in self.lines.wanted):
                    layout = self.related(value, self.lines.wanted[value]).layout
                    yield from layout.split_axes if layout is not None else ()

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which the loss is claimed to be a mean: ranks along them have different rows of the batch."""
        loss = self.dump.find("step", "scalar", "loss")
        return tuple(axis for axis, _ in loss.claimed.partial) if loss is not None and loss.claimed is not None else ()

    def placed(self, value: Value, *, gradient: bool = False) -> State:
        """Return whether ranks have the unsharded model's values of a tensor, by placements alone.

        It tells what is right, terms of a sum, wrong or unknown. What is wrong about values, `forward` and `gradient`
        say, which takes ten times as long.
        """
        if gradient and not self.is_right:
            return UNKNOWN  # they come from a wrong result
        if (value, gradient) not in self._placed:
            self._placed[value, gradient] = UNKNOWN
            self._placed[value, gradient] = self._gradient(value) if gradient else self._forward(value)
        return self._placed[value, gradient]

    def forward(self, value: Value) -> State:
        """Return the relation of ranks' values of a tensor to the unsharded model's."""
        return self._refined(value, gradient=False)

    def gradient(self, value: Value) -> State:
        """Return the relation of ranks' gradients of a tensor; unknown if the tensor is wrong."""
        return self._refined(value, gradient=True)

    def _refined(self, value: Value, *, gradient: bool) -> State:
        state = self.placed(value, gradient=gradient)
        if not state.is_wrong or state.kind == "missing":
            return state
        if (value, gradient) not in self._refined_states:
            refined = self._gradient(value, is_refined=True) if gradient else self._forward(value, is_refined=True)
            self._refined_states[value, gradient] = refined
        return self._refined_states[value, gradient]

    @cached_property
    def wrong_results(self) -> list[Value]:
        """What the module returns wrong, or the loss of a step around the model."""
        return [value for value, _ in self.lines.returned if self.placed(value).is_wrong]

    @cached_property
    def is_right(self) -> bool:
        """Whether the module returns what the unsharded one does: else gradients come from a wrong result."""
        return all(self.placed(value).is_known for value, _ in self.lines.returned)

    def _forward(self, value: Value, *, is_refined: bool = False) -> State:
        reference_number = self.lines.wanted.get(value)
        if reference_number is not None:
            state = self.related(value, reference_number, is_refined=is_refined)
            joined = state_of_joined(self, value) if state.is_wrong and self.lines.is_step else None
            return joined or state
        call = self.lines.producer(value)
        if call is None or call.whole is not None:
            return UNKNOWN
        for argument in call.inputs:
            before = self.placed(argument)
            source = self.lines.wanted.get(argument)
            if source is None:
                continue
            state = self.related(value, source)
            is_reduced = call.function in COLLECTIVES_OF_TERMS and before.is_known
            if state.is_known or is_reduced:
                self.lines.wanted[value] = source
                return state
        return self._of_composed(value)

    def _of_composed(self, value: Value) -> State:
        """Relate a tensor that no unsharded line makes to an intermediate result of a function that one calls."""
        maker = self.lines.producer(value)
        is_extreme = maker is not None and maker.function in ("max", "amax")
        held = self._arrays(value) if "float" in self.held_dtype(value) else {}
        steps = self._composed.items() if held else ()
        for number in candidates(steps, held, self.mesh, by_totals=not is_extreme):
            state = self.related(value, number)
            if state.is_known or (state.op == "max" and is_extreme and state.layout is not None):
                self.lines.wanted[value] = number
                return state
        return UNKNOWN

    @cached_property
    def _composed(self) -> Mapping[int, NDArray[Any]]:
        """What functions of torch's compute on the way in the unsharded model, by numbers of their own."""
        steps: dict[int, NDArray[Any]] = {}
        for line, step in steps_in(self.lines.unsharded, self.whole):
            number = FIRST_COMPOSED - len(steps)
            steps[number], self.lines.composed[number] = step, line.inputs[0]
        return steps

    def _gradient(self, value: Value, *, is_refined: bool = False) -> State:
        forward, reference_number = self.placed(value), self.lines.wanted.get(value)
        record = self.lines.wholes.get(reference_number) if reference_number is not None else None
        if reference_number is None or record is None or not forward.is_known or not record.has_gradient:
            return UNKNOWN
        if self._shares_gradient(value, reference_number):
            return UNKNOWN
        records = [self.lines.records[pair] for pair in value]
        if not any(record.has_gradient for record in records):
            return State("missing") if all(record.needs_grad for record in records) else UNKNOWN
        if not all(record.has_gradient for record in records):
            return UNKNOWN
        state = self.related(value, reference_number, gradient=True, is_refined=is_refined)
        if state.is_wrong and not is_refined and (residuals := self._residuals(value, reference_number)):
            branch = self.related(value, reference_number, gradient=True, residuals=residuals)
            state = branch if branch.is_known else state
        if forward.kind == "terms" and set(state.axes) & set(forward.axes):
            return State("none", state.layout, state.axes)  # the gradient of a term is that of the sum
        return state

    def _residuals(self, value: Value, reference_number: int) -> list[int]:
        """Return the sums that the unsharded model makes of a tensor, if ranks make none of it.

        Their gradient is part of its own. Where ranks give a branch a copy, the copy gets that of the branch alone.
        """
        readers = [line for line in self.lines.unsharded.lines if reference_number in line.inputs]
        paired = [call.whole for call in self.lines.readers(value)]
        apart = [line for line in readers if line not in paired]
        is_branch = len(apart) < len(readers) and all(line.function in ADDITIONS for line in apart)
        return [line.outputs[0] for line in apart if line.outputs] if is_branch else []

    def _shares_gradient(self, value: Value, reference_number: int) -> bool:
        """Whether the unsharded tensor's gradient comes back in part to an earlier tensor, as through a copy of it."""
        for earlier in self.lines.of_wanted(reference_number):
            if earlier == value:
                return False
            outputs = [one for call in self.lines.readers(earlier) for one in call.outputs]
            if any(self.placed(one).is_known and self.lines.wanted.get(one) != reference_number for one in outputs):
                return True
        return False

    @cached_property
    def _averaged_axes(self) -> frozenset[str]:
        """Axes over which the step's loss is a mean, and each rank's backward runs on the rank's own term of it."""
        loss = self.dump.find("step", "scalar", "loss")
        if self.lines.is_step and loss is None:  # of a job, whose loss nobody wrote down
            return self.mean_axes if any(map(self._is_mean_of_own, self.lines.calls)) else frozenset()
        if not self.lines.is_step or loss is None or loss.claimed is None or "loss" not in self.lines.results:
            return frozenset()
        if self._is_of_whole_loss:
            return frozenset()
        came_back = self.held(self.lines.results["loss"][0], gradient=True)
        is_own = bool(came_back) and all(array.size == 1 and np.all(array == 1) for array in came_back.values())
        is_mean = all(op == "avg" for _, op in loss.claimed.partial)
        return frozenset(axis for axis, _ in loss.claimed.partial) if is_own and is_mean else frozenset()

    def _is_mean_of_own(self, call: Call) -> bool:
        """Whether a call makes a number of each rank's own rows that stands for its mean: its gradient is as large.

        What comes back to it is the unsharded model's, and what it sends back is that times the number of ranks that
        have other rows, for each of their parts.
        """
        numbers = [(value, self.lines.wanted[value]) for value in call.outputs if value in self.lines.wanted]
        if not self.mean_axes or len(numbers) != 1 or not self._is_loss_of(*numbers[0]):
            return False
        size = self.mesh.size_over(self.mean_axes)
        for value in (value for value in call.inputs if value in self.lines.wanted):
            whole = self.whole(self.lines.wanted[value], gradient=True)
            held = self._arrays(value, gradient=True)
            if whole is None or whole.size < MIN_MEAN or self.mesh.size != len(held):
                continue
            near = ELEMENT.get(self._dtype(self.lines.wanted[value], gradient=True), EXACT)
            chain = relation_of(Pair(whole, held, None, self.mesh, Bound(near)), is_refined=False)
            state = state_of(chain.chain, self.mesh, frozenset(), is_number=False)
            is_split = state.layout is not None and self.mean_axes <= {*state.layout.split_axes}
            if is_split and not state.axes and math.isclose(state.factor, size, rel_tol=SINGLE):
                return True
        return False

    def _is_loss_of(self, value: Value, reference_number: int) -> bool:
        """Whether a tensor is a number, and its gradient is the unsharded model's on every rank."""
        held, whole = self._arrays(value, gradient=True), self.whole(reference_number, gradient=True)
        is_number = whole is not None and whole.size == 1 and len(held) == self.mesh.size
        return is_number and all(array.size == 1 and np.all(array == whole) for array in held.values())

    @cached_property
    def _is_of_whole_loss(self) -> bool:
        """Whether the loss is of a DTensor over all axes that split the batch: gradients are those of the whole."""
        value = self.lines.results.get("loss", ((), 0))[0]
        maker = self.lines.producer(value) if value else None
        sources = [value, *(maker.inputs if maker is not None else ())]
        axes = ([set(self.lines.records[pair].axes) for pair in source] for source in sources)
        return any(every and all(own and set(self.batch_axes) <= own for own in every) for every in axes)

    def _times_loss(self, value: Value) -> float:
        """Return by what a rank's gradient is too large before ranks' are averaged.

        A term of a mean has its own gradient, and so has what every rank computes alike, as a penalty on weights.
        """
        forward = self.forward(value)
        axes = self._averaged_axes - set(forward.axes if forward.op == "avg" else ())
        return float(self.mesh.size_over(axes & self._axes_behind(value) if axes else axes))

    def _axes_behind(self, value: Value) -> set[str]:
        """Return the axes along which ranks have parts or terms of what a tensor is made of, or of itself."""
        sources = [value, *(source for call in self.lines.makers(value) for source in call.inputs)]
        states = [self.placed(source) for source in sources]
        if any(state.layout is None for state in states):
            return set(self.mesh.axes)
        return {axis for state in states if state.layout for axis in (*state.layout.split_axes, *state.axes)}

    def related(
        self,
        value: Value,
        reference_number: int,
        *,
        gradient: bool = False,
        is_refined: bool = False,
        residuals: Sequence[int] = (),
    ) -> State:
        """Return the relation of ranks' values, or of their gradients, to any tensor of the unsharded model.

        Args:
            value: The ranks' tensor.
            reference_number: The unsharded model's.
            gradient: Whether gradients are meant.
            is_refined: Whether it is also looked for what is wrong about them.
            residuals: The unsharded model's tensors whose gradients are no part of the ranks'.
        """
        whole = self.whole(reference_number, gradient=gradient)
        for number in residuals:
            other = self.whole(number, gradient=True)
            whole = whole - other if whole is not None and other is not None and other.shape == whole.shape else None
        held = self.gradients(value) if gradient else self._arrays(value)
        if whole is None or not whole.size or self.mesh.size != len(held):
            return UNKNOWN
        near = ELEMENT.get(self._dtype(reference_number, gradient=gradient), EXACT)
        with np.errstate(over="ignore", invalid="ignore"):  # memory that nothing was written to holds anything
            related = relation_of(Pair(whole, held, None, self.mesh, Bound(near)), is_refined=is_refined)
        is_scaled = gradient and self._times_loss(value) != 1
        mean_axes = frozenset[str]() if is_scaled else self.mean_axes
        state = state_of(related.chain, self.mesh, mean_axes, is_number=whole.size == 1)
        if mean_axes and self._is_equal_count(state, reference_number):
            return State("terms", state.layout, tuple(axis for axis in self.mesh.axes if axis in mean_axes))
        if not state.is_known and (shaped := self._shaped(whole, held, mean_axes, near)) is not None:
            return shaped
        is_moved = is_refined and state.kind == "none" and self._is_rearranged(whole, held, near)
        return State("other", moved="order") if is_moved else state

    def _shaped(
        self, whole: NDArray[Any], held: Mapping[int, NDArray[Any]], mean_axes: frozenset[str], near: float
    ) -> State | None:
        """Return that ranks have their parts, or terms of a mean, in dims that were merged or padded; None if not."""
        for axes in dict.fromkeys([(), tuple(axis for axis in self.mesh.axes if axis in mean_axes)]):
            for axis in axes:
                held = over(axis, "avg", held, self.mesh)
            layouts = chain(self._flattened(whole, held, near), self._padded(whole, held, near))
            layout = next(layouts, None) if len(held) == self.mesh.size else None
            if layout is not None:
                return State("terms", layout, axes, op="avg") if axes else State("right", layout)
        return None

    def _is_equal_count(self, state: State, reference_number: int) -> bool:
        """Whether ranks count equally many of the batch's rows or labels: each count is its term of the sum."""
        size = self.mesh.size_over(self.mean_axes)
        is_count = self._dtype(reference_number).startswith(INTEGERS) and state.layout is not None
        return is_count and not state.axes and math.isclose(state.factor * size, 1, rel_tol=EXACT)

    def sent_back(self, value: Value, call: Call) -> State:
        """Return the relation of what a call sends back to one of its inputs; unknown if that was not kept apart."""
        wanted, sent = self.lines.wanted.get(value), call.sent(value)
        of_whole = dict(call.whole.sent).get(wanted) if call.whole is not None and wanted is not None else None
        if sent is None or of_whole is None:
            return UNKNOWN
        return self.related(sent, of_whole, gradient=True)

    def terms_beside(self, value: Value, others: Sequence[Value]) -> str:
        """Return the axis over which a tensor's gradient lacks a sum; empty if it lacks none.

        Each rank has what other readers hand back, which is whole, and its own term of what is left. Readers hand back
        the gradient of what they make, as a residual does, or its sum, as the start of another branch does.
        """
        reference_number = self.lines.wanted.get(value)
        if reference_number is None or len(others) > MAX_BESIDE or self.gradient(value).kind != "none":
            return ""
        whole = self.whole(reference_number, gradient=True)
        held, *gradients = [self.gradients(one) for one in (value, *others)]
        if whole is None or not held or not all(gradients):
            return ""
        if any(array.shape != whole.shape for own in (held, *gradients) for array in own.values()):
            return ""
        near = ELEMENT.get(self._dtype(reference_number), EXACT)
        for axis in self.mesh.long_axes:
            for ways in product(*((own, over(axis, "sum", own, self.mesh)) for own in gradients)):
                total = {rank: sum((own[rank] for own in ways), np.zeros(whole.shape)) for rank in held}
                remainder = over(axis, "sum", {rank: held[rank] - total[rank] for rank in held}, self.mesh)
                if len(remainder) == len(held) and all(
                    error_of(remainder[rank] + total[rank], whole) <= near for rank in remainder
                ):
                    return axis
        return ""

    def gradients(self, value: Value) -> dict[int, NDArray[np.float64]]:
        """Return each rank's gradient of a tensor, in the unsharded model's scale; empty if it wasn't kept."""
        times, arrays = self._times_loss(value), self._arrays(value, gradient=True)
        if self._averaged_axes or self._is_of_whole_loss:  # these say it without what may be wrong in the loss itself
            return {rank: array / times for rank, array in arrays.items()}
        return {rank: array / (self._scales[rank] or 1.0) for rank, array in arrays.items()}

    def _flattened(self, whole: NDArray[Any], held: Mapping[int, NDArray[Any]], near: float) -> Iterator[Layout]:
        """Yield the layouts that ranks have of a dim which was made of several, and is split along inner ones, too."""
        axes = self.mesh.long_axes
        outer_axes: list[tuple[str, ...]] = [(), *((axis,) for axis in axes)]
        first = next(iter(held.values()))
        for dim, size in enumerate(whole.shape if first.ndim == whole.ndim else ()):
            for outer, axis in product(outer_axes, axes):
                num_outer, num = self.mesh.size_over(outer), self.mesh.axis_size(axis)
                if axis in outer or first.shape[dim] * num_outer * num != size:
                    continue
                for number in segment_numbers(size // num_outer // num):
                    chains: tuple[tuple[str | int, ...], ...] = tuple(
                        (*outer, number, axis) if at == dim else () for at in range(whole.ndim)
                    )
                    layout = Layout(self.mesh, whole.shape, chains)
                    if all(error_of(held[rank], part_of(whole, region)) <= near for rank, region in layout.regions()):
                        yield layout

    def _padded(self, whole: NDArray[Any], held: Mapping[int, NDArray[Any]], near: float) -> Iterator[Layout]:
        """Yield the layouts of what ranks have with zeros behind the end of a dim, as of one that no axis divides."""
        first = next(iter(held.values()))
        is_even = first.ndim == whole.ndim and all(array.shape == first.shape for array in held.values())
        shapes = {rank: array.shape for rank, array in held.items()}
        sizes = (1, *(self.mesh.axis_size(axis) for axis in self.mesh.long_axes))
        for shape in padded_shapes(whole.shape, first.shape, sizes) if is_even else ():
            if math.prod(shape) <= MAX_SIZE:
                fits = partial(_is_near, padded_to(whole, shape), held, near)
                placements = shared_placements(shape, shapes, self.mesh, fits)
                if placements is not None:
                    yield Layout.from_placements(self.mesh, shape, placements)

    def _is_rearranged(self, whole: NDArray[Any], held: Mapping[int, NDArray[Any]], near: float) -> bool:
        """Whether every rank, or all ranks along an axis together, have each number once, wherever it stands."""
        if len(np.unique(whole)) < max(MIN_DISTINCT, whole.size // 2):
            return False
        groups: list[list[tuple[int, ...]]] = [[(rank,) for rank in held]]
        groups += [list(self.mesh.groups(axis)) for axis in self.mesh.axes]
        wanted = np.sort(whole, axis=None)
        for sharing in groups:
            joined = [np.concatenate([held[rank].ravel() for rank in group]) for group in sharing]
            if all(one.size == whole.size and error_of(np.sort(one), wanted) <= near for one in joined):
                return True
        return False

    def axis_of_powers(self, value: Value, power: np.ufunc = np.exp) -> str:
        """Return the axis over which powers of ranks' numbers add up to the unsharded model's; else ''."""
        whole = self.reference_of(value)
        held = self.held(value)
        if whole is None or not held or any(array.shape != whole.shape for array in held.values()):
            return ""
        with np.errstate(over="ignore", invalid="ignore"):
            powers, wanted = {rank: power(array) for rank, array in held.items()}, power(whole)
            sums = {axis: over(axis, "sum", powers, self.mesh) for axis in self.mesh.axes}
            fits = (axis for axis, of in sums.items() if of and all(error_of(of[r], wanted) <= SINGLE for r in held))
            return next(fits, "")

    def gives_whole_gradient(self, value: Value) -> bool:
        """Whether the unsharded model's whole gradient comes back to every rank, also of a tensor that is wrong."""
        wanted, held = self.reference_of(value, gradient=True), self._arrays(value, gradient=True)
        return wanted is not None and bool(held) and all(error_of(array, wanted) <= SINGLE for array in held.values())

    def differs_along(self, value: Value, axis: str, *, gradient: bool = False) -> bool:
        """Whether ranks along an axis hold different numbers, in a tensor or in its gradient."""
        pairs = pairs_along(axis, self._arrays(value, gradient=gradient), self.mesh)
        return any(other.shape != first.shape or error_of(other, first) > EXACT for first, other in pairs)

    def _array(self, moment: Literal["step", "reference"], rank: int, number: int, *, gradient: bool) -> NDArray[Any]:
        if moment == "reference" and number in self.lines.composed and not gradient:
            return self._composed[number]
        if moment == "reference" and number in self.lines.without_bias:
            made, bias = self.lines.without_bias[number]
            array = self._array(moment, rank, made, gradient=gradient)
            return array if gradient else array - self._array(moment, rank, bias, gradient=False)
        name = of_value(self.lines.module, number, gradient=gradient)
        tensor = self.dump.by_name(moment, "activation")[name]
        return np.asarray(self.dump.values(tensor.shards[rank], name), np.float64)

    def _arrays(self, value: Value, *, gradient: bool = False) -> dict[int, NDArray[Any]]:
        """Return each rank's values of a tensor, or what came back to them; empty if they weren't kept."""
        try:
            return {rank: self._array("step", rank, number, gradient=gradient) for rank, number in value}
        except (ShardvizError, KeyError):
            return {}

    def held(self, value: Value, *, gradient: bool = False) -> dict[int, NDArray[np.float64]]:
        """Return each rank's values of a tensor, or what came back to them; empty if not kept, or too large."""
        held = self._arrays(value, gradient=gradient)
        return held if all(array.size <= MAX_SIZE for array in held.values()) else {}

    def whole(self, number: int, *, gradient: bool = False) -> NDArray[np.float64] | None:
        """Return a tensor of the unsharded model's, or its gradient; None if it was not kept, or is too large."""
        try:
            array = self._array("reference", 0, number, gradient=gradient)
        except (ShardvizError, KeyError):
            return None
        return array if array.size <= MAX_SIZE else None

    def reference_of(self, value: Value, *, gradient: bool = False) -> NDArray[np.float64] | None:
        """Return the unsharded model's tensor that a tensor is compared with, or its gradient; None as `whole`."""
        number = self.lines.wanted.get(value)
        return None if number is None else self.whole(number, gradient=gradient)

    def is_index(self, value: Value) -> bool:
        """Whether a tensor holds whole numbers, as indices do."""
        return self.held_dtype(value).startswith(INTEGERS)

    def held_dtype(self, value: Value) -> str:
        """Return the element type of what the first rank has; empty if it is not there."""
        rank, number = value[0]
        tensor = self.dump.by_name("step", "activation").get(of_value(self.lines.module, number))
        return tensor.shards[rank].body.dtype if tensor is not None and rank in tensor.shards else ""

    def _dtype(self, wanted: int, *, gradient: bool = False) -> str:
        number = self.lines.composed.get(wanted, self.lines.without_bias.get(wanted, (wanted,))[0])
        tensor = self.dump.by_name("reference", "activation")[of_value(self.lines.module, number, gradient=gradient)]
        return tensor.first.body.dtype


def _is_near(whole: NDArray[Any], held: Mapping[int, NDArray[Any]], near: float, rank: int, region: Region) -> bool:
    """Whether a rank has a region of a tensor."""
    return error_of(held[rank], part_of(whole, region)) <= near
