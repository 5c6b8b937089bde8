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
from shardviz.check.step.lines.faults import argument_fault, fault_in, is_argument, number_fault, with_size_given
from shardviz.check.step.lines.states import States
from shardviz.check.step.rules.losses import mean_of_means
from shardviz.check.step.trace.arguments import arguments_of, wrong_argument
from shardviz.check.step.trace.joins import with_lines_of_joins
from shardviz.dump.records.trace import NO_MEAN, STEP
from shardviz.explain.checkpoints.states import UnexplainedState
from shardviz.explain.finding import Finding, Kind
from shardviz.explain.step.factors import SequenceOfWhole
from shardviz.explain.step.forward import JoinedOutOfOrder, UngatheredKeys
from shardviz.explain.step.gradients import CutInModule, UnsummedInputGradient, WrongOutside
from shardviz.explain.step.graphs import AveragedInBackward, DetachedInLine, RanWithoutGraph, ReadElsewhere
from shardviz.explain.step.joins import JoinedFromAfar, WrongDenominator
from shardviz.explain.step.line_reductions import (
    CopiesSummedLine,
    GradientsOfOtherMicroBatches,
    LeftOutOfReduction,
    LocalWeight,
    NarrowReduction,
    ReductionNotStored,
    RepeatedReductionLine,
    UnaveragedLine,
    UnreducedGather,
    WrongLineBackward,
    WrongOperator,
    WrongReductionLine,
)
from shardviz.explain.step.line_rows import (
    CausalMaskOfPart,
    DimsMerged,
    LabelsOfOtherRows,
    MisplacedMask,
    NeighborLeftOut,
    OtherLabels,
    RowsWithOtherLabels,
)
from shardviz.explain.step.lines import (
    DRAWS,
    CarriedLine,
    MislabeledPlacement,
    MisplacedLine,
    OtherArgument,
    OtherOperand,
    SegmentsOfPart,
    UnsummedLine,
    UnwrittenMemory,
    VarianceOfPart,
    WrongLine,
    WrongLines,
)
from shardviz.explain.step.losses import (
    MiscountedTerm,
    PaddingRead,
    PartialVocabularyLoss,
    ScalarNotReduced,
    TermsAveraged,
    UnexplainedLoss,
    UnexplainedValue,
    UnsummedValue,
)
from shardviz.explain.step.modules import (
    AveragedForward,
    RepeatedForwardSum,
    ScaledBetweenModules,
    SkippedModule,
    StatisticsOfPart,
    UnexplainedBetweenModules,
    UnexplainedInput,
    UnexplainedModule,
    UnexplainedModuleBackward,
    UngatheredInput,
    UnsummedModule,
    WrongArgument,
)
from shardviz.explain.step.parts import CutByAnotherAxis, MisplacedOperand, SameSlices, ShiftedPart
from shardviz.explain.step.scales import ClippedByParts, NormOverWrongAxes, RowsTimesOwnNumbers
from shardviz.explain.step.sums import (
    GradientNotReduced,
    OutputNotReduced,
    RepeatedTerm,
    ResultNotRead,
    UnreducedBesideVector,
)
from shardviz.explain.step.update import StepOfPart, UnexplainedWeight
from shardviz.explain.step.whole_step import (
    RankDependentCode,
    RowsSentByOneRank,
    UnexplainedBackward,
    UnexplainedCopies,
    UnexplainedForward,
    UnexplainedWeightGradients,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardviz.check.step.lines.fault import Fault
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import UnreadRecord
    from shardviz.explain.cause import Cause

OPEN = (
    UnexplainedModule,
    UnexplainedInput,
    UnexplainedModuleBackward,
    UngatheredInput,
    UnexplainedBetweenModules,
    UnexplainedForward,
    WrongArgument,
    WrongOutside,
)
"""Causes that say where a step goes wrong and not why: the line takes their place."""


OF_FACTORS = (RepeatedForwardSum, AveragedForward, ScaledBetweenModules)
"""Causes of a factor that a module gives its output: a line that has it or sums the whole takes their place."""

OF_BACKWARD = (UnexplainedBackward, UnexplainedWeightGradients, RowsWithOtherLabels, RowsTimesOwnNumbers)
"""Causes of which the last output's gradient, or less, is all that is known: a line in the loss says more."""

GUESSES = (
    UnexplainedLoss,
    UnexplainedValue,
    PartialVocabularyLoss,
    UnexplainedCopies,
    UnexplainedState,
    UnexplainedWeight,
)
"""Causes that say what is usual, or only what differs: the line takes their place."""

OF_REDUCTIONS = (CopiesSummedLine, RepeatedReductionLine, WrongReductionLine)
"""Causes of a reduction that gives something else."""

OF_PARTS = (
    CausalMaskOfPart,
    MisplacedMask,
    MisplacedOperand,
    NeighborLeftOut,
    SameSlices,
    ShiftedPart,
    UnwrittenMemory,
)
"""Causes of a part, a mask or memory that is wrong where all keys are there."""

OF_ORDER = (DimsMerged, MisplacedLine, SegmentsOfPart)
"""Causes of numbers that stand in another order."""

OF_NORMS = (NormOverWrongAxes, StepOfPart, ClippedByParts)
"""Causes that a factor is measured for: a number that is made of sizes has it by chance."""

NOT_REDUCED = (LeftOutOfReduction, NarrowReduction, ReductionNotStored, LocalWeight)
"""Causes of a line that reduces other gradients, or reduces elsewhere."""

SURE = (*NOT_REDUCED, CopiesSummedLine, UnreducedGather, VarianceOfPart)
"""Causes of a line that take the place of any other."""

MEASURED = (WrongArgument, JoinedFromAfar, WrongDenominator)
"""Causes that values show, and more than a line of which only the place is known."""

VAGUE = (WrongLine, WrongLines, CarriedLine)
"""Causes of a line of which only the place is known."""

MEANS = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "kl_div", "mean")
"""Functions that take a mean over rows."""


