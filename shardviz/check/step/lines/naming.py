"""Findings with the first wrong line of their module in them, and the modules of which it is asked for."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.check.step.lines.around import Around, is_around, results_of
from shardviz.check.step.lines.calls import Lines
from shardviz.check.step.lines.faults import fault_in
from shardviz.check.step.lines.states import States
from shardviz.check.step.rules.losses import mean_of_means
from shardviz.check.whole.completeness import no_file_of
from shardviz.dump.records.lines import STEP
from shardviz.explain.finding import Finding
from shardviz.explain.step.exchanged_rows import ExchangeNotReversed, ForeignNumbersSummed, RowsNotRestored, StrangeRows
from shardviz.explain.step.forward import MisplacedOperand, ShiftedPart, UngatheredKeys
from shardviz.explain.step.lines import (
    DRAWS,
    CopiesSummedLine,
    MisplacedLine,
    OtherNumber,
    RepeatedReductionLine,
    ScaledLine,
    SegmentsOfPart,
    UnaveragedLine,
    UnlikeOperands,
    UnsummedLine,
    UnsummedLineBackward,
    UnwrittenMemory,
    WholeGradientSummedAgain,
    WrongLine,
    WrongLineBackward,
    WrongLines,
    WrongReductionLine,
)
from shardviz.explain.step.losses import (
    PaddingSummed,
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
)
from shardviz.explain.step.step_lines import (
    BackwardLine,
    GradientLine,
    LeftOutOfReduction,
    LocalWeight,
    NarrowReduction,
    ReductionNotStored,
    SummedLossAveraged,
)
from shardviz.explain.step.sums import RepeatedTerm, UnreducedBesideVector
from shardviz.explain.step.whole_step import UnexplainedBackward, UnexplainedCopies, UnexplainedForward
from shardviz.explain.templates import number
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.check.step.lines.fault import Fault
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.lines import FrameRecord
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Kind

OPEN = (
    UnexplainedModule,
    UnexplainedInput,
    UnexplainedModuleBackward,
    UngatheredInput,
    UnexplainedBetweenModules,
    UnexplainedForward,
)
"""Causes that say where a step goes wrong and not why: the line takes their place."""


OF_FACTORS = (RepeatedForwardSum, AveragedForward, ScaledBetweenModules)
"""Causes of a factor that a module gives its output: a line that sums nothing and has that factor takes their place."""

GUESSES = (UnexplainedLoss, UnexplainedValue, PartialVocabularyLoss, UnexplainedCopies)
"""Causes that say what is usual, or only what differs: the line takes their place."""

MEANS = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "kl_div", "mean")
"""Functions that take a mean over rows."""

NOT_REDUCED = {
    "left out": "reduces other gradients over {axis} and never gets this gradient",
    "narrow reduction": "reduces the gradient{over}, and nothing reduces it over {axis}",
    "not stored": "reduces a copy of this gradient over {axis}, and nothing writes the result into the gradient",
    "local weight": "takes this rank's part of the weight without grad_placements",
}
"""What a line does that leaves a gradient unreduced."""

APPLIED = re.compile(r"\w+\.apply(?=\()")
"""How code calls an autograd.Function."""

PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm")
"""Functions by which rows meet a weight."""


def module_to_open(finding: Finding) -> str | None:
    """Return the module whose lines may hold a finding's cause: the model's name is empty; None without a module.

    `STEP` stands for the step around the model.
    """
    if isinstance(finding.explanation, UnexplainedBetweenModules):
        return finding.module.rpartition(".")[0]
    if isinstance(finding.explanation, UngatheredKeys):
        return finding.explanation.module.rpartition(".")[0]
    if finding.module or isinstance(finding.explanation, OPEN):
        return finding.module
    if any(result.role == "output" for result in results_of(finding)):
        return ""
    return STEP if is_around(finding) else None


def with_lines(dump: Dump, results: Iterable[Finding | NotChecked]) -> Iterator[Finding | NotChecked]:
    """Yield the results of a step's checks, those about the module that ranks looked into with its first wrong line."""
    opened, around = _opened(dump), Around.of(dump)
    faults = [(lines, fault) for lines in opened if (fault := fault_in(lines, States(dump, lines))) is not None]
    for outcome in results:
        if not isinstance(outcome, Finding):
            yield outcome
            continue
        module, named = module_to_open(outcome), outcome
        for lines, fault in faults:  # what a module is given wrong is made by the one around it
            if module_to_open(named) in (lines.module, lines.asked_module):
                named = _given_wrong(named, lines, fault) if fault.way == "given" else with_line(named, fault)
        if named is not outcome:
            yield named
        elif around is not None and module == STEP and (fault_around := around.fault_of(outcome)) is not None:
            yield with_line_around(dump, outcome, fault_around, are_gradients_wrong=around.has_wrong_gradient)
        else:
            cause = outcome.explanation
            place = cause.place if isinstance(cause, UnexplainedBackward) and cause.moved else ""
            yield replace(outcome, line=outcome.line or place)
    yield from _not_read(dump) if not opened and around is None else ()


