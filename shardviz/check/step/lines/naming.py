"""Findings with the first wrong line of their module in them, and the modules of which it is asked for.

A sum may be missing from a result because code drops the tensor that has it: then that line is named.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.ranks import no_file_of
from shardviz.check.report import NotChecked, findings_in
from shardviz.check.step.comparison import is_of_parts
from shardviz.check.step.lines.around import Around, is_around, results_of
from shardviz.check.step.lines.backward import late_sum, sent_back_fault
from shardviz.check.step.lines.calls import Lines
from shardviz.check.step.lines.covering import without_covered, without_module
from shardviz.check.step.lines.faults import (
    argument_fault,
    fault_in,
    is_argument,
    lacking_fault,
    number_fault,
    with_size_given,
)
from shardviz.check.step.lines.placing import OPEN, with_line, with_line_around
from shardviz.check.step.lines.states import States
from shardviz.check.step.trace.arguments import arguments_of, wrong_argument
from shardviz.check.step.trace.joins import with_lines_of_joins
from shardviz.dump.records.trace import NO_MEAN, STEP
from shardviz.explain.finding import Finding
from shardviz.explain.step.factors import SequenceOfWhole
from shardviz.explain.step.forward import UngatheredKeys
from shardviz.explain.step.gradients import CutInModule, UnsummedInputGradient, WrongOutside
from shardviz.explain.step.graphs import RecomputedOtherwise
from shardviz.explain.step.line_reductions import GradientsOfOtherMicroBatches, WrongOperator
from shardviz.explain.step.lines import UnsummedLine, WrongLine, WrongLines
from shardviz.explain.step.losses import UnexplainedLoss
from shardviz.explain.step.modules import (
    SkippedModule,
    UnexplainedBetweenModules,
    UnexplainedInput,
    UnexplainedModuleBackward,
    UnsummedModule,
    WrongArgument,
)
from shardviz.explain.step.sums import GradientNotReduced, OutputNotReduced, ResultNotRead, UnreducedBesideVector
from shardviz.explain.step.whole_step import RowsSentByOneRank, UnexplainedBackward

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardviz.check.step.lines.fault import Fault
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import UnreadRecord


def module_to_open(finding: Finding) -> str | None:
    """Return the module whose lines may hold a finding's cause: the model's name is empty; None without a module.

    `STEP` stands for the step around the model.
    """
    if isinstance(finding.explanation, SkippedModule | SequenceOfWhole | RecomputedOtherwise):
        return None  # no line has what is missing, what a plan does, or what runs in backward
    if isinstance(finding.explanation, UnexplainedBetweenModules):
        return finding.module.rpartition(".")[0]
    if isinstance(finding.explanation, WrongOutside):
        return finding.explanation.around
    if isinstance(finding.explanation, UngatheredKeys):
        return finding.explanation.module.rpartition(".")[0]
    if finding.module or isinstance(finding.explanation, (*OPEN, CutInModule)):
        return finding.module
    if any(result.role == "output" for result in results_of(finding)):
        return ""
    return STEP if is_around(finding) else None


def returns_loss(dump: Dump) -> bool:
    """Whether ranks looked around the model and only saw it return the loss, so that its own lines are the loss's."""
    around = Around.of(dump)
    return around is not None and around.is_loss_of_model


def line_of_own_rows(dump: Dump) -> str:
    """Return the sentences on the line at which a loss of a rank's own rows becomes another one than the batch's."""
    around = Around.of(dump) if is_of_parts(dump, NO_MEAN) else None
    fault = around.fault_of_loss if around is not None else None
    why, fix = fault.cause.likeliest if fault is not None else ("", "")
    return f". Is the loss of the whole batch meant? {why}. Fix: {fix}" if why else ""


def with_lines(dump: Dump, results: Iterable[Finding | NotChecked]) -> Iterator[Finding | NotChecked]:
    """Yield the results of a step's checks, those about the module that ranks looked into with its first wrong line."""
    opened, around = _opened(dump), Around.of(dump) if not is_of_parts(dump) else None
    of_own_rows = Around.of(dump) if is_of_parts(dump, NO_MEAN) else None
    faults = [(lines, fault) for lines in opened if (fault := _fault_inside(dump, lines)) is not None]
    is_of_model = around is not None and around.is_loss_of_model  # the model's own lines are the loss's
    of_model = next((fault for lines, fault in faults if is_of_model and not lines.module and not fault.is_given), None)
    outcomes = [_of_whole_batch(dump, outcome, of_own_rows) if of_own_rows else outcome for outcome in results]
    named = list(_named(dump, outcomes, opened, around, faults, of_model))
    several = findings_in(outcomes) if len(findings_in(outcomes)) > 1 else []  # a line may cover one of several
    of_step = [around.fault_of(one) for one in several if is_around(one)] if around is not None else []
    covering = [fault for fault in (*(fault for _, fault in faults), *of_step) if fault is not None]
    yield from without_covered(named, covering)
    yield from _not_read(dump) if not opened and around is None else ()


