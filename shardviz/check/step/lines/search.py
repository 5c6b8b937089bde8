"""The search for the first wrong call of a module's forward, backwards from a tensor that is wrong.

It ends at the call whose result has no relation to the unsharded model's although all that it is given has one. A term
of a sum is such a relation, so if a call is given one and its result has none, the sum is missing before it.

What a rank computes with numbers of its own, such as the places of its part, need not be a part of anything, nor do
indices into its part, and what it makes of those. It is passed over until something comparable comes of it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.calls import JOINS, SELECTS, Call, Value
from shardviz.check.step.lines.exchanges import COPIES, MOVES, ROOM, SUMS
from shardviz.check.step.lines.fault import (
    Act,
    Fault,
    at,
    averaged_terms,
    between,
    extreme_of_part,
    fault_at,
    first_reader,
    given_fault,
    ratio_of_terms,
    scaled_term,
    scaling_of,
    unlike_input,
    unsummed,
    wrong_argument,
    wrong_count,
    wrong_reduction,
    wrong_result,
)
from shardviz.check.step.lines.offsets import is_stretch
from shardviz.check.step.lines.operands import (
    counts_of_part,
    generator_of,
    is_compared,
    is_of_axis,
    is_of_sizes,
    of_own_part,
    other_arguments,
    other_number,
    wrong_buffers,
)
from shardviz.check.step.lines.parts import cause_of_part, unlike_dim
from shardviz.check.step.lines.state import State, words_of
from shardviz.explain.step.line_reductions import MeansSummedLine, UnaveragedLine
from shardviz.explain.step.lines import INDEXING, CarriedLine
from shardviz.explain.templates import number as written
from shardviz.groups import walk
from shardviz.relate.tolerance import EXACT, SINGLE
from shardviz.relate.values import is_alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import FrameRecord

LOGSUMEXP = "logsumexp"
NORM = "norm"
POWERS = {
    LOGSUMEXP: (LOGSUMEXP, np.exp),
    **dict.fromkeys((NORM, "vector_norm"), (NORM, np.square)),
}
"""Functions of which ranks' results, each raised to a power, add up to that of the whole."""

EXTREMES = ("max", "amax", "min", "amin", "aminmax", "any", "all", "topk", "norm", "vector_norm", LOGSUMEXP)
"""Functions of which a part's result needs a maximum, a minimum or a logsumexp over ranks."""

DIVISIONS = ("div", "div_", "truediv", "itruediv", "true_divide", "true_divide_", "divide", "divide_")
"""Functions that divide: a rank may divide its own term of a sum, but by the whole number."""

GUARDS = ("clamp", "clip", "clamp_min", "maximum", "add", *COPIES)
"""Functions that keep a divisor from being zero, or give it another dtype."""