def _opened(dump: Dump) -> list[Lines]:
    """Return the lines of each module that ranks looked into, in the order in which they did."""
    records = [lines for rank in dump.files.ranks.values() for lines in rank.lines if lines.module != STEP]
    read = (Lines.of(dump, module=module) for module in dict.fromkeys(lines.module for lines in records))
    return [lines for lines in read if lines is not None]


def _given_wrong(finding: Finding, lines: Lines, fault: Fault) -> Finding:
    """Return a finding of the module around the one that is given what is wrong."""
    around = lines.module.rpartition(".")[0]
    placed = replace(finding, sentence=sentence_of(fault), details=(finding.sentence,), module=around)
    is_open = isinstance(finding.explanation, (*OPEN, UngatheredKeys))
    return placed.because(UnexplainedInput(lines.module)) if is_open else finding


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
    line_finding = replace(finding, sentence=sentence_of(fault), details=(finding.sentence, *finding.details))
    is_open = isinstance(finding.explanation, OPEN) or _is_exchanged(finding.explanation)
    is_open |= isinstance(finding.explanation, StatisticsOfPart) and _is_no_mean(fault)
    is_open |= isinstance(finding.explanation, UngatheredKeys) and _tells_no_attention(fault)
    is_open |= fault.is_scaled and isinstance(finding.explanation, OF_FACTORS)
    if fault.way == "between" and fault.before is not None:
        cause: Cause = WrongLines(place_of(fault.before), place_of(fault.line), fault.is_own)
        return line_finding.because(cause) if is_open else line_finding
    placed = replace(line_finding, line=place_of(fault.line))
    if isinstance(finding.explanation, UnreducedBesideVector) and fault.summed:
        term = finding.explanation
        return replace(placed, kind="wrong-scale", held="").because(RepeatedTerm(term.vector, term.axis))
    if not is_open:
        return placed
    cause = cause_of(fault)
    return replace(placed, kind=_kind_of(cause, placed.kind)).because(cause)


def with_line_around(dump: Dump, finding: Finding, fault: Fault, *, are_gradients_wrong: bool = False) -> Finding:
    """Return a finding that begins with a line around the model; its cause is the line's unless only one cause fits.

    What is logged in a wrong way makes no gradient wrong.
    """
    guesses: tuple[type[Cause], ...] = (*GUESSES, ScalarNotReduced) if are_gradients_wrong else GUESSES
    guesses = (*guesses, UnexplainedBackward) if fault.is_forward else guesses
    placed = replace(
        finding, sentence=sentence_of(fault), details=(finding.sentence, *finding.details), line=place_of(fault.line)
    )
    if fault.way == "averaged term":
        size = math.prod(map(dump.files.mesh.axis_size, fault.axis.split(" and ")))
        in_gradients = any(result.role == "grad" for other in placed.others for result in results_of(other))
        if in_gradients:
            return placed.because(TermsAveraged(place_of(fault.line), fault.axis, size))
        return placed.because(UnsummedValue(fault.axis))
    is_mean_of_part = isinstance(finding.explanation, UnexplainedLoss) and fault.function in MEANS
    is_explained = len(finding.explanation.ways) == 1 and not isinstance(finding.explanation, guesses)
    if is_explained and fault.way not in NOT_REDUCED and not fault.copies:
        return placed
    cause = mean_of_means(dump) if is_mean_of_part and fault.way == "result" else cause_of(fault)
    return replace(placed, kind=finding.kind if finding.kind in cause.kinds else cause.kinds[0]).because(cause)


def _is_no_mean(fault: Fault) -> bool:
    """Whether a line is a sum over the wrong ranks, or one that is missing and no mean's."""
    return fault.way == "collective" or (fault.way == "unsummed" and not fault.is_mean)


def _is_exchanged(cause: Cause | None) -> bool:
    """Whether ranks exchange keys and values, and what they do with them is all that is left to find."""
    return isinstance(cause, UngatheredKeys) and bool(cause.exchange)