def _of_whole_batch(dump: Dump, outcome: Finding | NotChecked, of_own_rows: Around) -> Finding | NotChecked:
    """Return a result; of a loss that is neither the parts' nor the batch's, with the line that makes it so.

    If ranks exchange nothing in the loss, a line that reads the rank's own rows alone may be meant to.
    """
    is_open = isinstance(outcome, Finding) and isinstance(outcome.explanation, UnexplainedLoss)
    if not isinstance(outcome, Finding) or not is_open or not of_own_rows.has_exchange_in_loss:
        return outcome
    fault = of_own_rows.fault_of_loss
    return outcome if fault is None else with_line_around(dump, outcome, fault, are_gradients_wrong=True)


def _named(
    dump: Dump,
    results: Iterable[Finding | NotChecked],
    opened: Sequence[Lines],
    around: Around | None,
    faults: Sequence[tuple[Lines, Fault]],
    of_model: Fault | None,
) -> Iterator[Finding | NotChecked]:
    """Yield results, those about what ranks looked into with its first wrong line."""
    for outcome in results:
        if not isinstance(outcome, Finding):
            yield outcome
            continue
        module, named = module_to_open(outcome), outcome
        for lines, inner in faults:  # what a module is given wrong is made by the one around it
            if module_to_open(named) in (lines.module, lines.asked_module) and not _is_of_argument(named):
                placed = without_module(named, lines, inner)
                named = _given_wrong(dump, named, lines, inner) if inner.is_given else with_line(placed, inner)
        for lines in opened:
            if module_to_open(named) in (lines.module, lines.asked_module):
                named = with_lines_of_joins(named, lines.sharded, dump.files.mesh)
            cause = named.explanation
            if isinstance(cause, WrongArgument) and lines.module == named.module:
                maker = argument_fault(States(dump, lines), arguments_of(dump, cause.module)[cause.argument])
                named = named if maker is None else with_line(named, maker)
        if named is outcome:
            named = _with_line_of_term(dump, without_exchange(_with_later_sum(dump, named, opened), opened), opened)
        if named is not outcome:
            yield named
            continue
        fault = _fault_around(around, of_model, outcome) if around is not None and module == STEP else None
        if around is not None and fault is not None:
            yield with_line_around(dump, outcome, fault, are_gradients_wrong=around.has_wrong_gradient)
        else:
            cause = outcome.explanation
            place = cause.place if isinstance(cause, RowsSentByOneRank | UnexplainedBackward) else ""
            yield replace(outcome, line=outcome.line or place)


def _fault_inside(dump: Dump, lines: Lines) -> Fault | None:
    states, arguments = States(dump, lines), arguments_of(dump, lines.module)
    fault = number_fault(states, arguments) or with_size_given(states, fault_in(states), arguments)
    is_open = fault is None or (isinstance(fault.cause, WrongLine | WrongLines) and not fault.is_given)
    return (lacking_fault(states, arguments) if is_open else None) or fault


def _is_of_argument(finding: Finding) -> bool:
    return isinstance(finding.explanation, WrongArgument)


def _fault_around(around: Around, of_model: Fault | None, finding: Finding) -> Fault | None:
    """Return the line at which a finding's results go wrong: around the model, or in it if it returns the loss."""
    is_of_loss = finding.tensor == "loss" or (of_model is not None and isinstance(of_model.cause, WrongOperator))
    return around.fault_of(finding) or (of_model if is_of_loss else None)


def _opened(dump: Dump) -> list[Lines]:
    """Return the lines of each module that ranks looked into, in the order in which they did."""
    records = [lines for rank in dump.files.ranks.values() for lines in rank.lines if lines.module != STEP]
    read = (Lines.of(dump, module=module) for module in dict.fromkeys(lines.module for lines in records))
    return [lines for lines in read if lines is not None]


def without_exchange(finding: Finding, opened: Iterable[Lines]) -> Finding:
    """Return a finding about an output that the code around it uses, without a collective if its lines have none."""
    cause = finding.explanation
    around = [lines for lines in opened if isinstance(cause, WrongOutside) and lines.module == cause.around]
    calls = [line for lines in around for of_rank in lines.sharded.values() for line in of_rank.lines]
    if not calls or not isinstance(cause, WrongOutside) or any(line.is_collective for line in calls):
        return finding
    return finding.because(replace(cause, may_exchange=False))