def module_to_open(finding: Finding) -> str | None:
    """Return the module whose lines may hold a finding's cause: the model's name is empty; None without a module.

    `STEP` stands for the step around the model.
    """
    if isinstance(finding.explanation, SkippedModule | SequenceOfWhole):
        return None  # no line has what is missing, or what a plan does
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
    faults = [(lines, fault) for lines in opened if (fault := _fault_inside(dump, lines)) is not None]
    is_of_model = around is not None and around.is_loss_of_model  # the model's own lines are the loss's
    of_model = next((fault for lines, fault in faults if is_of_model and not lines.module and not fault.is_given), None)
    outcomes = [*results]
    named = list(_named(dump, outcomes, opened, around, faults, of_model))
    several = findings_in(outcomes) if len(findings_in(outcomes)) > 1 else []  # a line may cover one of several
    of_step = [around.fault_of(one) for one in several if is_around(one)] if around is not None else []
    covering = [fault for fault in (*(fault for _, fault in faults), *of_step) if fault is not None]
    yield from without_covered(named, covering)
    yield from _not_read(dump) if not opened and around is None else ()


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
    return number_fault(states, arguments) or with_size_given(states, fault_in(states), arguments)


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


def with_line(finding: Finding, fault: Fault) -> Finding:
    """Return a finding that begins with a fault's line; its cause is the line's if it had none."""
    is_summed_wrongly = isinstance(finding.explanation, UnsummedModule) and isinstance(fault.cause, OF_REDUCTIONS)
    details = () if is_summed_wrongly else finding.details  # they say that nothing sums
    line_finding = replace(finding, sentence=fault.sentence, details=(finding.sentence, *details))
    placed, is_measured = replace(line_finding, line=fault.place), isinstance(finding.explanation, MEASURED)
    if is_measured and type(fault.cause) in VAGUE:
        return line_finding if isinstance(fault.cause, WrongLines) else placed
    is_open = isinstance(finding.explanation, OPEN) or _is_exchanged(finding.explanation)
    is_open |= isinstance(finding.explanation, StatisticsOfPart) and not _is_mean_of_part(fault)
    is_open |= isinstance(finding.explanation, UngatheredKeys) and _tells_no_attention(fault)
    has_factor = fault.is_scaled or isinstance(fault.cause, RepeatedReductionLine)
    is_open |= has_factor and isinstance(finding.explanation, OF_FACTORS)
    is_open |= isinstance(fault.cause, UnaveragedLine) and isinstance(finding.explanation, OutputNotReduced)
    is_open |= is_summed_wrongly
    is_open |= isinstance(fault.cause, CutByAnotherAxis | AveragedInBackward)
    is_open |= isinstance(finding.explanation, JoinedOutOfOrder) and isinstance(fault.cause, OF_ORDER)
    is_open |= isinstance(finding.explanation, UnsummedInputGradient) and _is_before_readers(fault)
    is_open |= isinstance(fault.cause, OtherOperand | UnsummedLine) and isinstance(
        finding.explanation, RankDependentCode
    )
    is_open |= is_measured
    is_open |= isinstance(finding.explanation, RanWithoutGraph) and isinstance(fault.cause, ReadElsewhere)
    is_open |= isinstance(finding.explanation, CutInModule) and isinstance(fault.cause, DetachedInLine)
    if isinstance(fault.cause, WrongLines):
        return line_finding.because(fault.cause) if is_open else line_finding
    if isinstance(finding.explanation, UnreducedBesideVector) and fault.summed:
        term = finding.explanation
        return replace(placed, kind="wrong-scale", held="").because(RepeatedTerm(term.vector, term.axis))
    if not (is_open or isinstance(fault.cause, MislabeledPlacement)):
        return placed
    return replace(placed, kind=_kind_of(fault.cause, placed.kind)).because(fault.cause)