def _tells_no_attention(fault: Fault) -> bool:
    """Whether a line takes another rank's part, or normalizes or draws: it isn't attention that lacks keys."""
    is_of_rows = fault.way == "result" and (fault.function.endswith("_norm") or fault.function in DRAWS)
    return is_of_rows or fault.way in ("misplaced", "shifted", "unwritten") or fault.moved == "rank"


def _kind_of(cause: Cause, kind: Kind) -> Kind:
    """Return the kind of a finding whose cause is a line: a sum that is missing has one name wherever it is found."""
    if isinstance(cause, UnsummedLine | UnaveragedLine):
        return "unreduced-output"
    return kind if kind in cause.kinds else cause.kinds[0]


def place_of(line: FrameRecord) -> str:
    """Return a line as `moe.py:83`."""
    return f"{line.file}:{line.line}"


def _reached(fault: Fault) -> str:
    """Return the line in a function that the fault's line calls, if it goes wrong there, and the line that calls it."""
    is_inner = fault.inner is not None and place_of(fault.inner) != place_of(fault.line)
    inner = [f"in {_at(fault.inner, fault.line)}"] if is_inner and fault.inner is not None else []
    caller = [f"called in {_at(fault.caller, fault.line)}"] if fault.caller is not None else []
    return f", {', '.join((*inner, *caller))}," if inner or caller else ""


def _called(fault: Fault) -> str:
    """Return the line that calls the function in which a fault's line stands, in a step around the model."""
    return f", called in {_at(fault.caller, fault.line)}," if fault.caller is not None else ""


def _at(line: FrameRecord, previous: FrameRecord | None = None) -> str:
    """Return a line with its text; without the file's name behind a line of the same file."""
    place = f"line {line.line}" if previous is not None and previous.file == line.file else place_of(line)
    return f"{place} `{line.source}`" if line.source else place


def sentence_of(fault: Fault) -> str:
    """Say what is wrong at a line, with each rank's values there and the line before."""
    line, before = fault.line, fault.before
    if fault.way == "backward":
        mean = ", in the mean over ranks" if fault.times < 1 else ""
        losses = f"{fault.count} losses that add up to " if fault.count > 1 else ""
        return f"{_at(line)}{_called(fault)} runs on {losses}{fault.times:.5g} times the unsharded model's loss{mean}"
    if fault.way == "kept gradient":
        return _of_kept_gradient(fault)
    if fault.way == "not stored" and fault.reader is not None and before is not None:
        result = f"{_at(before)} reduces a copy of this gradient over {fault.axis}"
        return f"{result}; {_at(line, before)}{_called(fault)} writes the result into a copy, not into the gradient"
    if fault.way == "summed loss":
        return f"{_at(line)}{_reached(fault)} sums the ranks' losses over {fault.axis} before the backward"
    if fault.way == "averaged term":
        return f"{_at(line)}{_called(fault)} gives each rank one term of a sum over {fault.axis}"
    if fault.way in NOT_REDUCED:
        over = f" over {named_ranks(fault.ranks)}" if fault.way == "narrow reduction" else ""
        return f"{_at(line)}{_called(fault)} {NOT_REDUCED[fault.way].format(axis=fault.axis, over=over)}"
    if fault.way == "between" and before is not None:
        return f"it goes wrong between {_at(before)} and {_at(line, before)}"
    if fault.way == "unsummed" and before is not None:
        return _of_unsummed(fault, before)
    if fault.way == "given":
        return f"{_at(line)} reads what its module is given and what is no part of the unsharded model's"
    if fault.way == "rows":
        return f"{_at(line)} makes rows that the unsharded model doesn't have; {fault.function} gets rows that it has"
    if fault.way == "exchange" and before is not None and fault.reader is not None:
        return (
            f"{_at(before)} brings rows; {_at(line, before)} reorders them; {_at(fault.reader, before)} sends them back"
        )
    if reading := _of_reading(fault, before):
        return reading
    if fault.way == "exchange gradient":
        place = f"in backward {_at(line)}{_reached(fault)} is the first wrong line"
        return f"{place}: it doesn't send back the reverse exchange of its gradient"
    is_new = before is not None and before != line
    after = f", after {_at(before, line)}" if is_new and before is not None else ""
    if fault.way in ("gradient", "unsummed gradient"):
        clause = f"gets {fault.input_text} of its gradient, and " if fault.input_text else ""
        place = f"in backward {_at(line)}{_reached(fault)} is the first wrong line{after}"
        return f"{place}: it {clause}sends back {fault.held}"
    over = f" over {named_ranks(fault.ranks)}" if fault.ranks else ""
    clause = f"{fault.function}{over} gets {fault.input_text}, and returns" if fault.input_text else ""
    if fault.input_text and fault.reads:
        clause = f"{fault.reads} gets {fault.input_text}, and {fault.function} makes of its result"
    clause = clause or f"{fault.function} returns"
    if fault.numbers is not None:
        held, wanted = map(number, fault.numbers)
        clause = f"{fault.function} gets the number {held}, in the unsharded model {wanted}, and returns"
    return f"{_at(line)}{_reached(fault)} is the first wrong line{after}: {clause} {fault.held}"


