"""All checks of a dump: each family over each tensor, and what they found, worst first.

Tensors that hold what they claim are passed by; a check that cannot be made says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.order.case import Case, LaidOut, PairOfIds, is_as_claimed
from shardviz.check.order.infer.ranks import with_one_order
from shardviz.check.order.rules.foreign import check_foreign
from shardviz.check.order.rules.intent import (
    check_intent,
    check_planned,
    check_states,
    intended_text,
    is_intended,
    of_states,
    unmatched,
    wanted_layout,
    with_order,
)
from shardviz.check.order.rules.places import check_places, check_plain_copies
from shardviz.check.order.rules.sequence import check_sequence
from shardviz.check.order.rules.shapes import check_dtype, check_global_shape, check_label, is_padded_in_place
from shardviz.check.order.rules.without_ids import (
    check_filled,
    check_fragments,
    check_master,
    check_recomputed,
    check_redrawn,
    check_unplaced,
    check_zeros,
    is_master,
    of_masters,
    with_suspects,
)
from shardviz.check.ranks import check_completeness, check_missing_ranks, check_rank_order
from shardviz.check.report import (
    About,
    NotChecked,
    Place,
    Report,
    findings_in,
    grouped,
    is_of_places,
    ranks_by_name,
    unhidden,
)
from shardviz.check.step.collectives import check_collectives, check_gathered
from shardviz.check.step.comparison import is_of_parts
from shardviz.check.step.contradictions import check_zero_gradients
from shardviz.check.step.lines.naming import (
    line_of_own_rows,
    module_to_open,
    returns_loss,
    with_lines,
    with_unread,
)
from shardviz.check.step.run import check_step, without_consequences_of_update
from shardviz.check.step.update.compare import check_unsharded_update
from shardviz.check.step.update.copies import check_update
from shardviz.check.values.copies import check_copies, check_identical_shards
from shardviz.check.values.storage import check_replaced, check_ties, check_unwritten, check_writes
from shardviz.check.verdicts import num_of_model
from shardviz.dump.dump import Dump, Tensor, dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.trace import NO_MEAN, STEP
from shardviz.errors import ShardvizError
from shardviz.explain.finding import Finding
from shardviz.explain.placement.order import OrderNotApplied
from shardviz.explain.step.update import AnotherLearningRate, RepeatedStep
from shardviz.groups import in_groups
from shardviz.layout.mesh import ranks_by
from shardviz.layout.notation import DimOrder, split_order
from shardviz.machine import collector_paused
from shardviz.text import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


Result = Finding | NotChecked

RATE_OF_GROUP = "the optimizer's lr of group"
"""How ranks begin a note that a learning rate is not the unsharded model's."""


def check_dump(path: Path | str) -> Report:
    """Read a dump and check it; damaged files become findings.

    Raises:
        DumpError: The folder is not a dump.
    """
    with collector_paused():
        return report_on(dump_of(read_files(path, strict=False)))


def report_on(dump: Dump) -> Report:
    """Return every disagreement between what a dump's ranks claim, hold and are meant to hold."""
    laid_out = LaidOut(dump)
    if dump.files.planned is not None:
        return _report(dump, laid_out, list(check_planned(dump)))
    weights = [*with_one_order(_check_shards(laid_out), laid_out), *_check_run(dump)]
    told_right: dict[Place, bool] = {}
    step = with_unread(dump, with_lines(dump, _check_step(laid_out, findings_in(weights), told_right)))
    results = _with_line_of_own_rows(dump, _without_rates([*weights, *step, *check_collectives(dump)]))
    return replace(_report(dump, laid_out, results), compared=told_right)


def modules_to_open(folder: Path) -> list[str]:
    """Return inside of which modules ranks should look, once their step is in the dump.

    That is the first wrong one, the model itself only without another, or the step around the model.
    """
    try:
        dump = dump_of(read_files(folder, strict=False))
        findings = report_on(dump).findings
    except ShardvizError:  # the command that reads the dump says so
        return []
    modules = [module for module in map(module_to_open, findings) if module is not None]
    inside = [module for module in modules if module != STEP]
    if not findings and is_of_parts(dump, NO_MEAN):
        return [STEP]
    if modules and not inside and not any(finding.line for finding in findings) and returns_loss(dump):
        return [STEP, ""]
    return [next(filter(None, inside), "")] if inside else modules[:1]