class ForwardSearch:
    """Calls of a module, with what is known of their tensors, and which of these are each rank's own."""

    def __init__(self, states: States) -> None:
        """Take the calls and the states."""
        lines = states.lines
        self.lines, self.states = lines, states
        right = [value for value in lines.carried if states.placed(value).is_known]
        carried = lines.carried if right else {}  # sums may be relative to another maximum
        self.carried = {value: count for value, count in carried.items() if not lines.is_of_positions(value)}
        self._own: dict[Value, bool] = {}
        self._leaves: list[Value] = []

    def is_own(self, value: Value) -> bool:
        """Whether a tensor need not be a part of anything: it is made with numbers of the rank's own, or of indices."""
        if not self._own:
            for call in self.lines.calls:  # what a call is given comes before it, so that nothing recurses deeply
                for neighbor in (*call.inputs, *call.outputs):
                    self._note_own(neighbor)
        return self._note_own(value)

    def _note_own(self, value: Value) -> bool:
        if value not in self._own:
            self._own[value] = False
            self._own[value] = not self.states.placed(value).is_known and self._is_own(value)
        return self._own[value]

    def _is_own(self, value: Value) -> bool:
        call = self.lines.producer(value)
        if value in self.carried:
            return False
        if call is None or call.function.startswith("all_to_all"):
            return True
        if call.function == "all_reduce" and self.states.placed(value).is_wrong:
            return False
        is_moved = self.lines.is_step and call.whole is not None and call.function in MOVES  # labels, shifted
        is_index = bool(call.inputs) and self.states.is_index(value) and not any(map(self.is_bad, call.inputs))
        is_index = (is_index and not is_moved) or self._is_micro_batch(call)
        return call.counts_by_rank or is_index or any(map(self._note_own, call.inputs))

    def _is_no_index(self, value: Value) -> bool:
        """Whether a tensor that the module is given holds numbers or a mask, and no indices.

        Whole numbers that are compared, as ids of documents are, mean the same on all ranks.
        """
        is_number = not self.states.is_index(value) or is_compared(self.states, value)
        return is_number and self.lines.origin(value).startswith("input")

    def _is_micro_batch(self, call: Call) -> bool:
        """Whether a step takes parts of its batch one after the other: each has other rows than the whole's part.

        Parts that one call combines, as the halves of pairs, are no micro-batches.
        """
        if not self.lines.is_step or call.function not in SELECTS or not call.inputs:
            return False
        readers = [reader for reader in self.lines.readers(call.inputs[0]) if reader.function in SELECTS]
        parts = {made for reader in readers for made in reader.outputs}
        combining = (later for part in parts for later in self.lines.readers(part) if later.function not in JOINS)
        alike = [reader for reader in readers if reader.place == call.place]
        is_several = len(call.outputs) > 1 or len(alike) > 1
        return is_several and not any(len(parts & {*later.inputs}) > 1 for later in combining)

    def is_bad(self, value: Value) -> bool:
        """Whether a tensor is wrong for certain."""
        return self.states.placed(value).is_wrong and not self._note_own(value)

    def blame(self, value: Value) -> Fault | None:
        """Go back from a wrong tensor to the call that makes the first one."""
        visited: set[Value] = set()
        while value not in visited:
            visited.add(value)
            call = self.lines.producer(value)
            if call is None:
                return None
            inputs, through = self._given(call)
            given = [(leaf, self.states.placed(leaf)) for leaf in self._leaves if self.lines.is_input(leaf)]
            unlike = [leaf for leaf, state in given if not state.is_known]
            if unlike:  # it arrives wrong, or is each rank's own
                if self.lines.is_cut:
                    return None
                is_wrong = all(self._is_no_index(leaf) and self.states.placed(leaf).is_wrong for leaf in unlike)
                reader = first_reader(reader for leaf in unlike for reader in self.lines.readers(leaf))
                argument, differs = unlike_input(self.states, unlike)
                return given_fault(reader, argument, differs, unlike, is_step=self.lines.is_step) if is_wrong else None
            bad = [tensor for tensor in inputs if self.is_bad(tensor)]
            terms = [tensor for tensor in inputs if self.states.placed(tensor).kind == "terms"]
            if terms and bad and all(map(self.is_mean_of_batch, bad)):
                return self._unsummed(terms[0], call, self.states.forward(value))
            if not bad or self._indexes_part(call, bad):
                right = [tensor for tensor in inputs if tensor not in bad]
                ratios = filter(None, map(self._ratio_of, (call, *through)))
                if value not in self.carried and self.lines.is_of_blocks(call):
                    return None
                return self._reads_another(call) or next(ratios, None) or self._fault_of(value, call, right, through)
            value = min(bad, key=lambda tensor: (self.lines.is_of_positions(tensor), self.lines.order(tensor)))
        return None

    def is_mean_of_batch(self, value: Value) -> bool:
        """Whether a tensor is the mean of each rank's own rows: where the loss is a mean over ranks, it may be."""
        state = self.states.forward(value)
        is_mean = math.isclose(state.factor, self.states.mesh.size_over(state.axes), rel_tol=SINGLE)
        return bool(state.axes) and is_mean and {*state.axes} <= {*self.states.batch_axes}

    def _indexes_part(self, call: Call, bad: Sequence[Value]) -> bool:
        """Whether a call indexes a rank's own part by positions that the code counts.

        In the whole, the same positions lie in other ranks' parts: no offset of the rank's would mend that.
        """
        is_counted = all(self.states.is_index(index) and self.lines.is_of_positions(index) for index in bad)
        is_index = is_counted and call.function in INDEXING and call.inputs[0] not in bad
        return is_index and cause_of_part(self.states, call, "") is not None

    def _fault_of(self, value: Value, call: Call, inputs: Sequence[Value], through: Sequence[Call]) -> Fault:
        """Return what is wrong with a call that is given right tensors and makes a wrong one."""
        if value in self.carried:
            return self._fault_of_loop(value, call)
        if (scaled := scaling_of(self.states, (call, *through))) is not None:
            return self._scaled(*scaled)
        places = {maker.place: maker for maker in sorted((call, *through), key=lambda maker: maker.order)}
        if len(places) > 1:
            first, *_, last = places.values()
            is_own = not any(maker.first.is_collective for maker in (call, *through))
            makers = (maker for maker in (call, *through) if maker.line.function == first.line.function)
            begins = [maker.first.since or maker.line for maker in makers]
            begin = min(begins, key=lambda line: line.line)
            return between(begin, last, is_own=is_own, buffers=wrong_buffers(self.states, self._leaves))
        state, terms = self.states.forward(value), [one for one in inputs if self.states.placed(one).kind == "terms"]
        if call.first.ranks and call.first.is_collective:
            return self._fault_of_reduction(state, call, inputs)
        if terms and (fault := self._fault_of_mean(state, self.states.forward(terms[0]), call, inputs)) is not None:
            return fault
        if terms and not (state.axes and self._is_summed(value)):
            is_ratio = call.function in DIVISIONS and len(terms) == len(inputs)
            return self._unsummed(terms[-1] if is_ratio else terms[0], call, state)
        return self._fault_of_result(state, call, inputs, through)

    def _scaled(self, call: Call, times: float) -> Fault:
        act = Act(call, "the whole", State("other", factor=times), self._before(call.inputs))
        return wrong_result(act, None, times, "", "", self._split_by([], times), None)

    def _fault_of_loop(self, value: Value, call: Call) -> Fault:
        """Return what is wrong with a variable that a loop carries from round to round, and has left wrong."""
        line, count = call.inner_line, self.carried[value]
        right = [other for other in self.carried if self.states.placed(other).is_known]
        makers = [maker.inner_line for other in right if (maker := self.lines.producer(other)) is not None]
        called = f", called in {at(call.line, line)}" if line != call.line else ""
        sentence = (
            f"{at(line)}{called} is the first wrong line: it runs {count} times on each rank, each time on its own "
            f"result, and ends with {self.states.forward(value).text}"
        )
        cause = CarriedLine(line.place, count, tuple(sorted({maker.place for maker in makers} - {line.place})))
        return replace(fault_at(call, sentence, cause), is_forward=True)

    def _fault_of_mean(self, state: State, term: State, call: Call, inputs: Sequence[Value]) -> Fault | None:
        """Return the fault of a call that multiplies each rank's term of a mean; None if it does something else."""
        is_multiple = state.kind == "other" and state.factor != 1 and not (state.op or state.moved)
        if not is_multiple or term.op != "avg" or state.axes != term.axes:
            return None
        size = self.states.mesh.size_over(state.axes)
        act = Act(call, term.text, state, self._before(inputs))
        times = state.factor / size
        return scaled_term(act, " and ".join(state.axes), times, is_size=math.isclose(times, size, rel_tol=SINGLE))

    def _fault_of_reduction(self, state: State, call: Call, inputs: Sequence[Value]) -> Fault:
        """Return what is wrong with a reduction: it sums copies, or what is whole already, or over the wrong ranks."""
        inner = self.states.forward(inputs[0]) if inputs else None
        act = Act(call, inner.text if inner is not None else "", state, self._before(inputs))
        if inner is None or inner.kind != "terms":
            times, is_whole = len(call.first.ranks), inner is not None and inner.kind == "right"
            is_repeated = is_whole and not state.axes and math.isclose(state.factor, times, rel_tol=EXACT)
            return wrong_reduction(act, "", times if is_repeated else 0)
        mesh, ranks = self.states.mesh, set(call.first.ranks)
        size = mesh.size_over(inner.axes)
        if inner.op == "avg" and {*state.axes} < {*inner.axes} and math.isclose(state.factor, size, rel_tol=SINGLE):
            return act.fault(MeansSummedLine(act.place, act.function, "", " and ".join(inner.axes), size))
        share = state.factor * len(ranks) if not (state.axes or inner.op) and size == len(ranks) else 0.0
        if math.isclose(share, 1.0, rel_tol=EXACT):
            return averaged_terms(act, " and ".join(inner.axes))
        others = [axis for axis in mesh.long_axes if axis not in inner.axes]
        copies = [axis for axis in others if ranks >= set(mesh.group_of(min(ranks), axis))]
        times = mesh.size_over(copies)
        is_of_copies = not (state.axes or inner.op) and times > 1 and math.isclose(state.factor, times, rel_tol=EXACT)
        return wrong_reduction(act, inner.axes[0], *((times, " and ".join(copies)) if is_of_copies else ()))

    def fault_of_moved(self, value: Value, call: Call) -> Fault:
        """Return what is wrong with a call that puts right numbers in another order."""
        inputs, through = self._given(call)
        return self._fault_of_result(self.states.forward(value), call, inputs, through)

    def _fault_of_result(self, state: State, call: Call, inputs: Sequence[Value], through: Sequence[Call]) -> Fault:
        given = [self.states.forward(tensor) for tensor in inputs]
        words = words_of(given) if inputs else generator_of(self.states, call)
        of_axes = self.states.mesh.size_over(state.axes)
        is_mean = state.op == "avg" or math.isclose(state.factor, of_axes, rel_tol=EXACT)
        is_mean = is_mean and all(other.kind != "terms" for other in given)
        axes = " and ".join(state.axes) if is_mean else ""
        between = sorted(through, key=lambda maker: maker.order)
        reader = next((maker for maker in between if maker.function not in MOVES | ROOM), next(iter(between), None))
        reads = reader.function if reader is not None else ""
        unlike = "" if reads else unlike_dim(self.states, inputs, call.function)
        times = state.factor if state.factor != 1 else 0
        held = replace(state, op="avg", factor=1.0) if axes and not state.op else state
        act = Act(call, words, held, self._before(inputs), self._sum_behind(call))
        if not reads and (fault := self._fault_of_extreme(act)) is not None:
            return fault
        number = other_number(call)
        of_part = None if times or reads else cause_of_part(self.states, call, words)
        if number is not None and not (axes or reads or self.states.mesh.long_axes):  # a stage's: nothing is a part
            return wrong_argument(act, *map(written, number))
        if not (times or state.moved or reads) and of_part is None:
            if not unlike and number is not None and is_of_axis(*number, self.states.mesh):
                return wrong_argument(act, *map(written, number), is_of_axis=True)
            if not unlike and all(arguments := other_arguments(self.states, call)):
                return wrong_argument(act, *arguments)
        is_of_rank = state.moved == "rank" and not reads and of_part is None
        if is_of_rank and (spoiler := self._spoils_alone(call)) is not None:
            return wrong_count(act, spoiler, counts_of_part(call, spoiler))
        if axes and not reads and (fault := self._fault_of_summed_means(act, state.axes)) is not None:
            return fault
        mean = self._unaveraged(act, state.axes) if axes else None
        fault = wrong_result(act, mean, times, reads, unlike, self._split_by(given, times), of_part)
        is_alone = not any(maker.first.ranks for maker in between)
        return replace(fault, is_of_sizes=bool(times) and is_of_sizes(call), is_scaled=fault.is_scaled and is_alone)

    def _unaveraged(self, act: Act, axes: tuple[str, ...]) -> UnaveragedLine:
        of_batch = set(axes) & set(self.states.batch_axes)
        is_own, is_same = (
            of_batch == set(axes),
            not of_batch and all(map(self.states.gives_whole_gradient, act.call.outputs)),
        )
        size = self.states.mesh.size_over(axes)
        return UnaveragedLine(act.place, act.function, " and ".join(axes), size, is_same, is_own)

    def _fault_of_summed_means(self, act: Act, axes: tuple[str, ...]) -> Fault | None:
        """Return the fault of a collective that sums the means which a call takes of ranks' parts, undivided."""
        summing, size = self._collective_behind(act.call, SUMS), self.states.mesh.size_over(axes)
        for made in sorted(self.lines.derived(summing), key=self.lines.order) if summing is not None else ():
            state = self.states.forward(made)
            is_multiple = state.kind == "other" and not state.axes and math.isclose(state.factor, size, rel_tol=SINGLE)
            if summing is not None and is_multiple:
                over = " and ".join(axes)
                cause = MeansSummedLine(summing.place, summing.function, act.place, over, size)
                return Act(summing, act.held.text, state, act.call.line).fault(cause)
        return None

    def _spoils_alone(self, call: Call) -> Call | None:
        """Return the first call that makes of a different rank's part, and of nothing else, what is no rank's part.

        With a rank's own part it would make no part of the unsharded model's, either.
        """
        moved = set(call.outputs)
        for later in self.lines.following(call):
            if not {*later.inputs} <= moved or later.whole is None or not later.outputs:
                continue
            if later.function in MOVES or all(is_stretch(self.states, value) is not False for value in later.outputs):
                moved |= {*later.outputs}
            else:
                return later
        return None

    def _fault_of_extreme(self, act: Act) -> Fault | None:
        """Return the fault of a call that takes a maximum of a rank's part, unless ranks reduce what it gives them."""
        call, state = act.call, act.held
        op, axis = state.op, state.axes[0] if state.axes else ""
        if call.function in POWERS and state.kind == "none":
            op, power = POWERS[call.function]
            axis = self.states.axis_of_powers(call.outputs[0], power)
        if call.function not in EXTREMES or op in ("", "avg") or not axis:
            return None
        reduction = self._collective_behind(call)
        held = self.states.forward(reduction.outputs[0]) if reduction is not None and reduction.outputs else None
        return extreme_of_part(act, axis, op, reduction, held)

    def _split_by(self, given: Sequence[State], times: float) -> tuple[str, bool]:
        """Return the axes whose size a number may be; with True if the number may be the root of the size.

        They split what the call is given or what the module holds: code counts either.
        """
        if times <= 0:
            return "", False
        weights = [value for value in self.lines.values if self.lines.origin(value).startswith("weight")]
        weights = [value for value in weights if not any(map(is_alike, self.states.held(value).values()))]
        states = [*given, *(self.states.placed(value) for value in weights)]
        splits = [axis for state in states if state.layout is not None for axis in state.layout.split_axes]
        for is_root in (False, True):
            number = times**2 if is_root else times
            sizes = {axis: self.states.mesh.axis_size(axis) for axis in splits}
            alike = [
                axis for axis, size in sizes.items() if math.isclose(max(number, 1 / number), size, rel_tol=SINGLE)
            ]
            if alike:
                return " or ".join(alike), is_root
        return "", False

    def _is_summed(self, value: Value) -> bool:
        """Whether a collective is given what is made of a tensor, as long as it has the terms of a sum."""

        def has_terms(value: Value) -> bool:
            state = self.states.forward(value)
            return bool(state.axes) or state.kind == "unknown"

        def readers(value: Value) -> list[Call]:
            return self.lines.readers(value) if has_terms(value) else []

        made = walk([value], lambda value: [made for call in readers(value) for made in call.outputs])
        return any(call.first.is_collective for value in made for call in readers(value))

    def _given(self, call: Call) -> tuple[list[Value], list[Call]]:
        """Return the comparable tensors that a call is made of, and the calls in between whose results are not.

        A result that depends on the rank's own numbers may be right whatever it holds, so it counts as in between.
        """
        inputs: list[Value] = []
        through: list[Call] = []
        self._leaves = []
        waiting = [(value, False) for value in call.inputs or self._of_source(call)]
        visited: set[Value] = set()
        while waiting:
            value, is_below = waiting.pop(0)
            if value in visited:
                continue
            visited.add(value)
            maker, is_own = self.lines.producer(value), is_below or self.is_own(value)
            is_blamed = self.is_bad(value) and not (is_own and self.states.is_index(value))
            if self.states.placed(value).is_known or is_blamed:
                inputs.append(value)
            elif maker is not None:
                through.append(maker)
                waiting += [(source, is_own) for source in maker.inputs]
            else:
                self._leaves.append(value)
        return inputs, through

    def _of_source(self, call: Call) -> list[Value]:
        """Return what a collective's source gives it, which other ranks have, too, and don't give it."""
        given = {(rank, number) for rank, record in call.records.items() for number in record.inputs}
        makers = dict.fromkeys(filter(None, map(self.lines.producers.get, given)))
        return [value for maker in makers for value in maker.outputs if given & {*value}]

    def _reads_another(self, call: Call) -> Fault | None:
        """Return that a call reads another tensor than the unsharded model's does: something was left out before it."""
        pairs = zip(call.inputs, call.whole.inputs, strict=False) if call.whole is not None else ()
        for value, whole in pairs:
            maker = self.lines.producer(value)
            is_other = self.lines.wanted.get(value, whole) != whole and maker is not None
            if is_other and maker is not None and not self.states.related(value, whole).is_known:
                return between(maker.line, call)
        return None

    def _before(self, given: Sequence[Value]) -> FrameRecord | None:
        return self.lines.line_of(max(given, key=self.lines.order)) if given else None

    def maker_of_terms(self, value: Value) -> Call | None:
        """Return the call whose result first is one term of a sum; a mask of own elements isn't."""
        call = self.lines.producer(value)
        while call is not None:
            terms = [tensor for tensor in self._given(call)[0] if self.states.placed(tensor).kind == "terms"]
            terms = [tensor for tensor in terms if self.states.held_dtype(tensor) != "bool"]
            earlier = self.lines.producer(terms[0]) if terms else None
            if earlier is None:
                return call
            call = earlier
        return None

    def _unsummed(self, terms: Value, call: Call, state: State) -> Fault:
        maker, state_of_terms = self.maker_of_terms(terms), self.states.forward(terms)
        before, last = maker.line if maker is not None else None, self.lines.producer(terms)
        act = Act(call, state_of_terms.text, state, before, self._sum_behind(call))
        axis, is_mean = state_of_terms.axes[0], state_of_terms.op == "avg"
        by_terms = call.function in DIVISIONS and len(call.inputs) > 1 and call.inputs[1] == terms
        if maker is not None and before == call.line and maker.inner_line != call.inner_line:
            fault = unsummed(replace(act, before=maker.inner_line), axis, is_mean=is_mean, is_inside=True)
        elif last is None or before != call.line or last.line != call.line:
            fault = unsummed(act, axis, is_mean=is_mean)
        else:
            is_beside_whole = any(self.states.forward(other).kind == "right" for other in call.inputs if other != terms)
            beside = of_own_part(self.states, call)
            fault = unsummed(act, axis, last.function, is_beside_whole=is_beside_whole, is_mean=is_mean, beside=beside)
        return replace(fault, by_terms=by_terms)

    def _ratio_of(self, call: Call) -> Fault | None:
        """Return the fault of a call that divides one term of a sum by one of another, kept from being zero or not."""
        if call.function not in DIVISIONS or len(call.inputs) < 2:
            return None
        numerator, divisors = self.states.forward(call.inputs[0]), [call.inputs[1]]
        while len(divisors) == 1 and self.states.forward(divisors[0]).kind != "terms":
            maker = self.lines.producer(divisors[0])
            given = maker.inputs if maker is not None and maker.function in GUARDS else ()
            divisors = [value for value in given if self.states.forward(value).kind != "right"]
        sides = [numerator, *(self.states.forward(value) for value in divisors)]
        if len(sides) != 2 or any((side.kind, side.op, side.axes) != ("terms", "", numerator.axes) for side in sides):
            return None
        act = Act(call, numerator.text, self.states.forward(call.outputs[0]), self._before(divisors))
        return ratio_of_terms(replace(act, summed=self._sum_behind(call)), numerator.axes[0])

    def _sum_behind(self, call: Call) -> str:
        """Return the collective that sums what a call makes, or a copy of it; empty if none does."""
        summing = self._collective_behind(call, SUMS)
        return summing.function if summing is not None else ""

    def _collective_behind(self, call: Call, names: tuple[str, ...] = ("",)) -> Call | None:
        """Return the collective that gets what a call makes, or a copy of it, if its name begins with one of these."""
        copying = walk([call], lambda made: [reader for reader in self.lines.after(made) if reader.function in COPIES])
        readers = (reader for made in copying for reader in self.lines.after(made))
        reading = (reader for reader in readers if reader.first.ranks or reader.function.startswith(SUMS))
        return next((reader for reader in reading if reader.function.startswith(names)), None)

    def never_summed(self, value: Value) -> Fault | None:
        """Return the line that makes terms of a sum which the module returns as they are."""
        maker, state = self.maker_of_terms(value), self.states.forward(value)
        return None if maker is None else unsummed(Act(maker, "", state, maker.line), state.axes[0])