def _of_reading(fault: Fault, before: FrameRecord | None) -> str:
    """Say which line reads what is not the rank's own part, or not part of anything; empty if that isn't the fault."""
    line = fault.line
    if fault.way == "foreign" and before is not None and fault.reader is not None:
        where = "" if place_of(before) == place_of(line) else f" by {_at(before, line)}"
        clause = f"{_at(line)} uses indices that were moved into the rank's part{where}"
        return f"{clause}; {_at(fault.reader, line)} sums what comes of them"
    if fault.way == "misplaced" and fault.reader is not None:
        given = f"{_at(line)}{_reached(fault)} gives {named_ranks(fault.ranks)} another rank's part"
        return f"{given}; {_at(fault.reader, line)} combines it with the rank's own part"
    if fault.way == "shifted" and fault.stretch is not None and fault.reader is not None:
        dim, first, due, length = fault.stretch
        given = (
            f"{_at(line)}{_reached(fault)} gives {named_ranks(fault.ranks)} elements {first} to {first + length - 1}"
        )
        combined = f"{_at(fault.reader, line)} combines them with its part, {due} to {due + length - 1}"
        return f"{given} of dim {dim}; {combined}"
    if fault.way == "padding" and fault.padding is not None and before is not None:
        dim, size, padded = fault.padding
        summed = f"{_at(line)}{_reached(fault)} sums over dim {dim} with elements {size} to {padded - 1} of it"
        return f"{summed}, on {named_ranks(fault.ranks)}; the unsharded model cuts these off in {_at(before, line)}"
    if fault.way == "unwritten" and before is not None:
        return f"{_at(before)} makes room that nothing writes to; {_at(line, before)}{_reached(fault)} reads it"
    return ""


def _of_unsummed(fault: Fault, before: FrameRecord) -> str:
    """Say which line makes a term of a sum, and which uses it as the whole."""
    line = fault.line
    kind, verb = ("mean", "averages") if fault.is_mean else ("sum", "sums")
    terms = f"{_at(before)} gives each rank one term of a {kind} over {fault.axis}"
    if before == line and fault.operand:
        start = f"{_at(before)} makes one term of a {kind} over {fault.axis}, by {fault.operand}"
        return f"{start}, and {fault.function} takes it before anything {verb} it"
    if before == line:
        return f"{terms}{'' if fault.input_text else ', and the module returns it'}; nothing {verb} it"
    if fault.summed:
        return f"{terms}; {_at(line, before)}{_reached(fault)} uses it before {fault.summed} {verb} it"
    reading = f"{_at(line, before)}{_reached(fault)}"
    return f"{terms}; {reading} uses it as the whole; nothing {verb} it between"


def _of_kept_gradient(fault: Fault) -> str:
    """Say what a line writes into a gradient."""
    over = f" over {named_ranks(fault.ranks)}" if fault.ranks else ""
    place = f"{_at(fault.line)}{_reached(fault)}"
    if not fault.times:
        return f"{place} is the first wrong line: {fault.function}{over} leaves {fault.held} in the gradient"
    times = f"{fault.times:.5g} times the unsharded model's gradient"
    if fault.times_before == 1:
        return f"{place} is the first wrong line: {fault.function}{over} leaves {times}"
    runs = f" the last time it runs, of {fault.count} times" if fault.count else ""
    return f"{place} leaves {times}{runs}; the backward left {fault.times_before:.5g} times"