def _with_line_of_own_rows(dump: Dump, results: list[Result]) -> list[Result]:
    """Add to why a step was compared over parts the line that makes it so, unless a finding says it of the loss."""
    if any(finding.tensor == "loss" and finding.line for finding in findings_in(results)):
        return results
    return [
        replace(result, why=result.why + line_of_own_rows(dump))
        if isinstance(result, NotChecked) and NO_MEAN in result.why
        else result
        for result in results
    ]


def _without_rates(results: list[Result]) -> list[Result]:
    """Drop notes on different learning rates if a finding about a weight's step covers them."""
    causes = [finding.explanation for finding in findings_in(results)]
    if not any(isinstance(cause, AnotherLearningRate | RepeatedStep) for cause in causes):
        return results
    return [result for result in results if isinstance(result, Finding) or not result.why.startswith(RATE_OF_GROUP)]


def _report(dump: Dump, laid_out: LaidOut, results: list[Result]) -> Report:
    """Sort findings, worst first, and add notes on tensors that could not be placed."""
    order = {name: index for index, name in enumerate(dump.stamps)}
    findings = findings_in(results)
    findings.sort(key=lambda finding: (finding.severity != "error", _place(finding.tensor, order), finding.kind))
    unchecked = {result for result in results if isinstance(result, NotChecked)}
    if dump.files.planned is None:
        wrong = {finding.tensor for finding in findings if is_of_places(finding)}
        unchecked |= set(check_unplaced(dump, wrong | {result.tensor for result in unchecked}))
        unchecked |= set(check_missing_ranks(dump, {result.tensor for result in unchecked}))
    return Report(
        num_ranks=dump.files.run.num_ranks,
        num_tensors=num_of_model(dump),
        findings=tuple(grouped(findings, ranks_by_name(dump) if findings else {})),
        not_checked=tuple(sorted(unchecked, key=lambda result: (_place(result.tensor, order), result.why))),
        laid_out=laid_out,
        ties=dump.ties if findings else {},
    )


def _check_shards(laid_out: LaidOut) -> list[Result]:
    """Return findings from ids and initial values, without consequences of other findings."""
    dump = laid_out.dump
    ordered = list(check_sequence(laid_out))
    stamped = [result for tensor in dump.at("stamped") for result in _check_stamped(laid_out, tensor)]
    certain = [*check_fragments(dump), *check_unwritten(dump)]
    placed = [*ordered, *certain, *unhidden(stamped, [*ordered, *certain])]
    of_ids: list[Result] = [*check_gathered(dump, placed)]
    of_values: list[Result] = [*check_copies(dump), *check_identical_shards(dump)]
    of_ids = unhidden(of_ids, of_values)
    return of_masters(dump, [*of_ids, *unhidden(of_values, of_ids)])


def _check_run(dump: Dump) -> Iterator[Result]:
    """Yield what concerns the run as a whole, or a tensor's record rather than its content."""
    yield from check_completeness(dump)
    yield from check_rank_order(dump)
    for tensor in (*dump.at("stamped"), *dump.at("initial")):
        names = [name for name in tensor.names if tensor.moment == "stamped" or name not in dump.stamped]
        yield from (replace(finding, tensor=name) for finding in check_dtype(tensor) for name in names)
    yield from check_ties(dump)
    yield from check_writes(dump)
    yield from check_replaced(dump)
    yield from unmatched(dump, of_states(dump))
    reasons = ((rank, pair) for rank, record in dump.files.ranks.items() for pair in dict.fromkeys(record.not_checked))
    num_ranks = dump.files.run.num_ranks
    for (name, why), ranks in ranks_by(reasons).items():
        where = "" if len(ranks) == num_ranks else f" (on {len(ranks):,} of {num_ranks:,} ranks)"
        yield NotChecked(name, why + where, _about(dump, name, ranks))


def _check_step(laid_out: LaidOut, weights: list[Finding], told_right: dict[Place, bool]) -> Iterator[Result]:
    """Yield the findings of a step and its update, and the gradients that cannot show anything."""
    dump = laid_out.dump
    outcomes = with_suspects(check_step(dump, weights, told_right), laid_out, weights)
    wrong = findings_in(outcomes)
    yield from outcomes
    yield from check_states(dump)
    if not any(finding.severity == "error" for finding in weights):
        after = list(check_update(dump, wrong))
        if not wrong:
            after += check_unsharded_update(dump, frozenset(result.tensor for result in after), told_right)
        yield from without_consequences_of_update(after)
        yield from check_zero_gradients(dump, wrong)