def with_line_around(dump: Dump, finding: Finding, fault: Fault, *, are_gradients_wrong: bool) -> Finding:
    """Return a finding that begins with a line around the model; its cause is the line's unless only one cause fits.

    What is logged in a wrong way makes no gradient wrong.
    """
    guesses: tuple[type[Cause], ...] = (*GUESSES, ScalarNotReduced) if are_gradients_wrong else GUESSES
    guesses = (*guesses, *OF_BACKWARD) if fault.is_forward else guesses
    sides = finding.sentence, *finding.details
    placed = replace(finding, sentence=fault.sentence, details=sides, line=fault.place)
    if isinstance(fault.cause, UnsummedValue):
        axes = fault.cause.axes
        size = dump.files.mesh.size_over(axes.split(" and "))
        in_gradients = any(result.role == "grad" for other in placed.others for result in results_of(other))
        return placed.because(TermsAveraged(fault.place, axes, size) if in_gradients else fault.cause)
    is_mean_of_part = isinstance(finding.explanation, UnexplainedLoss) and fault.function in MEANS
    is_mean_of_part &= not isinstance(fault.cause, LabelsOfOtherRows | OtherLabels)
    cause = mean_of_means(dump) if is_mean_of_part and _is_of_result(fault) else _of_ratio(dump, fault)
    is_explained = len(finding.explanation.ways) == 1 and not isinstance(finding.explanation, (*guesses, type(cause)))
    is_explained &= not (fault.is_of_sizes and isinstance(finding.explanation, OF_NORMS))
    is_explained &= not (isinstance(fault.cause, OtherArgument) and finding.explanation == StepOfPart())
    is_explained &= not (fault.by_terms and isinstance(finding.explanation, PaddingRead))
    if is_explained and not isinstance(fault.cause, SURE):
        is_meant = isinstance(finding.explanation, MiscountedTerm) and isinstance(fault.cause, UnsummedLine)
        return finding if is_meant else placed  # the loss is each rank's mean, and gradients are averaged
    return replace(placed, kind=finding.kind if finding.kind in cause.kinds else cause.kinds[0]).because(cause)


def _of_ratio(dump: Dump, fault: Fault) -> Cause:
    """Return a line's cause; if it divides by a rank's own sum, and losses are averaged, it makes a mean of means."""
    means = mean_of_means(dump)
    is_averaged = isinstance(fault.cause, UnsummedLine) and fault.cause.axis in means.axes.split(" and ")
    return replace(means, place=fault.place) if fault.by_terms and is_averaged else fault.cause


def _is_mean_of_part(fault: Fault) -> bool:
    """Whether a line may take a mean of the rank's own part: its place alone is known, or it does."""
    is_mean = isinstance(fault.cause, UnsummedLine) and bool(fault.cause.mean)
    return is_mean or isinstance(fault.cause, (UnaveragedLine, VarianceOfPart, WrongLineBackward, *VAGUE))


def _is_before_readers(fault: Fault) -> bool:
    """Whether the gradient of what a line makes lacks a sum: there it is summed once for all that read it."""
    return isinstance(fault.cause, WrongLineBackward) and bool(fault.cause.axis) and not fault.cause.part


def _is_of_result(fault: Fault) -> bool:
    """Whether a line sums nothing and makes something else of what is right, before any backward."""
    return fault.is_forward and not isinstance(fault.cause, (*OF_REDUCTIONS, UnsummedLine))


def _is_exchanged(cause: Cause | None) -> bool:
    """Whether ranks exchange keys and values, and what they do with them is all that is left to find."""
    return isinstance(cause, UngatheredKeys) and bool(cause.exchange)


def _tells_no_attention(fault: Fault) -> bool:
    """Whether a line takes another rank's part, or normalizes or draws: it isn't attention that lacks keys."""
    if isinstance(fault.cause, MisplacedLine):
        return fault.cause.is_of_rank
    is_of_rows = _is_of_result(fault) and (fault.function.endswith("_norm") or fault.function in DRAWS)
    return is_of_rows or isinstance(fault.cause, OF_PARTS)


def _kind_of(cause: Cause, kind: Kind) -> Kind:
    """Return the kind of a finding whose cause is a line: a sum that is missing has one name wherever it is found."""
    is_mislabeled = isinstance(cause, MislabeledPlacement) and bool(cause.axis)
    if is_mislabeled or isinstance(cause, UnsummedLine | UnaveragedLine):
        return "unreduced-output"
    return kind if kind in cause.kinds else cause.kinds[0]


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
