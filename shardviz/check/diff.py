"""Differences between two dumps: layouts, contents, findings, meshes and torch versions.

Contents are compared whole: each dump's shards are put together by what they claim, so that two meshes can be compared.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardviz.check.order.case import LaidOut
from shardviz.check.ranks import may_have, split_by_certainty, unread_parts, unread_ranks
from shardviz.check.report import NotChecked, Report, grouped, ranks_by_name, ungrouped
from shardviz.check.run import report_on
from shardviz.check.step.departure import StepDifference
from shardviz.check.step.runs import compare_steps
from shardviz.dump.gather import NO_WEIGHTS
from shardviz.dump.tensor import Shard, values_and_places
from shardviz.errors import ShardvizError
from shardviz.explain.step.update import OptimizerOfOtherParameters
from shardviz.layout.notation import write
from shardviz.layout.region import index_of
from shardviz.text import named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.plan.alternatives import PlanSizes, Size

Aspect = Literal["presence", "shape", "dtype", "claimed", "held", "values"]
Kept = Literal["stamped", "initial"]
MOMENTS: tuple[Kept, ...] = ("stamped", "initial")
ROLES = ("param", "buffer")
KEPT = tuple((moment, role) for moment in MOMENTS for role in ROLES)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is another in the second dump.

    Attributes:
        aspect: What about it changed.
        before: What it was, in the notation or in words; empty if only hashes show that the values differ.
    """

    tensor: str
    aspect: Aspect
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Difference:
    """All that is different between two dumps.

    Attributes:
        changes: Tensor by tensor, in the first dump's order.
        sizes: Bytes of two plans, whether or not they changed.
        relaid: Layouts that two jobs claim differently, as they may if their steps are what is compared.
        gained: Findings that only the second has.
        lost: Findings that only the first has.
        not_compared: What could not be compared, and why.
        num_compared: Tensors that both have and whose layouts were compared.
        step: How their steps compare, module by module.
        unread: Ranks whose files one of them lacks or that are damaged: what they hold was not compared.
    """

    changes: tuple[Change, ...]
    gained: tuple[Finding, ...]
    lost: tuple[Finding, ...]
    not_compared: tuple[NotChecked, ...]
    num_compared: int = 0
    step: StepDifference = field(default_factory=StepDifference)
    relaid: tuple[Change, ...] = ()
    sizes: tuple[Size, ...] = ()
    unread: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.changes or self.gained or self.lost or self.step or any(size.is_changed for size in self.sizes)
        )

    @property
    def unjudged_buffers(self) -> tuple[str, ...]:
        """Buffers that two jobs' step may have written, and no rule judges, if all that was judged of it agrees."""
        return self.step.unjudged_buffers if self.step.has_update and not self else ()

    @property
    def nothing_compared(self) -> str:
        """That nothing was compared, and why, in a line; empty if something was."""
        if self or self.num_compared or self.step.num_compared:
            return ""
        reasons = [unchecked.why for unchecked in self.not_compared] or ["neither dump has a weight or a buffer"]
        return f"nothing was compared: {'; '.join(reasons)}"

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz diff --format json` prints."""
        return {
            "schema": 1,
            "changes": [asdict(change) for change in self.changes],
            "relaid": [asdict(change) for change in self.relaid],
            "gained": [finding.to_json() for finding in self.gained],
            "lost": [finding.to_json() for finding in self.lost],
            "not_compared": [asdict(unchecked) for unchecked in self.not_compared],
            "step": self.step.to_json(),
            "sizes": [asdict(size) for size in self.sizes],
        }


def compare(
    before: Dump, after: Dump, reports: tuple[Report, Report] | None = None, plans: PlanSizes | None = None
) -> Difference:
    """Compare two dumps.

    Args:
        reports: What they say, if they are checked already.
        plans: The bytes of both, if they are plans.
    """
    first, second = reports or (report_on(before), report_on(after))
    laid_out = (first.laid_out or LaidOut(before), second.laid_out or LaidOut(after))
    results = [result for moment, role in KEPT for result in _moment_changes(laid_out, moment, role)]
    step = compare_steps(before, after, (first, second))
    if (_is_trace_alone(before) or _is_trace_alone(after)) and step.is_of_jobs:
        results = []  # a trace has no layouts by itself, and the weights of both jobs were compared in it
    elif _is_trace_alone(before) or _is_trace_alone(after):
        which = "first" if _is_trace_alone(before) else "second"
        results = [NotChecked("", f"layouts: the {which} dump has a step's trace and no weights", "order")]
    elif not any(before.at(moment) and after.at(moment) for moment in MOMENTS):
        results += [result for role in ROLES for result in _layout_changes(before, after, role)]
    results = [_change_or_unread(result, before, after) if isinstance(result, Change) else result for result in results]
    changes = dict.fromkeys(result for result in results if isinstance(result, Change))
    relaid = [change for change in changes if step.is_of_jobs and _is_of_layout(change, before, after)]
    not_compared = (
        *(
            unchecked
            for unchecked in results
            if isinstance(unchecked, NotChecked)
            and not (step.is_of_jobs and unchecked.tensor and unchecked.about == "values")  # compared in the traces
        ),
        *step.not_compared,
    )
    without = [NotChecked("", plans.not_compared, "step")] if plans is not None and plans.not_compared else []
    gained, not_in_first = split_by_certainty(_only_in(second, first, after), before, "first")
    lost, not_in_second = split_by_certainty(_only_in(first, second, before), after, "second")
    gained, lost = (tuple(finding for finding in side if not _is_in_step(finding, step)) for side in (gained, lost))
    unread = (*unread_parts(before, "first"), *unread_parts(after, "second"), *not_in_first, *not_in_second)
    return Difference(
        tuple(change for change in changes if change not in relaid),
        gained,
        lost,
        tuple(dict.fromkeys((*unread, *not_compared, *without))),
        sum(len(_tensors_by_name(before, role).keys() & _tensors_by_name(after, role).keys()) for role in ROLES),
        step,
        tuple(relaid),
        plans.sizes if plans is not None else (),
        unread=tuple(sorted({*unread_ranks(before), *unread_ranks(after)})),
    )


def _is_in_step(finding: Finding, step: StepDifference) -> bool:
    """Whether the step says the same: why its first wrong module's buffer differs, or what the optimizer steps."""
    if isinstance(finding.explanation, OptimizerOfOtherParameters):
        return finding.explanation in [departure.explanation for departure in step.departures]
    module = finding.tensor.rpartition(".")[0]
    causes = [departure.explanation for departure in step.departures if departure.module == module]
    return finding.kind == "unreplicated" and not finding.others and finding.explanation in causes


def _is_trace_alone(dump: Dump) -> bool:
    """Whether a dump has the trace of a job's step and nothing else: the job is one process."""
    return not dump.tensors and any(("", NO_WEIGHTS) in record.not_checked for record in dump.files.ranks.values())


def _is_of_layout(change: Change, before: Dump, after: Dump) -> bool:
    """Whether a change follows from a different layout; a plain tensor's shape is its shard's."""
    if change.aspect != "shape":
        return change.aspect == "claimed"
    tensors = (_tensors_by_name(dump, role).get(change.tensor) for dump in (before, after) for role in ROLES)
    return any(tensor is not None and tensor.claimed is None for tensor in tensors)


def _only_in(report: Report, second_report: Report, dump: Dump) -> tuple[Finding, ...]:
    """Return the findings that only the first report has; the rest of a group is one finding."""
    keys = {(finding.kind, finding.tensor) for finding in ungrouped(second_report.findings)}
    only_here = [finding for finding in ungrouped(report.findings) if (finding.kind, finding.tensor) not in keys]
    return tuple(grouped(only_here, ranks_by_name(dump) if only_here else {}))


def _change_or_unread(change: Change, before: Dump, after: Dump) -> Change | NotChecked:
    """Return a change; not checked if ranks that were not read may have the tensor."""
    if change.aspect != "presence":
        return change
    for which, dump, counterpart in (("first", before, after), ("second", after, before)):
        for role in ROLES:
            tensor = _tensors_by_name(counterpart, role).get(change.tensor)
            is_absent = change.tensor not in _tensors_by_name(dump, role)
            if is_absent and tensor is not None and may_have(dump, counterpart, tensor):
                ranks = named_ranks(unread_ranks(dump))
                return NotChecked(change.tensor, f"the {which} dump may have it on {ranks}, not read", "run")
    return change


def _moment_changes(laid_out: tuple[LaidOut, LaidOut], moment: Kept, role: str) -> Iterator[Change | NotChecked]:
    before, after = laid_out[0].dump, laid_out[1].dump
    if bool(before.at(moment)) != bool(after.at(moment)):
        what = "where elements are" if moment == "stamped" else "the model's own values"
        yield NotChecked("", f"{what}: only the {'first' if before.at(moment) else 'second'} dump has them", "values")
        return
    first_tensors, second_tensors = before.by_name(moment, role), after.by_name(moment, role)
    for name in dict.fromkeys([*first_tensors, *second_tensors]):
        first, second = first_tensors.get(name), second_tensors.get(name)
        if first is None or second is None:
            tensors = (
                tensor or _tensors_by_name(dump, role).get(name) for tensor, dump in ((first, before), (second, after))
            )
            yield from _only_one_has(name, *tensors)
            continue
        yield from _tensor_changes(name, first, second)
        if moment == "stamped":
            was, now = held_text(laid_out[0], first, name), held_text(laid_out[1], second, name)
            if (was, now) != (_layout_text(first), _layout_text(second)):
                yield from _change(name, "held", was, now)
        elif before.files.planned is None and after.files.planned is None:
            yield from _value_changes(name, (before, first), (after, second))


def _only_one_has(name: str, first: Tensor | None, second: Tensor | None) -> Iterator[Change | NotChecked]:
    """Compare a tensor that the dumps have at different moments, or only one dump has."""
    yield from _tensor_changes(name, first, second)
    if first is not None and second is not None:
        which = "first" if first.moment == "stamped" else "second"
        yield NotChecked(name, f"where its elements are: only the {which} dump has them", "values")


def _tensors_by_name(dump: Dump, role: str) -> dict[str, Tensor]:
    """Return the tensors of a role by name, from whichever moment the dump has them."""
    return {name: tensor for moment in MOMENTS for name, tensor in dump.by_name(moment, role).items()}


def _layout_changes(before: Dump, after: Dump, role: str) -> Iterator[Change]:
    """Yield layout changes if only one dump has ids, whose dtypes may differ."""
    firsts, seconds = _tensors_by_name(before, role), _tensors_by_name(after, role)
    for name in dict.fromkeys([*firsts, *seconds]):
        changes = _tensor_changes(name, firsts.get(name), seconds.get(name))
        yield from (change for change in changes if change.aspect != "dtype")


def _dtype_and_shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def _change(name: str, aspect: Aspect, before: str, after: str) -> Iterator[Change]:
    if before != after:
        yield Change(name, aspect, before, after)


def _tensor_changes(name: str, before: Tensor | None, after: Tensor | None) -> Iterator[Change]:
    """Yield that only one dump has a tensor, or in what the two differ."""
    if before is None or after is None:
        yield Change(name, "presence", _dtype_and_shape(before), _dtype_and_shape(after))
        return
    yield from _change(name, "shape", str(list(before.shape)), str(list(after.shape)))
    yield from _change(name, "dtype", before.dtype, after.dtype)
    yield from _change(name, "claimed", _layout_text(before), _layout_text(after))


def _layout_text(tensor: Tensor) -> str:
    return write(tensor.claimed) + f" on {tensor.claimed.mesh}" if tensor.claimed else "plain"


def held_text(laid_out: LaidOut, tensor: Tensor, name: str) -> str:
    """Return what ranks hold of a stamped tensor, in the notation if it has a form for it."""
    try:
        cases = laid_out.cases(tensor, name)
    except ShardvizError as error:
        return f"not known: {error.message}"
    return "; ".join(
        f"{write(case.held)} on {case.mesh}" if case.held else "no layout that the notation can express"
        for case in cases
    )


def _value_changes(name: str, first: tuple[Dump, Tensor], second: tuple[Dump, Tensor]) -> Iterator[Change | NotChecked]:
    unread = {*unread_ranks(first[0]), *unread_ranks(second[0])}
    if _same_digests(name, first[1], second[1], unread):
        return
    try:
        (was, is_known), (now, known_now) = values_and_places(*first, name), values_and_places(*second, name)
    except ShardvizError as error:
        if (outcome := _compared_by_hash(name, first[1], second[1], error)) is not None:
            yield outcome
        return
    if was.shape != now.shape:
        return
    known_in_both = is_known & known_now
    if not (unread or known_in_both.all()):
        count = f"{int((~known_in_both).sum()):,} of {known_in_both.size:,} elements"
        yield NotChecked(name, f"{count}: no rank of one of the dumps has them", "values")
    different = known_in_both & ~((was == now) | (np.isnan(was) & np.isnan(now)))
    if not different.any():
        return
    index = index_of(int(np.argmax(different)), different.shape)
    count = f"{int(different.sum()):,} of {int(known_in_both.sum()):,} elements differ, the first at {index}"
    yield Change(name, "values", f"{was[tuple(index)]:.6g}", f"{now[tuple(index)]:.6g} ({count})")


def _same_digests(name: str, before: Tensor, after: Tensor, unread: Collection[int]) -> bool:
    """Whether all ranks hold the same bytes, except those that were not read in one of the dumps."""
    first, second = _digests(name, before), _digests(name, after)
    ranks = {*first, *second}.difference(unread)
    return bool(ranks) and all(first.get(rank) and first.get(rank) == second.get(rank) for rank in ranks)


def _digests(name: str, tensor: Tensor) -> dict[int, str]:
    index = tensor.index(name)
    return {rank: shard.digest(index) for rank, shard in tensor.shards.items()}


def _form(shard: Shard) -> tuple[Layout | None, str, tuple[int, ...]]:
    return shard.layout, shard.body.dtype, shard.body.local_shape


def _compared_by_hash(name: str, before: Tensor, after: Tensor, error: ShardvizError) -> Change | NotChecked | None:
    """Compare the shards of a tensor whose hashes differ and whose values a dump lacks."""
    first, second = _digests(name, before), _digests(name, after)
    in_both = sorted(first.keys() & second.keys())
    is_hashed = all(first.values()) and all(second.values())
    if not is_hashed or any(_form(before.shards[rank]) != _form(after.shards[rank]) for rank in in_both):
        why = error.message.removeprefix(f"{printable(name)}: ")
        return NotChecked(name, f"its values can't be compared: {why}", "values")
    different = [rank for rank in in_both if first[rank] != second[rank]]
    if not different:  # ranks that one dump lacks have copies, or their parts are not compared
        is_alike = len({*first.values(), *second.values()}) == 1
        why = "its values can't be compared: the dumps have it on different ranks, and its parts aren't copies"
        return None if is_alike else NotChecked(name, why, "values")
    return Change(name, "values", "", f"different values on {named_ranks(different)}, as their hashes show")