def _about(dump: Dump, name: str, ranks: list[int]) -> About:
    """Return what a rank's missing check is about; not the order, if ids were written anyway."""
    if not name:
        return "run"
    if any(name in dump.files.ranks[rank].without_ids for rank in ranks):
        return "no-ids"
    stamped = dump.stamped.get(name)
    return "gathering" if stamped is not None and all(rank in stamped.shards for rank in ranks) else "order"


def _place(name: str, order: dict[str, int]) -> tuple[object, ...]:
    """Sort findings: those of the whole run first, then in the model's order, then by name."""
    return bool(name), order.get(name, len(order)), natural_key(name)


def _check_stamped(laid_out: LaidOut, tensor: Tensor) -> Iterator[Result]:
    """Check a tensor, or a fold once for all names with the same ids and expectations."""
    dump = laid_out.dump
    as_claimed = is_as_claimed(dump, tensor)
    dense = any(shard.body.dense for shard in tensor.shards.values())
    by_intention = in_groups((intended_text(dump.files.run.intended, name), name) for name in tensor.names)
    for text, names in by_intention.items():
        if as_claimed and is_intended(tensor, text):
            continue
        for alike in [[name] for name in names] if dense else [names]:
            outcomes = _check_name(laid_out, tensor, alike[0], text)
            yield from (replace(result, tensor=name) for name in alike for result in outcomes)


def _check_name(laid_out: LaidOut, tensor: Tensor, name: str, intended: str) -> list[Result]:
    """Check one name, and say with every finding what was intended."""
    try:
        of_name: list[Result] = [*check_global_shape(laid_out, tensor, name)]
        if of_name and is_padded_in_place(laid_out, tensor, name):
            return []
        intended = with_order(tensor, intended)
        order = split_order(intended)[1]
        for laid in laid_out.cases(tensor, name) if not of_name else ():
            case = laid if order is None else laid.in_order(order)
            results, expected = _with_missing_reorder(laid, _check_case(case), order), laid.claimed
            if not results and intended:
                results, expected = list(check_intent(case, intended)), wanted_layout(case, intended)
            pair = PairOfIds(laid_out, tensor, name, laid.mesh, expected if results else laid.claimed, order)
            results += check_zeros(case) if not (of_name or results) else ()
            of_name += (result.seen_in(pair) if isinstance(result, Finding) else result for result in results)
    except ShardvizError as error:
        return [NotChecked(name, error.message, "order")]
    return [_with_intention(result, intended) if isinstance(result, Finding) else result for result in of_name]


def _with_missing_reorder(case: Case, results: list[Result], order: DimOrder | None) -> list[Result]:
    """Give findings their cause if an order is expected of a tensor that is still in its own."""
    if order is None or not case.as_claimed:
        return results
    cause = OrderNotApplied(order.dim)
    return [result.because(cause) if isinstance(result, Finding) else result for result in results]


def _with_intention(finding: Finding, intended: str) -> Finding:
    """Add the expected layout to a finding, and whether it counts places in its order."""
    counted = ("places are counted in the order that is expected",) if split_order(intended)[1] is not None else ()
    return replace(finding, intended=intended, details=(*finding.details, *counted))


def _check_case(case: Case) -> list[Result]:
    """Run the families on one case, causes before what may follow from them."""
    if is_master(case.dump, case.name):
        return list(check_master(case))
    if case.as_claimed and len({shard.layout for shard in case.shards.values()}) == 1:
        return []
    if case.claimed is not None and case.claimed.partial and case.held is not case.claimed:
        axes = ", ".join(axis for axis, _ in case.claimed.partial)
        why = f"a sum over {axes} is pending, so the values that ranks hold are not ids"
        return [NotChecked(case.name, why, "order")]
    certain: list[Result] = [*check_filled(case)] or [*check_recomputed(case), *check_plain_copies(case)]
    if certain:
        return certain
    labels = list(check_label(case))
    redrawn = list(check_redrawn(case))
    if redrawn:
        return [*labels, *redrawn]
    return [*labels, *unhidden(list(check_foreign(case)) or list(check_places(case)), labels)]