def cause_of(fault: Fault) -> Cause:
    """Return the cause that a line is."""
    place = place_of(fault.line)
    if (around := _cause_around(fault)) is not None:
        return around
    if fault.way == "unsummed" and fault.before is not None:
        partner = "a tensor that needs no sum" if fault.is_beside_whole else ""
        inside = (fault.function, fault.operand, partner) if fault.operand else ("", "", "")
        mean = "mean" if fault.is_mean and not fault.operand else ""
        return UnsummedLine(place_of(fault.before), place if fault.input_text else "", fault.axis, *inside, mean)
    if fault.way == "rows":
        is_product = fault.function in PRODUCTS
        came = place_of(fault.before) if fault.before is not None and is_product else ""
        return StrangeRows(place, fault.function, is_product, came)
    if fault.way == "exchange" and fault.before is not None and fault.reader is not None:
        return RowsNotRestored(place, place_of(fault.before), place_of(fault.reader))
    if (reading := _cause_of_reading(fault, place)) is not None:
        return reading
    if fault.way == "exchange gradient" and fault.inner is not None:
        return ExchangeNotReversed(place, fault.function, place_of(fault.inner))
    if fault.way == "collective" and fault.copies:
        return CopiesSummedLine(place, fault.function, fault.ranks, fault.axis, fault.copies, round(fault.times))
    if fault.way == "collective" and fault.times:
        return RepeatedReductionLine(place, fault.function, round(fault.times), fault.ranks)
    if fault.way == "collective":
        return WrongReductionLine(place, fault.function, fault.ranks, fault.axis)
    if fault.way == "unsummed gradient":
        return UnsummedLineBackward(place, fault.axis)
    if fault.reader is not None:
        return WholeGradientSummedAgain(place, place_of(fault.reader), fault.axis, int(fault.times))
    if fault.way == "gradient":
        return WrongLineBackward(place, _with_backward(fault), fault.axis, fault.operand)
    if fault.moved:
        inner = place_of(fault.inner) if fault.inner is not None else place
        return MisplacedLine(inner, fault.function, is_of_rank=fault.moved == "rank")
    if fault.unlike:
        return UnlikeOperands(place, fault.function, fault.input_text, int(fault.unlike))
    if fault.numbers is not None:
        return OtherNumber(place_of(fault.inner or fault.line), fault.function, *fault.numbers)
    if fault.segments is not None:
        return SegmentsOfPart(place, fault.function, fault.input_text, *fault.segments)
    if fault.way == "result" and fault.axis:
        return UnaveragedLine(place, fault.function, fault.axis)
    if fault.times:
        return ScaledLine(place, fault.times, fault.split, is_root=fault.is_root)
    return WrongLine(place, fault.function, fault.input_text, fault.reads)


def _cause_of_reading(fault: Fault, place: str) -> Cause | None:
    """Return the cause that a line is which reads what is not the rank's own part; None if it reads that."""
    if fault.way == "foreign" and fault.reader is not None:
        return ForeignNumbersSummed(place, fault.function, place_of(fault.reader))
    if fault.way == "misplaced" and fault.reader is not None:
        return MisplacedOperand(place, fault.function, place_of(fault.reader), fault.ranks)
    if fault.way == "shifted" and fault.stretch is not None and fault.reader is not None:
        return ShiftedPart(place, fault.function, place_of(fault.reader), fault.ranks[0], *fault.stretch)
    if fault.way == "padding" and fault.padding is not None and fault.before is not None:
        return PaddingSummed(place, fault.function, place_of(fault.before), *fault.padding)
    if fault.way == "unwritten" and fault.before is not None:
        return UnwrittenMemory(place_of(fault.before), fault.operand, place)
    return None


def _with_backward(fault: Fault) -> str:
    """Return the function whose backward is wrong: one that the line applies, for torch's own match their forward."""
    applied = APPLIED.findall(fault.line.source)
    return applied[0] if len(applied) == 1 and not fault.operand else fault.function


def _cause_around(fault: Fault) -> Cause | None:
    """Return the cause that a line around the model is: of what it does to the loss or to gradients; else None."""
    place = place_of(fault.line)
    if fault.way == "kept gradient" and fault.axis and not fault.times:
        return WrongReductionLine(place, fault.function, fault.ranks, fault.axis)
    if fault.way == "kept gradient":
        runs = str(fault.count) if fault.count else ""
        return GradientLine(place, fault.function, fault.ranks, fault.times, fault.times_before, runs)
    if fault.way == "left out":
        return LeftOutOfReduction(place, fault.axis)
    if fault.way == "narrow reduction":
        return NarrowReduction(place, fault.function, fault.ranks, fault.axis)
    if fault.way == "not stored" and fault.before is not None:
        written = place_of(fault.reader) if fault.reader is not None else ""
        return ReductionNotStored(place_of(fault.before), fault.axis, written)
    if fault.way == "local weight":
        return LocalWeight(place, fault.axis)
    if fault.way == "summed loss":
        return SummedLossAveraged(place, fault.axis)
    if fault.way == "backward":
        return BackwardLine(place, fault.times, fault.count)
    return None
