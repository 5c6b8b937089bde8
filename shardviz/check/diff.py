"""What changed between two dumps: layouts, contents, findings; another torch, another mesh, a checkpoint loaded.

Contents are compared whole: each dump's shards are put together by what they claim, so that two meshes can be compared.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardviz.check.grouping import grouped, ranks_by_name, ungrouped
from shardviz.check.order.laid_out import LaidOut
from shardviz.check.report import NotChecked
from shardviz.check.run import report_on
from shardviz.check.step.runs.compare import compare_steps
from shardviz.check.step.runs.departure import StepDifference
from shardviz.check.unread import may_have, told, unread_parts, unread_ranks
from shardviz.dump.traced import NO_WEIGHTS
from shardviz.dump.whole import values_and_places
from shardviz.errors import ShardvizError
from shardviz.layout.notation import write
from shardviz.layout.region import index_of
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardviz.check.report import Report
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.plan.beside import Size, Sizes

Aspect = Literal["presence", "shape", "dtype", "claimed", "held", "values"]
Kept = Literal["stamped", "initial"]
MOMENTS: tuple[Kept, ...] = ("stamped", "initial")
ROLES = ("param", "buffer")
KEPT = tuple((moment, role) for moment in MOMENTS for role in ROLES)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is another in the second dump.

    Attributes:
        tensor: The tensor's name.
        aspect: What about it changed.
        before: What it was, in the notation or in words.
        after: What it is.
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
        relaid: Layouts that two jobs claim differently, as they may where their steps are what is compared.
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
    def nothing_compared(self) -> str:
        """That nothing was compared, and why, in a line; empty where something was."""
        if self or self.num_compared or self.step.num_compared:
            return ""
        reasons = [one.why for one in self.not_compared] or ["neither dump has a weight or a buffer"]
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
    before: Dump, after: Dump, reports: tuple[Report, Report] | None = None, plans: Sizes | None = None
) -> Difference:
    """Compare two dumps.

    Args:
        before: The one to compare with.
        after: The one that may have changed.
        reports: What they say, if they are checked already.
        plans: The bytes of both, if they are plans.
    """
    one, other = reports or (report_on(before), report_on(after))
    laid_out = (one.laid_out or LaidOut(before), other.laid_out or LaidOut(after))
    results = [result for moment, role in KEPT for result in _moment_changes(laid_out, moment, role)]
    step = compare_steps(before, after, (one, other))
    if _is_trace_alone(before) or _is_trace_alone(after):
        which = "first" if _is_trace_alone(before) else "second"
        results = [NotChecked("", f"layouts: the {which} dump has a step's trace and no weights", "order")]
    elif not any(before.at(moment) and after.at(moment) for moment in MOMENTS):
        results += [result for role in ROLES for result in _layout_changes(before, after, role)]
    results = [_unless_unread(one, before, after) if isinstance(one, Change) else one for one in results]
    changes = dict.fromkeys(result for result in results if isinstance(result, Change))
    relaid = [change for change in changes if step.is_of_jobs and _is_of_layout(change, before, after)]
    left = [result for result in results if isinstance(result, NotChecked)]
    not_compared = (*(one for one in left if not (_is_of_values(one) and step.is_of_jobs)), *step.not_compared)
    without = [NotChecked("", plans.not_compared, "step")] if plans is not None and plans.not_compared else []
    gained, not_in_first = told(_only_in(other, one, after), before, "first")
    lost, not_in_second = told(_only_in(one, other, before), after, "second")
    unread = (*unread_parts(before, "first"), *unread_parts(after, "second"), *not_in_first, *not_in_second)
    return Difference(
        tuple(change for change in changes if change not in relaid),
        gained,
        lost,
        tuple(dict.fromkeys((*unread, *not_compared, *without))),
        sum(len(_kept(before, role).keys() & _kept(after, role).keys()) for role in ROLES),
        step,
        tuple(relaid),
        plans.sizes if plans is not None else (),
        unread=tuple(sorted({*unread_ranks(before), *unread_ranks(after)})),
    )


def _is_trace_alone(dump: Dump) -> bool:
    """Whether a dump has the trace of a job's step and nothing else: the job is one process."""
    return not dump.tensors and any(("", NO_WEIGHTS) in record.not_checked for record in dump.files.ranks.values())


def _is_of_layout(change: Change, before: Dump, after: Dump) -> bool:
    """Whether a change follows from another layout; a tensor that was cut by hand has the shape of one rank's part."""
    if change.aspect != "shape":
        return change.aspect == "claimed"
    both = (_kept(dump, role).get(change.tensor) for dump in (before, after) for role in ROLES)
    return any(one is not None and one.claimed is None for one in both)


def _is_of_values(one: NotChecked) -> bool:
    """Whether a tensor's values could not be compared; where two jobs' steps are, their traces compare the values."""
    return bool(one.tensor) and one.about == "values"


def _only_in(report: Report, other: Report, dump: Dump) -> tuple[Finding, ...]:
    """Return the findings of tensors that do not have them in the other report; what is left of a group is one."""
    known = {(finding.kind, finding.tensor) for finding in ungrouped(other.findings)}
    left = [one for one in ungrouped(report.findings) if (one.kind, one.tensor) not in known]
    return tuple(grouped(left, ranks_by_name(dump) if left else {}))


