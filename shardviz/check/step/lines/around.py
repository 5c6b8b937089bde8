"""The first wrong line of a step around the model: of its loss, of what it does to gradients, or of the optimizer.

The search is that of a module, begun at what a finding is about. What is done to gradients in place, the unsharded
model does not do: there, each gradient is followed from the backward to the optimizer, and the line is named at which
it stops being the unsharded model's, times a number, whole or in terms of a sum or of a mean. If no line makes it
wrong, another module says which one passes it by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.check.step.comparison import Compared
from shardviz.check.step.lines.backward import backward_fault
from shardviz.check.step.lines.calls import Call, Lines, Value
from shardviz.check.step.lines.fault import Fault, at, fault_at, reached
from shardviz.check.step.lines.faults import averaged_terms_fault, fault_of, fault_of_mean
from shardviz.check.step.lines.labels import labels_fault, may_be_of_labels, means_fault, other_labels_fault
from shardviz.check.step.lines.operands import with_operator
from shardviz.check.step.lines.passed_by import reduced_again_fault, undivided_fault, unreduced_fault
from shardviz.check.step.lines.states import States
from shardviz.explain.step.factors import UndividedShardGradient
from shardviz.explain.step.gradients import MicroBatchesReducedAgain
from shardviz.explain.step.line_reductions import (
    GradientLine,
    SummedLossAveraged,
    WrongLineBackward,
    WrongReductionLine,
)
from shardviz.explain.step.lines import ScaledTermLine, WrongLines
from shardviz.explain.step.norms import BackwardLine, ScaledBeforeReduction
from shardviz.explain.step.sums import GradientNotReduced
from shardviz.explain.step.update import StepSkippedByRank
from shardviz.relate.measures import axis_sets, ratio_of
from shardviz.relate.tolerance import SINGLE
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from fractions import Fraction

    from shardviz.check.step.lines.state import State
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.trace import FrameRecord, LineRecord
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

ROLES = ("scalar", "grad", "param", "optim")
"""What a step computes around the model."""

MAX_RESULTS = 64
"""Of a finding about more results, the first are followed."""


def results_of(finding: Finding) -> list[Compared]:
    """Return the results of a step that a finding is about."""
    pairs = [getattr(pair, "comparison", pair) for one in finding.each for pair in one.pairs]
    return [pair for pair in pairs if isinstance(pair, Compared)]


def is_around(finding: Finding) -> bool:
    """Whether a finding is about the loss, a gradient, or what an optimizer makes of weights."""
    return finding.tensor == "loss" or any(result.role in ROLES for result in results_of(finding))


@dataclass
class Around:
    """The lines of a step around the model."""

    lines: Lines
    states: States

    @staticmethod
    def of(dump: Dump) -> Around | None:
        """Read what ranks wrote; None if they did not look around the model."""
        lines = Lines.of(dump, around=True)
        if lines is None:
            return None
        around = Around(lines, States(dump, lines))
        for value in lines.values:  # in order, so that none of them has to go back far
            around.states.placed(value)
        return around if around.has_compared_loss or around.is_given_the_batch else None

    @property
    def has_compared_loss(self) -> bool:
        """Whether the step's loss was kept apart from its lines: that of a probe, and not that of a job."""
        return self.states.dump.find("step", "scalar", "loss") is not None

    @property
    def is_loss_of_model(self) -> bool:
        """Whether the model itself returns the loss: its lines are those of the loss."""
        value = self.lines.results.get("loss", (None, 0))[0]
        return value is not None and self._is_output(value)

    @property
    def is_given_the_batch(self) -> bool:
        """Whether the model is known to be called with the unsharded model's batch, whole or in parts."""
        of_model = [call for call in self.lines.calls if any(map(self._is_output, call.outputs))]
        inputs = [value for call in of_model for value in call.inputs]
        return bool(inputs) and all(call.whole is not None for call in of_model) and all(map(self._is_known, inputs))

    def _is_output(self, value: Value) -> bool:
        return self.lines.origin(value).startswith("output")

    def _is_known(self, value: Value) -> bool:
        return self.states.placed(value).is_known

    def fault_of(self, finding: Finding) -> Fault | None:
        """Return the line at which the results of a finding go wrong; None if it isn't one line for all of them."""
        if isinstance(finding.explanation, StepSkippedByRank):
            return None  # the two models ran different lines
        results = results_of(finding)[:MAX_RESULTS] if finding.tensor != "loss" else ()
        faults = [self._fault(result) for result in results] or [self._of_result(finding.tensor)]
        if _is_right_on_average(finding.explanation):
            faults = [None if fault and isinstance(fault.cause, WrongLineBackward) else fault for fault in faults]
        if not any(faults):
            faults = [self._passed_by(finding.explanation, result.name) for result in results]
        if not finding.tensor and not any(faults):
            faults = [self._of_summed_loss(result) for result in results]
        if finding.tensor == "loss" and all(map(may_be_of_labels, faults)):
            of_labels = labels_fault(self.states) or means_fault(self.states)
            faults = [of_labels or next(iter(faults), None)]
        inside = [fault for fault in faults if fault is not None]
        known = [fault for fault in inside if (fault.line, fault.function) not in self._model_calls]
        is_one = len({(fault.line, type(fault.cause)) for fault in known}) == 1 and len(known) == len(faults)
        return known[0] if is_one and not isinstance(known[0].cause, WrongLines) else None

    @cached_property
    def _model_calls(self) -> set[tuple[FrameRecord, str]]:
        """The lines that call the model, with its function: what goes wrong there does so in lines of its own."""
        of_model = (call for call in self.lines.calls if any(map(self._is_output, call.outputs)))
        return {(call.line, call.function) for call in of_model}

    @property
    def fault_of_loss(self) -> Fault | None:
        """The line at which the loss goes wrong; None if it is right, or it is one of several lines, or the model's."""
        fault = self._of_result("loss")
        return None if fault is None or isinstance(fault.cause, WrongLines) or self._is_loss_of_kept() else fault

    @property
    def has_exchange_in_loss(self) -> bool:
        """Whether the loss is made of what ranks exchange, and not only averaged over them in the end."""
        makers = [*self.lines.makers(self.lines.results["loss"][0])] if "loss" in self.lines.results else []
        orders = {maker.order for maker in makers}
        behind = (later for maker in makers if maker.first.ranks for later in self.lines.following(maker))
        return any(later.order in orders and len(later.inputs) > 1 for later in behind)

    def _is_loss_of_kept(self) -> bool:
        """Whether the loss reads a number that the model made and kept, and that is not the unsharded model's."""
        given = {value for call in self.lines.makers(self.lines.results["loss"][0]) for value in call.inputs}
        kept = (
            one for one in given if self.lines.origin(one) == "elsewhere" and "float" in self.states.held_dtype(one)
        )
        return any(self.states.placed(value).is_wrong for value in kept)

    def _passed_by(self, cause: Cause | None, name: str) -> Fault | None:
        """Return the line of the step that reduces or divides other gradients, or this one too often."""
        if isinstance(cause, GradientNotReduced) and not (cause.is_by_wrapper or cause.is_captured):
            return unreduced_fault(self.states, cause.axes, cause.op, name)
        if isinstance(cause, ScaledBeforeReduction):
            return unreduced_fault(self.states, cause.axes, cause.op, name)
        if isinstance(cause, UndividedShardGradient):
            return undivided_fault(self.lines, cause, name)
        return reduced_again_fault(self.lines, cause, name) if isinstance(cause, MicroBatchesReducedAgain) else None

    def _fault(self, result: Compared) -> Fault | None:
        if result.role == "grad":
            tied = (group for record in self.states.dump.files.ranks.values() for group in record.tied)
            names = (result.name, *(name for group in tied if result.name in group for name in group))
            recorded = next((name for name in names if f"gradient {name}" in self.lines.results), None)
            fault = self._of_stage(result) if recorded is None else self._of_gradient(recorded)
            return None if fault is not None and _is_too_little(fault.cause, ratio_of(result)) else fault
        name = f"stepped {result.name}" if result.role == "param" else result.name
        return self._of_result(name)

    def _of_result(self, name: str) -> Fault | None:
        value = self.lines.results.get(name, (None, 0))[0]
        if value is None or (name == "loss" and self._is_output(value)):  # the model's own lines make that
            return None
        is_term = name == "loss" and self._is_averaged_term(self.states.forward(value))
        fault = (fault_of_mean if is_term else fault_of)(self.states, value)
        is_unclear = name == "loss" and (fault is None or isinstance(fault.cause, WrongLines))
        return (other_labels_fault(self.states) if is_unclear else None) or fault

    def _is_averaged_term(self, state: State) -> bool:
        """Whether ranks' losses are the terms of a sum, and the step's loss is their mean."""
        loss = self.states.dump.find("step", "scalar", "loss")
        means = {axis for axis, op in loss.claimed.partial if op == "avg"} if loss and loss.claimed else set()
        return state.kind == "terms" and not state.op and set(state.axes) <= means

    def _of_gradient(self, name: str) -> Fault | None:
        """Return the line at which a gradient goes wrong: between loss and model, after the backward, or later."""
        value = self.lines.results[f"gradient {name}"][0]
        if not self.states.is_right:  # a probe's loss is a finding of its own
            return None if self.has_compared_loss else self._of_result("loss")
        if self.states.placed(value).kind == "right":
            return self._of_result(f"stepped gradient {name}")
        return self._after_backward(value) or self._between_loss_and_model

    def _of_summed_loss(self, result: Compared) -> Fault | None:
        """Return the line that sums ranks' losses before the backward, if gradients lack the number of these ranks."""
        ratio, (loss, wanted) = ratio_of(result), self.lines.results.get("loss", ((), -1))
        runs = [call for call in self.lines.calls if call.function == "backward"]
        value = runs[0].inputs[0] if runs and runs[0].inputs else loss
        for call in self.lines.makers(value) if ratio and value else ():
            terms = self.states.forward(call.inputs[0]) if call.first.is_collective and call.inputs else None
            if terms is None or terms.kind != "terms" or terms.op:
                continue
            made = [value for value in call.outputs if self.lines.wanted.get(value) == wanted]
            is_whole = bool(made) and self.states.placed(made[0]).kind == "right"
            if is_whole and ratio and ratio * self.states.mesh.size_over(terms.axes) == 1:
                axis = " and ".join(terms.axes)
                sentence = f"{reached(call)} sums the ranks' losses over {axis} before the backward"
                return fault_at(call, sentence, SummedLossAveraged(call.place, axis))
        return None

    def _of_stage(self, result: Compared) -> Fault | None:
        """Return the line whose backward runs on another number, if only some ranks have a gradient."""
        numbers = [
            (rank, dict(lines.results).get(f"gradient {result.name}")) for rank, lines in self.lines.sharded.items()
        ]
        origins = [self.lines.records[rank, number].origin for rank, number in numbers if number is not None]
        ratio = ratio_of(result) if all(origin.startswith("gradient") for origin in origins) else None
        return self._backward_of(float(ratio)) if ratio and "loss" in self.lines.results else None

    @cached_property
    def has_wrong_gradient(self) -> bool:
        """Whether the step leaves the optimizer a gradient that is wrong."""
        return any(self.states.placed(value).is_wrong for value in self._gradients)

    @cached_property
    def _has_right_gradient(self) -> bool:
        """Whether the step leaves the optimizer a gradient that is right, and not zero."""
        right = (value for value in self._gradients if self.states.placed(value).kind == "right")
        return any(held.any() for value in right for held in self.states.held(value).values())

    @property
    def _gradients(self) -> list[Value]:
        return [value for name, (value, _) in self.lines.results.items() if name.startswith("gradient ")]

    @cached_property
    def _between_loss_and_model(self) -> Fault | None:
        return with_operator(self.states, backward_fault(self.states))

    def _after_backward(self, value: Value) -> Fault | None:
        """Return the line of the step that makes a gradient wrong, or whose backward runs on another number."""
        versions = self._versions(value)
        times = [self._times(self.states.forward(version)) for version, _ in versions]
        if not times or times[0] is None:
            return None
        steps = list(zip(versions[1:], times, times[1:], strict=False))
        for (version, call), before, after in steps:
            if call is not None and before and not after:
                return self._written_by(call, before, self.states.forward(version), 0)
        final = times[-1]
        if self.states.forward(value).axes or final is None or math.isclose(final, 1, rel_tol=SINGLE):
            return None
        changing = [
            call
            for (_, call), before, after in steps
            if call is not None and before and after and not math.isclose(before, after, rel_tol=SINGLE)
        ]
        scaling = [call for call in changing if not call.first.is_collective]
        if changing and not math.isclose(times[0], final, rel_tol=SINGLE):
            last = (scaling or changing)[-1]
            count = self._num_runs(last, versions)
            return self._written_by(last, times[0], self.states.forward(value), final, count)
        return self._backward_of(final)

    def _num_runs(self, last: Call, versions: list[tuple[Value, Call | None]]) -> int:
        """Return how often the line of a collective reduced a gradient that was right before the last; else 0."""
        calls = [call for _, call in versions]
        before = self.states.forward(versions[calls.index(last) - 1][0])
        reductions = (call for call in calls if call is not None and call.function == last.function)
        num_runs = sum(call.place == last.place for call in reductions)
        return num_runs if last.first.is_collective and num_runs > 1 and before.kind == "right" else 0

    def _written_by(self, call: Call, before: float, held: State, times: float, count: int = 0) -> Fault | None:
        """Return the fault of a call that writes into a gradient; None if anything else that it reads is not known.

        What is copied into a gradient, or what that is multiplied by, may be wrong itself.
        """
        memories = {self.lines.memory(made) for made in call.outputs}
        others = [given for given in call.inputs if self.lines.memory(given) not in memories]
        if held.kind == "unknown" or others:
            is_read = call.whole is not None and len(others) == 1
            is_read &= call.function == "copy_" or self.states.placed(others[0]).is_wrong
            return fault_of(self.states, others[0]) if is_read else None
        ranks = call.first.ranks if call.first.is_collective else ()
        terms = self.states.forward(call.inputs[0]) if ranks else None
        axis = " and ".join(terms.axes) if terms is not None and terms.kind == "terms" and not terms.op else ""
        made = f"{call.function}{f' over {named_ranks(ranks)}' if ranks else ''} leaves"
        place, function = call.place, call.function
        first = f"{reached(call)} is the first wrong line: {made}"
        if not times and axis:
            cause: Cause = WrongReductionLine(place, function, ranks, axis)
        else:
            cause = GradientLine(place, function, ranks, times, before, str(count) if count else "")
        if not times:
            return fault_at(call, f"{first} {held.text} in the gradient", cause)
        left = f"{times:.5g} times the unsharded model's gradient"
        if before == 1:
            return fault_at(call, f"{first} {left}", cause)
        runs = f" the last time it runs, of {count} times" if count else ""
        return fault_at(call, f"{reached(call)} leaves {left}{runs}; the backward left {before:.5g} times", cause)

    def _times(self, state: State) -> float | None:
        """Return by what a gradient is too large, or the mean of its terms; None if it is something else."""
        if state.layout is None or state.moved or not (state.is_known or state.factor != 1):
            return None
        size = self.states.mesh.size_over(state.axes)
        return 1.0 if state.op == "avg" else state.factor / size

    def _backward_of(self, times: float) -> Fault | None:
        """Return the line whose backward runs on so many times the loss, over all micro-batches and ranks.

        It makes all gradients wrong: if one of them is right, what differs between them is to blame.
        """
        if self._has_right_gradient:
            return None
        loss, number = self.lines.results["loss"]
        state, wanted = self.states.forward(loss), self.states.whole(number)
        size = self.states.mesh.size_over(state.axes)
        if state.kind == "terms" and not state.op and math.isclose(times * size, 1, rel_tol=SINGLE):
            return averaged_terms_fault(self.states, loss)
        by_rank = {rank: list(self._losses(rank)) for rank in self.lines.sharded}
        having = [losses for losses in by_rank.values() if losses]
        if wanted is None or not having:
            return None
        mean = sum(loss for losses in having for _, loss in losses) / len(having)
        last, _ = having[0][-1]
        if not math.isclose(mean, times * float(wanted), rel_tol=SINGLE) or not last.frames:
            return None
        frames, own = last.frames, last.innermost
        line, count = frames[own], len(having[0])
        terms = f"{count} losses that add up to " if count > 1 else ""
        of_ranks = ", in the mean over ranks" if times < 1 else ""
        sentence = f"{at(line)} runs on {terms}{times:.5g} times the unsharded model's loss{of_ranks}"
        by = self._multiplied_by(last, times) if times else 0
        return Fault(line, "backward", sentence, BackwardLine(line.place, times, count, by))

    def _multiplied_by(self, backward: LineRecord, times: float) -> int:
        """Return the number of ranks that multiplies what a backward runs on, a multiple of `times`; 0 if none does."""
        calls = (call for call in self.lines.calls if call.first.inputs[:1] == backward.inputs[:1])
        makers = (maker for call in calls for value in call.inputs for maker in self.lines.makers(value))
        numbers = {number for maker in makers if maker.function == "mul" for number in maker.first.numbers.split()}
        sizes = {self.states.mesh.size_over(axes) for axes in axis_sets(self.states.mesh.long_axes)}
        ranks = [size for size in sorted(sizes) if str(size) in numbers]
        due = {size: size / times for size in ranks}
        return next((size for size in ranks if any(math.isclose(due[size], n, rel_tol=SINGLE) for n in (1, *sizes))), 0)

    def _losses(self, rank: int) -> Iterator[tuple[LineRecord, float]]:
        """Yield a rank's calls of backward on one number, with the number."""
        for line in self.lines.sharded[rank].lines:
            held = self.states.held(((rank, line.inputs[0]),)) if len(line.inputs) == 1 else {}
            if line.function == "backward" and held and held[rank].size == 1:
                yield line, float(held[rank].reshape(()))

    def _versions(self, value: Value) -> list[tuple[Value, Call | None]]:
        """Return a gradient as the backward leaves it, and then as each line leaves it, with the line's call."""
        versions = [(value, self.lines.producer(value))]
        while (call := versions[0][1]) is not None:
            earlier = [given for given in call.inputs if given != versions[0][0] and self._is_of(given, value)]
            if not earlier:
                return []
            versions.insert(0, (earlier[0], self.lines.producer(earlier[0])))
        return versions

    def _is_of(self, given: Value, value: Value) -> bool:
        """Whether a tensor is an earlier version of a gradient: in its memory, or compared with the same."""
        wanted = self.lines.wanted.get(value)
        is_same = wanted is not None and self.lines.wanted.get(given) == wanted
        return is_same or self.lines.memory(given) == self.lines.memory(value)


def _is_right_on_average(cause: Cause | None) -> bool:
    """Whether ranks' gradients are those of their own rows, so that no line before the reduction is wrong."""
    return isinstance(cause, GradientNotReduced) and cause.op == "AVG" and cause.rest is None


def _is_too_little(cause: Cause, ratio: Fraction | None) -> bool:
    """Whether a line multiplies the loss, and that doesn't explain by what a gradient is too large."""
    return isinstance(cause, ScaledTermLine) and not math.isclose(ratio or 0, cause.times, rel_tol=SINGLE)
