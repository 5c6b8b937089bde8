"""The line at which gradients first go wrong: given right ones, it hands back a wrong one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from shardviz.check.step.lines.calls import CONVERSIONS, JOINS, SELECTS, Call, Value
from shardviz.check.step.lines.exchanges import EXCHANGE, MOVES
from shardviz.check.step.lines.fault import Fault, after, at, fault_at, reached
from shardviz.check.step.lines.functions import APPLIED, applied_at, averaged_fault, function_fault
from shardviz.check.step.lines.parts import halo_not_sent_back
from shardviz.check.step.lines.search import EXTREMES
from shardviz.check.step.lines.state import State, words_of
from shardviz.check.step.lines.states import MAX_BESIDE, States
from shardviz.explain.step.gradients import UnsummedInputGradient
from shardviz.explain.step.graphs import DetachedInLine, ReadElsewhere
from shardviz.explain.step.line_reductions import (
    GradientsOfOtherMicroBatches,
    UnreducedGather,
    UnsummedLineBackward,
    WholeGradientSummedAgain,
    WrongLineBackward,
)
from shardviz.explain.step.line_rows import ExchangeNotReversed
from shardviz.groups import the_only, walk
from shardviz.layout.region import Region
from shardviz.relate.factors import over
from shardviz.relate.tolerance import ELEMENT, SINGLE
from shardviz.relate.values import error_of, part_of
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.explain.cause import Cause

KEEPS = ("detach", "data", "clone", "to")
"""Functions by which code keeps a tensor without its graph."""

CUTS = ("detach", "data")
"""Functions that cut the graph."""

MAXIMA = ("max", "amax", "min", "amin")
"""Functions whose result is subtracted from what they are given, and needs no gradient for that."""

MOST_LISTED = 8
"""Micro-batches that are listed at most."""


def backward_fault(states: States) -> Fault | None:
    """Return the line at which gradients first go wrong, of a module or a loss whose forward is right."""
    lines = states.lines
    search = _Backward(states)
    wrong = [value for value in lines.values if states.placed(value, gradient=True).is_wrong]
    if (gather := _gather_fault(states, wrong)) is not None:
        return gather
    if not wrong or any(states.placed(value, gradient=True).is_wrong for value, _ in lines.returned):
        return None
    leaving = [value for value in wrong if not _is_contained(states, value)]
    return search.blame(max(leaving, key=lines.order)) if leaving else None


def _gather_fault(states: States, wrong: Sequence[Value]) -> Fault | None:
    """Return the line that gathers a tensor of which each rank gets its part of its own gradient alone."""
    for value in sorted(wrong, key=states.lines.order, reverse=True):
        layout = states.forward(value).layout
        for made, call in _first_known(states, value) if layout is not None else ():
            gathered = states.forward(made)
            if layout is None or gathered.kind != "right" or gathered.layout is None:
                continue
            for axis in (axis for axis in layout.split_axes if axis not in gathered.layout.split_axes):
                if _lacks_gradients_of_others(states, value, made, axis):
                    return _fault_of_gather(_gather_behind(states, call), axis)
    return None


def _gather_behind(states: States, call: Call) -> Call:
    """Return the collective that comes last before a call which joins parts; the call itself if it joins none."""
    before = (earlier for earlier in reversed(states.lines.calls[: call.order]) if earlier.first.is_collective)
    return next(before, call) if call.function in JOINS else call


def _first_known(states: States, value: Value) -> Iterator[tuple[Value, Call]]:
    """Yield the first tensors made of one that are known again, with the calls that make them."""
    waiting, seen = [value], {value}
    while waiting:
        for call in states.lines.readers(waiting.pop(0)):
            for made in (made for made in call.outputs if made not in seen):
                seen.add(made)
                if states.placed(made).is_known:
                    yield made, call
                waiting += [] if states.placed(made).is_known and call.whole is not None else [made]


def _lacks_gradients_of_others(states: States, value: Value, made: Value, axis: str) -> bool:
    """Whether a tensor's gradient is right once what other ranks send back to the gathered one is added."""
    whole, layout = states.reference_of(value, gradient=True), states.forward(value).layout
    held, came = map(states.gradients, (value, made))
    dims = [dim for dim, chain in enumerate(layout.chains) if axis in chain] if layout is not None else []
    if whole is None or layout is None or whole.shape != layout.shape or len(dims) != 1 or not held or not came:
        return False
    near = max(SINGLE, ELEMENT.get(states.held_dtype(value), SINGLE))
    sums, misses = over(axis, "sum", came, states.mesh), False
    for rank, region in layout.regions():
        shape = came[rank].shape if rank in sums else ()
        if len(shape) != whole.ndim or shape[dims[0]] != whole.shape[dims[0]]:
            return False
        along = Region(tuple(region.dims[dim] if dim == dims[0] else ((0, size),) for dim, size in enumerate(shape)))
        lacking = part_of(sums[rank] - came[rank], along)
        if lacking.shape != held[rank].shape or error_of(held[rank] + lacking, part_of(whole, region)) > near:
            return False
        misses |= error_of(held[rank], part_of(whole, region)) > near
    return misses