def _unless_unread(change: Change, before: Dump, after: Dump) -> Change | NotChecked:
    """Return a change; that it is none for certain where ranks that were not read may have the tensor."""
    if change.aspect != "presence":
        return change
    dumps = (("first", before, after), ("second", after, before))
    for which, dump, other in dumps:
        own, theirs = ([_kept(one, role).get(change.tensor) for role in ROLES] for one in (dump, other))
        for has, tensor in zip(own, theirs, strict=True):
            if has is None and tensor is not None and may_have(dump, other, tensor):
                ranks = named_ranks(unread_ranks(dump))
                return NotChecked(change.tensor, f"the {which} dump may have it on {ranks}, not read", "run")
    return change


def _moment_changes(laid_out: tuple[LaidOut, LaidOut], moment: Kept, role: str) -> Iterator[Change | NotChecked]:
    before, after = laid_out[0].dump, laid_out[1].dump
    if bool(before.at(moment)) != bool(after.at(moment)):
        what = "where elements are" if moment == "stamped" else "the model's own values"
        yield NotChecked("", f"{what}: only the {'first' if before.at(moment) else 'second'} dump has them", "values")
        return
    ours, theirs = before.by_name(moment, role), after.by_name(moment, role)
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            yield from _only_one_has(name, one or _kept(before, role).get(name), other or _kept(after, role).get(name))
            continue
        yield from _tensor_changes(name, one, other)
        if moment == "stamped":
            was, now = held_text(laid_out[0], one, name), held_text(laid_out[1], other, name)
            if (was, now) != (_claimed(one), _claimed(other)):
                yield from _change(name, "held", was, now)
        elif before.files.planned is None and after.files.planned is None:
            yield from _value_changes(name, (before, one), (after, other))


def _only_one_has(name: str, one: Tensor | None, other: Tensor | None) -> Iterator[Change | NotChecked]:
    """Yield how a tensor compares that one dump has at a moment, and the other at another or not at all."""
    if one is None or other is None:
        yield Change(name, "presence", _present(one), _present(other))
        return
    yield from _tensor_changes(name, one, other)
    which = "first" if one.moment == "stamped" else "second"
    yield NotChecked(name, f"where its elements are: only the {which} dump has them", "values")


def _kept(dump: Dump, role: str) -> dict[str, Tensor]:
    """Return the tensors of a role by name, from whichever moment the dump has them."""
    return {name: tensor for moment in MOMENTS for name, tensor in dump.by_name(moment, role).items()}


def _layout_changes(before: Dump, after: Dump, role: str) -> Iterator[Change]:
    """Yield what differs in the layouts alone: only one dump has ids, which may have another dtype."""
    ours, theirs = _kept(before, role), _kept(after, role)
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            yield Change(name, "presence", _present(one), _present(other))
            continue
        yield from _change(name, "shape", str(list(one.shape)), str(list(other.shape)))
        yield from _change(name, "claimed", _claimed(one), _claimed(other))


def _present(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def _change(name: str, aspect: Aspect, before: str, after: str) -> Iterator[Change]:
    if before != after:
        yield Change(name, aspect, before, after)


def _tensor_changes(name: str, one: Tensor, other: Tensor) -> Iterator[Change]:
    yield from _change(name, "shape", str(list(one.shape)), str(list(other.shape)))
    yield from _change(name, "dtype", one.dtype, other.dtype)
    yield from _change(name, "claimed", _claimed(one), _claimed(other))


def _claimed(tensor: Tensor) -> str:
    return write(tensor.claimed) + f" on {tensor.claimed.mesh}" if tensor.claimed else "plain"


def held_text(laid_out: LaidOut, tensor: Tensor, name: str) -> str:
    """Return what ranks hold of a stamped tensor, in the notation where it has a form for it."""
    try:
        cases = laid_out.cases(tensor, name)
    except ShardvizError as error:
        return f"not known: {error.message}"
    return "; ".join(
        f"{write(case.held)} on {case.mesh}" if case.held else "no layout that the notation can express"
        for case in cases
    )


def _value_changes(name: str, ours: tuple[Dump, Tensor], theirs: tuple[Dump, Tensor]) -> Iterator[Change | NotChecked]:
    unread = {*unread_ranks(ours[0]), *unread_ranks(theirs[0])}
    if _same_digests(name, ours[1], theirs[1], unread):
        return
    try:
        (one, in_one), (other, in_other) = values_and_places(*ours, name), values_and_places(*theirs, name)
    except ShardvizError as error:
        why = f"its values differ or are laid out differently, and cannot be compared as a whole: {error.message}"
        yield NotChecked(name, why, "values")
        return
    if one.shape != other.shape:
        return
    both = in_one & in_other
    if not (unread or both.all()):
        count = f"{int((~both).sum()):,} of {both.size:,} elements"
        yield NotChecked(name, f"{count}: no rank of one of the dumps has them", "values")
    different = both & ~((one == other) | (np.isnan(one) & np.isnan(other)))
    if not different.any():
        return
    index = index_of(int(np.argmax(different)), different.shape)
    count = f"{int(different.sum()):,} of {int(both.sum()):,} elements differ, the first at {index}"
    yield Change(name, "values", f"{one[tuple(index)]:.6g}", f"{other[tuple(index)]:.6g} ({count})")


def _same_digests(name: str, one: Tensor, other: Tensor, unread: Collection[int]) -> bool:
    """Whether all ranks hold the same bytes, those apart that were not read in one of the dumps."""

    def digests(tensor: Tensor) -> dict[int, str]:
        index = tensor.index(name)
        return {rank: shard.digest(index) for rank, shard in tensor.shards.items() if rank not in unread}

    ours = digests(one)
    return bool(ours) and all(ours.values()) and ours == digests(other)
