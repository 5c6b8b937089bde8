"""The findings of a step, with the first wrong module named in them, and what follows from it folded under it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.finding import Finding
from shardviz.check.step.forward.sums import check_sum_beside_a_vector
from shardviz.check.step.trace.advice import advice_on
from shardviz.check.step.trace.causes import cause_of, compared_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence

    Found = tuple[Compared, Finding]



def placed(evidence: Evidence, found: Sequence[Found]) -> list[Found]:
    """Return a step's findings with the first wrong module named in them."""
    first = evidence.divergence if found else None
    if first is None:
        return list(found)
    if first.direction == "forward":
        return [(one, _of_output(evidence, first, finding)) if one.role == "output" else (one, finding) for one, finding in found]
    return _of_gradients(evidence, first, found)


def _of_output(evidence: Evidence, first: Divergence, finding: Finding) -> Finding:
    """Return the finding of a wrong output with where it begins; with why, where no rule for outputs has said so."""
    if not finding.generic:
        return finding if finding.module or finding.tensor != "output" else replace(finding, module=first.module)
    cause = _explained(evidence, first)
    if cause is None:
        own, fix = advice_on(evidence, first)
        kind = "unreduced-output" if first.way == "unsummed" else finding.kind
        return replace(finding, kind=kind, details=(*finding.details, where(first)), cause=own, fix=fix, module=first.module)
    return replace(
        finding,
        kind=cause.kind,
        details=(*finding.details, where(first), f"there {cause.summary}"),
        claimed=cause.claimed,
        held=cause.held,
        cause=cause.cause,
        fix=cause.fix,
        refs=cause.refs,
        module=first.module,
        generic=False,
    )


def _explained(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return what a rule says of the first wrong values, where they are not a sum that is pending."""
    if first.way in ("unsummed", "cut", "lost"):
        return None
    found = cause_of(evidence, evidence.calls, first)
    if found is not None:
        return found
    for one in compared_at(evidence, evidence.calls, first):
        reason = check_sum_beside_a_vector(evidence, one) if one.wrong and not one.incomparable else None
        if reason is not None:
            return reason.of(Finding("wrong-value", "error", one.name, one.wrong, f"it is not {one.whose}"))
    return None


def where(first: Divergence) -> str:
    """Say where a step first goes wrong."""
    name = first.module or "the model itself"
    if first.direction == "forward":
        if first.way == "unsummed":
            return f"{name} returns the terms of a sum over {first.axis}, and {first.before} reads them as they are"
        if first.way == "between":
            after = f" after {first.after}" if first.after else ""
            return f"{name} is the first module that is wrong: its inputs are right, what it gives {first.before}{after} is not"
        return f"{name} is the first module whose inputs are the unsharded model's and whose output is not"
    return _in_backward(first, name)


def _in_backward(first: Divergence, name: str) -> str:
    if first.way == "unsummed":
        return f"the gradient that {name} gives back is the terms of a sum over {first.axis}, which nothing sums"
    if first.way == "cut":
        through = f" through {first.before}" if first.before else ""
        return f"in backward {name} is the first module that is wrong: nothing flows back{through}"
    if first.way == "lost":
        return f"in backward {name} is the first module that is wrong: no gradient comes back to what {first.before} returns"
    if first.way == "between":
        return f"in backward the gradient of what {name} returns is the first that is wrong: it is so when it arrives"
    return (
        f"in backward {name} is the first module that is wrong: the gradient of its output is the unsharded model's, "
        "that of its input is not"
    )


def _of_gradients(evidence: Evidence, first: Divergence, found: Sequence[Found]) -> list[Found]:
    """Return one finding of the first wrong module in backward, and those gradients that do not follow from it."""
    follow = [(one, finding) for one, finding in found if one.role == "grad" and _follows(evidence, first, one.name)]
    if not follow:
        return list(found)
    ids = {id(finding) for _, finding in follow}
    rest = [(one, finding) for one, finding in found if id(finding) not in ids]
    one, nearest = max(follow, key=lambda pair: _order_of(evidence, pair[0].name))
    return [*rest, (one, _folded(evidence, first, nearest, len(follow) - 1))]


def _order_of(evidence: Evidence, weight: str) -> int:
    """Return when the module that has a weight ended in forward; the nearest around it that was called."""
    name = weight
    while name:
        name = name.rpartition(".")[0]
        calls = evidence.calls.by_module.get(name)
        if calls:
            return calls[-1].order
    return 0


def _follows(evidence: Evidence, first: Divergence, weight: str) -> bool:
    """Whether a weight's gradient is computed after the first wrong module in backward: it stands before it in forward.

    A weight of the module itself also counts.
    """
    return _order_of(evidence, weight) <= first.call.order


def _folded(evidence: Evidence, first: Divergence, nearest: Finding, others: int) -> Finding:
    cause = _explained(evidence, first)
    sentence = where(first)
    also = f"so the gradient of {nearest.tensor} is wrong" + (f", and {others} others" if others else "")
    if cause is None:
        why, fix = advice_on(evidence, first)
        kind = "unreduced-gradient" if first.way == "unsummed" else "wrong-value"
        return replace(
            nearest, kind=kind, sentence=sentence, details=(also,), cause=why, fix=fix, module=first.module,
            held="", claimed="", refs=(), generic=False,
        )
    return replace(
        cause,
        tensor=nearest.tensor,
        sentence=sentence,
        details=(f"there {cause.summary}", also),
        module=first.module,
        generic=False,
    )