def _fault_of_gather(call: Call, axis: str) -> Fault:
    applied = next((frame for frame in call.first.frames if APPLIED.search(frame.source)), None)
    line = call.line if applied is None else applied
    begin = f"in backward {at(line)}{f', called in {at(call.line, line)},' if line != call.line else ''} is the first"
    sentence = f"{begin} wrong line: each rank gets its part of its own gradient, without the other ranks'"
    cause = UnreducedGather(line.place, axis, applied is None and call.function in CONVERSIONS)
    return replace(fault_at(call, sentence, cause), line=line)


def micro_batches_fault(states: States) -> Fault | None:
    """Return that micro-batches' outputs get the gradients of other ones, if a step calls the module for each.

    No line of the module is wrong: the code that calls it pairs outputs and gradients.
    """
    for rank in states.lines.sharded:
        pairs = _micro_batches(states, rank)
        if len(pairs) > 1 and sorted(pairs) == sorted(pairs.values()) and any(to != of for to, of in pairs.items()):
            call = next((call for call in reversed(states.lines.calls) if rank in call.records), None)
            if call is None:
                return None
            to, of = (listed([*numbers], MOST_LISTED) for numbers in (pairs.keys(), pairs.values()))
            sentence = f"on rank {rank}, the gradients of micro-batches {of} come back to the outputs of {to}"
            cause = GradientsOfOtherMicroBatches(rank, to, of)
            return replace(fault_at(call, sentence, cause), is_given=True)
    return None


def _micro_batches(states: States, rank: int) -> dict[int, int]:
    """Return of which micro-batch a rank's gradient is that comes back to each one's output; empty if not certain.

    An output is known by its numbers among the unsharded model's, and so is its gradient, at the same place of a call.
    """
    lines = states.lines
    by_call: defaultdict[int, list[int]] = defaultdict(list)
    for line in lines.unsharded.lines:
        by_call[line.call] += line.outputs
    if len(by_call) < 2:
        return {}
    places = {number: (call, at) for call, numbers in by_call.items() for at, number in enumerate(numbers)}
    pairs: dict[int, int] = {}
    for number in (number for returned in lines.sharded[rank].returned for number in returned):
        if not lines.records[rank, number].has_gradient:
            continue
        held, came = (states.held(((rank, number),), gradient=gradient).get(rank) for gradient in (False, True))
        homes = {places[one] for one in places if _is_equal(held, states.whole(one))}
        sources = {places[one] for one in places if _is_equal(came, states.whole(one, gradient=True))}
        calls = {(call, of) for call, at in homes for of, there in sources if there == at}
        if len(calls) != 1 or (micro_batch := next(iter(calls))[0]) in pairs:
            return {}
        pairs |= {micro_batch: next(iter(calls))[1]}
    return pairs


def _is_equal(held: NDArray[np.float64] | None, whole: NDArray[np.float64] | None) -> bool:
    """Whether both are there and equal but for rounding."""
    if held is None or whole is None or not held.size or held.shape != whole.shape:
        return False
    return error_of(held, whole) <= SINGLE