def _with_line_of_term(dump: Dump, finding: Finding, opened: Iterable[Lines]) -> Finding:
    """Return a finding about the gradient that a module sends back, with the line that sends back a term of it."""
    cause = finding.explanation
    if isinstance(cause, UnsummedInputGradient) and not cause.inner:
        axes: tuple[str, ...] = (cause.axis,)
    elif isinstance(cause, UnexplainedModuleBackward):  # what else reads the input, as a residual, hides its terms
        axes = dump.files.mesh.axes
    else:
        return finding
    of_module = (lines for lines in opened if module_to_open(finding) in (lines.module, lines.asked_module))
    faults = (sent_back_fault(States(dump, lines), axis) for lines in of_module for axis in axes)
    fault = next((fault for fault in faults if fault is not None and not fault.is_torchs), None)
    return finding if fault is None else with_line(finding, fault)


def _with_later_sum(dump: Dump, finding: Finding, opened: Iterable[Lines]) -> Finding:
    """Return a finding about a module that sends back terms, with the line that sums them too late, if one does."""
    cause = finding.explanation
    if not isinstance(cause, UnsummedInputGradient) or cause.inner:
        return finding
    asked = (lines for lines in opened if module_to_open(finding) == lines.asked_module)
    late = next((line for lines in asked if (line := late_sum(States(dump, lines), cause.axis))), "")
    return finding.because(replace(cause, late=late)) if late else finding


def _given_wrong(dump: Dump, finding: Finding, lines: Lines, fault: Fault) -> Finding:
    """Return a finding of the module around the one that is given what is wrong, or gradients of something else.

    If only gradients are wrong, its inputs are right, whatever its lines are compared with.
    """
    around, is_of_gradients = lines.module.rpartition(".")[0], isinstance(fault.cause, GradientsOfOtherMicroBatches)
    results = results_of(finding)
    if (bool(results) and all(result.role == "grad" for result in results)) != is_of_gradients:
        return finding
    details = finding.details if is_of_gradients else (finding.sentence,)
    placed = replace(finding, sentence=fault.sentence, details=details, module=around)
    is_open = isinstance(finding.explanation, (*OPEN, UngatheredKeys))
    cause = fault.cause if is_of_gradients else UnexplainedInput(lines.module or "the model", fault.argument)
    if is_open and not is_of_gradients and (name := _argument_given(dump, lines, fault)):
        argument = wrong_argument(dump, lines.module, name)
        sentence = fault.sentence.replace(f" {fault.argument} of its module", f" {name} of its module")
        return replace(placed, sentence=sentence, module=argument.maker).because(argument)
    return placed.because(cause) if is_open else finding


def _argument_given(dump: Dump, lines: Lines, fault: Fault) -> str:
    """Return the name of the wrong argument that a line reads; empty if that isn't known."""
    arguments, states = arguments_of(dump, lines.module), States(dump, lines)
    if fault.argument in arguments:
        return fault.argument
    given = (name for name, records in arguments.items() if fault.given and is_argument(states, fault.given, records))
    return next(given, "")


def _not_read(dump: Dump) -> Iterator[NotChecked]:
    """Say that ranks looked into a module, if what some of them found there is missing."""
    asked_modules = {
        lines.asked or lines.module for rank in dump.files.ranks.values() for lines in rank.lines if lines.lines
    }
    missing = dump.files.missing_ranks
    for module in asked_modules if missing else ():
        what = f"which line of {module or 'the model'} goes wrong first"
        yield NotChecked("", f"{what}: {no_file_of(missing)}", "step")


def with_unread(dump: Dump, results: Iterable[Finding | NotChecked]) -> Iterator[Finding | NotChecked]:
    """Yield a step's results, with the line that drops a sum in those that lack that sum."""
    records = [record for rank in dump.files.ranks.values() for record in rank.unread]
    for result in results:
        lacking = [record for record in records if isinstance(result, Finding) and _is_lacked(result, record)]
        yield _of_line(result, lacking[0]) if lacking and isinstance(result, Finding) else result


def _is_lacked(finding: Finding, record: UnreadRecord) -> bool:
    """Whether a finding lacks a sum over the axes of a call, of the gradient that it was given or of an output."""
    cause = finding.explanation
    if isinstance(cause, GradientNotReduced):
        return record.gradient == finding.tensor and set(record.axes) == set(cause.axes)
    if isinstance(cause, OutputNotReduced):
        return record.is_forward and set(record.axes) == set(cause.axes)
    if isinstance(cause, UnreducedBesideVector | UnsummedLine | UnsummedModule):
        return record.is_forward and record.axes == (cause.axis,)
    return False


def _of_line(finding: Finding, record: UnreadRecord) -> Finding:
    place = record.line.place
    what = "a copy of the gradient" if record.is_in_place else "the gradient"
    of = f" of {what} of {record.gradient}" if record.gradient else ""
    ran = f"{place} `{record.line.source}` makes the sum{of} over {' and '.join(record.axes)}; nothing reads its result"
    named = replace(finding, line=place, details=(*finding.details, ran))
    return named.because(ResultNotRead(place, record.op, record.axes, is_copy=record.is_in_place))
