"""How a finding and a line go together: whose place is named, and whose cause.

A line's cause takes the place of one that only says where a step goes wrong, or what is usual. What was measured of
values, and is more than a line's place, stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.around import results_of
from shardviz.check.step.rules.losses import mean_of_means
from shardviz.explain.checkpoints.states import UnexplainedState
from shardviz.explain.step.forward import JoinedOutOfOrder, UngatheredKeys
from shardviz.explain.step.gradients import CutInModule, UnsummedInputGradient, WrongOutside
from shardviz.explain.step.graphs import AveragedInBackward, DetachedInLine, RanWithoutGraph, ReadElsewhere
from shardviz.explain.step.joins import JoinedFromAfar, WrongDenominator
from shardviz.explain.step.line_reductions import (
    CopiesSummedLine,
    LeftOutOfReduction,
    LocalWeight,
    NarrowReduction,
    ReductionNotStored,
    RepeatedReductionLine,
    UnaveragedLine,
    UnreducedGather,
    WrongLineBackward,
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
from shardviz.explain.step.sums import OutputNotReduced, RepeatedTerm, UnreducedBesideVector
from shardviz.explain.step.update import StepOfPart, UnexplainedWeight
from shardviz.explain.step.whole_step import (
    RankDependentCode,
    UnexplainedBackward,
    UnexplainedCopies,
    UnexplainedForward,
    UnexplainedWeightGradients,
)

if TYPE_CHECKING:
    from shardviz.check.step.lines.fault import Fault
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding, Kind

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