def sent_back_fault(states: States, axis: str) -> Fault | None:
    """Return the first line that hands back a term of the gradient of what the module is given."""
    lines = states.lines
    search, inputs = _Backward(states), [value for value in lines.values if lines.origin(value)[:5] == "input"]
    for value in inputs:
        gradient = states.gradient(value)
        readers = [call for call in lines.readers(value) if not search.gets_zero(call)]
        is_whole = states.forward(value).kind == "right"
        if is_whole and gradient.kind == "terms" and gradient.axes == (axis,) and not gradient.op and readers:
            giving = [call for call in readers if search.uses_part(value, call) or search.is_given_terms(call)]
            if not giving or any(states.sent_back(value, call).kind == "right" for call in readers):
                return None
            argument = lines.origin(value) if len(inputs) > 1 else ""
            cause = UnsummedInputGradient(lines.module or "the model itself", axis, argument=argument)
            uses = f"{reached(giving[0])} is the first line that uses what the module is given for the rank's own part"
            return fault_at(giving[0], uses, cause)
    return None


def late_sum(states: States, axis: str) -> str:
    """Return the line that sums the terms which the module that was asked for sends back, if one does further on.

    A weight between the two gets one term of its gradient. Before such a line gradients are right again, so a sum at
    the module would be followed by a second one.
    """
    for call in states.lines.asked_calls:
        gradients = ((given, states.placed(given, gradient=True)) for given in call.inputs)
        terms = [given for given, state in gradients if state.kind == "terms" and state.axes == (axis,)]
        for maker in (maker for given in terms for maker in states.lines.makers(given) if maker.whole is None):
            received = [states.placed(value, gradient=True).kind for value in maker.outputs]
            returned = [states.placed(value, gradient=True).kind for value in maker.inputs]
            if received and "right" not in received and returned and all(kind == "right" for kind in returned):
                return maker.place
    return ""


def _is_contained(states: States, value: Value) -> bool:
    """Whether a wrong gradient goes no further, as that of elements which a mask sets to zero."""
    call = states.lines.producer(value)
    gradients = [states.placed(given, gradient=True) for given in call.inputs] if call is not None else []
    return any(state.is_known for state in gradients) and not any(state.is_wrong for state in gradients)


class _Backward:
    def __init__(self, states: States) -> None:
        self.lines, self.states = states.lines, states

    def blame(self, value: Value) -> Fault | None:
        """Return the line that hands back the wrong gradient of a tensor."""
        readers = [call for call in self.lines.readers(value) if self._gets_gradient(call) and not self._is_aside(call)]
        if (branch := self._unsummed_branch(value, readers)) is not None:
            return branch
        if len({call.place for call in readers}) > 1:
            readers = [call for call in readers if not self._hands_back_right(value, call)]
        if len({call.place for call in readers}) > 1:
            # Some use the whole of it and some a part: the latter hand back terms of a sum.
            readers = [call for call in readers if self.uses_part(value, call)]
        if len({call.place for call in readers}) != 1:
            return None
        if (elsewhere := self._read_elsewhere(value)) is not None:
            return elsewhere
        unsummed = [fault for reader in readers if (fault := self._unsummed_part(value, reader)) is not None]
        call = readers[-1]
        gradients = [self.states.gradient(one) for one in self._made_of(call)]
        if any(state.is_wrong for state in gradients):
            return None  # it is given a wrong gradient
        if len(unsummed) == 1:
            return unsummed[0]
        known = [state for state in gradients if state.kind != "unknown"]
        words = words_of(known)
        held = self.states.gradient(value)
        if held.kind == "none" and held.axes:
            return self._unsummed_after(value, call, held.axes[0]) or self._wrong(value, call, words, held.axes[0])
        if (halo := halo_not_sent_back(self.states, value, call)) is not None:
            place = f"{halo.elements} of dim {halo.dim} on rank {halo.rank}"
            lacks = f"; at {place} it lacks what rank {halo.other} hands back there"
            return self._hands_back(call, value, words, halo, held, lacks)
        if (detached := self._detached(call)) is not None:
            sends = f"sends back {held.text}, and {detached.function} in {at(detached.line, call.line)} nothing at all"
            sentence = f"in backward {applied_at(call)} gets {words} of its gradient and {sends}"
            cause = DetachedInLine(detached.place, detached.function, detached.first.is_collective)
            return fault_at(detached, sentence, cause)
        again = self._summed_again(value, call, words) or function_fault(self.states, value, call, known)
        averaged = averaged_fault(self.states, value, [*walk([call], self._onward)], known)
        return again or averaged or self._wrong(value, call, words)

    def _detached(self, call: Call) -> Call | None:
        """Return the only later call that cuts the graph, unless its result or what it is given is an extreme alone.

        If it is known what comes back to a tensor, it doesn't matter which of its readers send nothing back.
        """
        cutting = []
        for later in walk([call], self._onward):
            given = (self.lines.records[pair] for value in later.inputs for pair in value)
            may_cut = later.function in CUTS or (later.first.is_collective and not self._needs_gradient(later))
            is_cut = may_cut and later.whole is None and any(one.needs_grad for one in given)
            if not is_cut or self._is_aside(later) or self._is_of_maximum(later):
                continue
            cutting += [later] if any(map(self._needs_gradient, self.lines.following(later))) else []
        return the_only(cutting)

    def _is_aside(self, call: Call) -> bool:
        """Whether nothing flows back through a call, and need not: an extreme of a detached tensor, or the reverse."""
        after = self.lines.after(call)
        if call.function in MAXIMA and after:
            return all(reader.function in CUTS for reader in after)
        return call.function in CUTS and all(reader.function in EXTREMES for reader in after)

    def _is_of_maximum(self, call: Call) -> bool:
        """Whether a call is given an extreme, or what only moves that."""
        sources = (self.lines.source(given, lambda maker, _: maker.function in MOVES) for given in call.inputs)
        makers = map(self.lines.producer, sources)
        return any(maker is not None and maker.function in MAXIMA for maker in makers)

    def _read_elsewhere(self, value: Value) -> Fault | None:
        """Return the line that makes a tensor of which all readers in the module send back what they should.

        The tensor's gradient is wrong, so what reads it elsewhere doesn't. Functions of the user's and what
        communicates may have a wrong backward of their own.
        """
        maker, every = self.lines.producer(value), self.lines.readers(value)
        cutting = [call for call in every if call.whole is None and not self._needs_gradient(call)]
        readers = [call for call in every if call not in cutting]
        calls = [call for call in (*readers, maker) if call is not None]
        are_torchs = all(call.function[:1].islower() and not call.first.ranks for call in readers)
        are_right = all(
            self._hands_back_right(value, reader)
            and all(self.states.gradient(made).kind == "right" for made in reader.outputs)
            for reader in readers
        )
        is_applied = any(APPLIED.search(call.line.source) for call in calls)
        if maker is None or is_applied or not (readers and are_torchs and are_right):
            return None
        is_recomputed = any(self.lines.records[pair].is_recomputed for pair in value)
        kept = [call for call in cutting if call.function in KEEPS and not any(map(self.lines.readers, call.outputs))]
        module, cut = self.lines.module or "the model itself", kept[-1].place if kept else ""
        cause = ReadElsewhere(maker.place, readers[-1].function, module, is_recomputed, cut)
        sides = (
            f"{reached(readers[-1])} sends back what it should to the tensor from {at(maker.line, readers[-1].line)}"
        )
        return fault_at(maker, f"in backward {sides}, and the tensor's gradient is wrong", cause)

    def _needs_gradient(self, call: Call) -> bool:
        """Whether a gradient can come back to anything that a call makes."""
        return any(self.lines.records[pair].needs_grad for made in call.outputs for pair in made)

    def _gets_gradient(self, call: Call) -> bool:
        """Whether anything may come back through a call: nothing does if the unsharded model's gets no gradient."""
        wholes = [self.lines.wholes[number] for number in call.whole.outputs] if call.whole is not None else []
        pairs = (self.lines.records[pair] for made in call.outputs for pair in made)
        return not wholes or any(whole.has_gradient for whole in wholes) or any(pair.has_gradient for pair in pairs)

    def gets_zero(self, call: Call) -> bool:
        """Whether the unsharded model's gradient of all that a call makes is zero, as behind a weight of zeros."""
        wholes = [self.states.reference_of(made, gradient=True) for made in call.outputs]
        return all(whole is not None and not whole.any() for whole in wholes)

    def _terms(self, call: Call, value: Value, axis: str) -> Fault:
        """Return that a call hands back terms of a tensor's gradient beside what another hands back whole."""
        cause = UnsummedLineBackward(call.inner_line.place, axis)
        return self._hands_back(call, value, "", cause, State("none", axes=(axis,)))

    def _unsummed_after(self, value: Value, call: Call, axis: str) -> Fault | None:
        """Return the later call whose terms nothing sums, if a call sums in forward: its backward needs no sum."""
        passed = [*walk([call], lambda one: self.lines.after(one) if self.is_given_terms(one) else self._onward(one))]
        known = (one for one in passed if any(map(self._has_known, one.outputs)))
        begins = [one for one in known if not self.is_given_terms(one)]
        if self.states.forward(value).kind != "terms" or not begins:
            return None
        begin = min(begins, key=lambda one: one.order)
        cause = UnsummedLineBackward(begin.inner_line.place, axis, is_alone=True)
        weights = self.lines.weights_read(one for one in passed if one.order < begin.order)
        if not weights:  # the backward of the sum itself may sum
            return None
        return replace(self._hands_back(begin, value, "", cause, State("none", axes=(axis,))), covers=weights)

    def _wrong(self, value: Value, call: Call, given: str, axis: str = "", operand: str = "") -> Fault:
        """Return that a call, given something for its gradient, hands back a wrong gradient of a tensor."""
        applied = APPLIED.findall(call.line.source) if not operand else []
        function = applied[0] if len(applied) == 1 else call.function  # torch's own match their forward
        held = self.states.gradient(value)
        cause: Cause = WrongLineBackward(call.place, function, axis, operand)
        if (exchange := self._exchange_in(call)) is not None and held.moved:
            inner = exchange.first
            cause = ExchangeNotReversed(call.place, inner.function, inner.frames[-1].place)
        return self._hands_back(call, value, given, cause, held)

    def _exchange_in(self, call: Call) -> Call | None:
        """Return the exchange in the forward of the function that a call's line applies; None without one."""
        inside = (other for other in self.lines.calls if other.line == call.line and len(other.first.frames) > 1)
        return next((other for other in inside if other.function.startswith(EXCHANGE)), None)

    def _hands_back(self, call: Call, value: Value, given: str, cause: Cause, held: State, more: str = "") -> Fault:
        gets = f"gets {given} of its gradient, and " if given else ""
        is_functions = type(cause) is WrongLineBackward and not (cause.axis or cause.part)
        line = applied_at(call) if is_functions else reached(call)
        place = f"in backward {line} is the first wrong line{after(self.lines.line_of(value), call.line)}"
        return fault_at(call, f"{place}: it {gets}sends back {held.text}{more}", cause)

    def _unsummed_part(self, value: Value, call: Call) -> Fault | None:
        """Return the fault of a part whose gradient needs a sum before it joins the gradients of other parts."""
        states = [self.states.gradient(one) for one in call.outputs]
        terms = [index for index, state in enumerate(states) if state.kind == "terms" and not state.op]
        axes = {state.axes for state in states if state.kind == "terms"}
        others = [state for index, state in enumerate(states) if index not in terms]
        is_beside = others or len(self.lines.readers(value)) > 1
        if call.function not in SELECTS or call.first.is_collective or not terms or not is_beside:
            return None
        if len(axes) != 1 or any(state.kind != "right" for state in others):
            return None
        numbers = ", ".join(f"result[{index}]" for index in terms) if others else "the result"
        axis = " and ".join(axes.pop())
        return self._wrong(value, call, words_of(states), axis, numbers)

    def _summed_again(self, value: Value, call: Call, given: str) -> Fault | None:
        """Return the fault of a backward that sums terms together with what a line hands back whole on every rank."""
        pairs = [(made, reader) for made in call.outputs for reader in self.lines.readers(made)]
        whole = [reader for made, reader in pairs if self._hands_back_right(made, reader)]
        outputs = [tensor for _, reader in pairs if reader not in whole for tensor in reader.outputs]
        for axis in self.states.mesh.axes if whole and call.whole is None else ():
            is_used_apart = any(self.states.differs_along(tensor, axis) for tensor in outputs)
            if is_used_apart and not self.states.differs_along(value, axis, gradient=True):
                places = call.place, whole[0].place
                cause = WholeGradientSummedAgain(*places, axis, self.states.mesh.axis_size(axis))
                return self._hands_back(call, value, given, cause, self.states.gradient(value))
        return None

    def _hands_back_right(self, value: Value, call: Call) -> bool:
        """Whether a call hands back what the unsharded model's does: torch's function, given the same both ways.

        With parts of something else it would hand back a term, and a call in a function of the user's may stand in the
        forward of one with a backward of its own.
        """
        if (sent := self.states.sent_back(value, call)).kind != "unknown":
            return sent.kind == "right"
        if call.whole is None or call.first.is_collective or len(call.first.frames) > 1:
            return False
        if not self._needs_gradient(call):
            return True
        states = [self.states.forward(tensor) for tensor in (*call.inputs, *call.outputs)]
        gradients = [self.states.gradient(made) for made in call.outputs]
        axes = self._axes(self.states.forward(value))
        are_alike = all(self._axes(state) <= axes for state in states) and self._axes(states[-1]) == axes
        return are_alike and all(state.kind == "right" for state in (*states, *gradients))

    def is_given_terms(self, call: Call) -> bool:
        """Whether what a call makes gets the terms of a sum for its gradient: it passes them on."""
        return any(self.states.placed(one, gradient=True).kind == "terms" for one in call.outputs)

    def _begin_of_terms(self, call: Call) -> Call:
        """Return the call that first hands back the terms that a call passes on."""
        visited: list[Call] = []
        while call not in visited and self.is_given_terms(call):
            visited.append(call)
            readers = self.lines.after(call)
            terms = [reader for reader in readers if self.is_given_terms(reader)]
            call = next(iter(terms or readers), call)
        return call

    def _unsummed_branch(self, value: Value, readers: Sequence[Call]) -> Fault | None:
        """Return the fault of the readers that hand back terms of a sum while all others hand back the whole.

        A reader may stand on the line of another, as in a function that a module calls.
        """
        for reader in readers:
            sent = self.states.sent_back(value, reader)
            if sent.kind == "terms" and not sent.op and len(sent.axes) == 1:
                return self._terms(self._begin_of_terms(reader), value, sent.axes[0])
        giving = [call for call in readers if self.is_given_terms(call) or self.uses_part(value, call)]
        for count in range(1, len(readers)) if len(readers) <= MAX_BESIDE else ():
            for branch in combinations(giving, count):
                outputs = [made for reader in readers if reader not in branch for made in reader.outputs]
                if outputs and (axis := self.states.terms_beside(value, outputs)):
                    return self._terms(self._begin_of_terms(branch[0]), value, axis)
        return None

    def _made_of(self, call: Call) -> Iterator[Value]:
        """Yield a call's outputs; for those without a known gradient, what is made from them."""
        return (value for made in walk([call], self._onward) for value in made.outputs if self._has_known(value))

    def _onward(self, call: Call) -> list[Call]:
        """Return the calls that read what a call makes, of whose gradient nothing is known."""
        values = (value for value in call.outputs if not self._has_known(value))
        return [reader for value in values for reader in self.lines.readers(value)]

    def _has_known(self, value: Value) -> bool:
        return self.states.placed(value, gradient=True).kind != "unknown"

    def uses_part(self, value: Value, call: Call) -> bool:
        """Whether each rank makes its own part, or a term, of a tensor that all of them have."""
        axes = self._axes(self.states.forward(value))
        return any(self._axes(self.states.forward(made)) - axes for made in call.outputs)

    def _axes(self, state: State) -> set[str]:
        split = set(state.layout.split_axes) if state.layout is not None else set()
        return (split | set(state.axes)) & set(self.states.mesh.axes)
