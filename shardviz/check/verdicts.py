"""Which tensors are listed, with what verdict: the same in text, pages and the viewer.

`terminal.Glyphs` has the glyphs of the verdicts.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Literal

from shardviz.check.order.rules.intent import is_compared
from shardviz.check.report import Place, Report
from shardviz.check.step.comparison import Compared, compared, is_of_parts
from shardviz.dump.gather import NO_WEIGHTS
from shardviz.dump.records.base import WEIGHTS, Role
from shardviz.dump.records.files import MEANT
from shardviz.dump.records.trace import COMPARED_OVER_PARTS
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding

Verdict = Literal["error", "warning", "unknown", "good", "pending"]

WORDS: dict[Verdict, str] = {
    "error": "finding",
    "warning": "warning",
    "unknown": "not checked",
    "good": "in order",
    "pending": "checking",
}
"""The name of each verdict, the worst first."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict; "good" if there is none."""
    return min(verdicts, key=list(WORDS).index, default="good")


State = Literal["finding", "not checked", "cannot tell", "held"]
"""What became of a tensor at one moment. `cannot tell`: it is off, and what it follows from has the finding, or it is
so small that rounding could make it."""


def state_of(dump: Dump, tensor: Tensor, name: str, report: Report) -> State:
    """Return what a report says of one name of a tensor: exactly one of the four."""
    if name in report.findings_of:
        return "finding"
    if dump.files.planned is not None or name in report.why_not_checked:
        return "not checked"
    if tensor.moment in ("stamped", "initial") and is_of_model(tensor):
        return "held"  # else `check_unplaced` would say so
    right = report.compared.get(Place(tensor.moment, tensor.role, name))
    return "not checked" if right is None else "held" if right else "cannot tell"


def recorded(dump: Dump) -> Iterator[tuple[Tensor, str]]:
    """Yield a run's tensors at each moment, with each name; without the unsharded model's."""
    run_tensors = (tensor for tensor in dump.tensors if tensor.moment not in ("reference", "updated"))
    yield from ((tensor, name) for tensor in run_tensors for name in tensor.names)


def verdict_on(dump: Dump, tensor: Tensor, names: Iterable[str], report: Report) -> Verdict:
    """Return the worst that a report says of a tensor, or of some names of a fold.

    Without a finding it is "not checked" unless something that it should be compared was compared.
    """
    name_list = list(names)
    verdicts: list[Verdict] = [finding.severity for name in name_list for finding in report.findings_of.get(name, ())]
    if any(state_of(dump, tensor, name, report) in ("not checked", "cannot tell") for name in name_list):
        verdicts.append("unknown")
    return worst(verdicts)


RESULTS: Mapping[Role, str] = {"grad": "its gradient", "param": "its next value", "optim": "its optimizer state"}
"""What a step makes of a weight."""


def wrong_result(tensor: Tensor, names: Iterable[str], report: Report | None) -> str:
    """Name what is wrong of a weight if its values and places are in order, as `its gradient`; else return nothing."""
    if report is None or tensor.role not in WEIGHTS or tensor.moment not in ("stamped", "initial"):
        return ""
    findings = [finding for name in names for finding in report.findings_of.get(name, ())]
    results = [_results_of(finding) for finding in findings]
    return " and ".join(dict.fromkeys(chain(*results))) if all(results) else ""


def _results_of(finding: Finding) -> list[str]:
    """Return which results of a step a finding is about; none if it is about anything else."""
    if finding.kind == "unreduced-gradient":
        return [RESULTS["grad"]]
    sides = [getattr(pair, "comparison", pair) for pair in finding.pairs]
    roles = [result.role if isinstance(result, Compared) else "output" for result in sides]
    return [RESULTS[role] for role in roles] if all(role in RESULTS for role in roles) else []


def captured(dump: Dump) -> list[Tensor]:
    """Return each tensor of a run once: as it was stamped, or as it was captured first.

    The unsharded model's tensors, which rank 0 writes to compare with, are not part of the run.
    """
    stamped = {(name, tensor.role) for name, tensor in dump.stamped.items()}
    return [
        tensor
        for tensor in dump.tensors
        if tensor.moment == "stamped"
        or (tensor.moment not in ("reference", "updated", "training") and (tensor.names[0], tensor.role) not in stamped)
    ]


def is_listed(dump: Dump, tensor: Tensor, names: Iterable[str], report: Report | None) -> bool:
    """Whether a tensor is listed by default: all of a model, and a step's reported results.

    A gradient, an optimizer state and an output for every layer would bury the rest. Where neither ids nor the model's
    own values were captured, everything is listed.
    """
    is_state = tensor.role == "optim" and tensor.moment == "initial"
    if (tensor.moment in ("stamped", "initial") and not is_state) or not (dump.at("stamped") or dump.at("initial")):
        return True
    return report is not None and any(name in report.findings_of or name in report.why_not_checked for name in names)


def is_of_model(tensor: Tensor) -> bool:
    """Whether a tensor is the model's or a master copy, and so is counted and has a verdict."""
    return tensor.role in WEIGHTS or (tensor.role == "optim" and tensor.moment == "stamped")


def num_of_model(dump: Dump) -> int:
    """Return how many tensors a report counts: those of the model, each once."""
    return len({name for tensor in dump.tensors if is_of_model(tensor) for name in tensor.names})


def not_compared(dump: Dump) -> list[str]:
    """Say which parts of a training run were not compared, which is no reason to fail.

    Without an unsharded step, that is the whole step. With one, activations only serve to find where a wrong
    output begins, and what the optimizer keeps is compared if the unsharded model has been stepped too. A plan has
    no values to compare.
    """
    if dump.files.planned is not None:
        return []
    if not dump.at("reference"):
        return ["a training step"]
    whole = [COMPARED_OVER_PARTS] if is_of_parts(dump) else []
    return [*whole, "activations", *([] if dump.at("updated") else ["optimizer state"])]


def nothing_checked(dump: Dump, report: Report) -> str:
    """Say in a line that no tensor of a dump could be checked, and why; empty if some were."""
    if report.findings:
        return ""
    if not dump.tensors and any(NO_WEIGHTS in entry.why for entry in report.not_checked):
        step = "the dump has only a traced step; compare it with a second job's"
        return f"nothing was checked: {step}: shardviz diff {dump.files.path} OTHER"
    if not dump.tensors:
        return "nothing was checked: the dump has no tensors"
    if dump.files.planned is not None and is_compared(dump):
        return ""
    weights = [tensor for tensor in dump.tensors if is_of_model(tensor) and tensor.moment in ("stamped", "initial")]
    names = {name for tensor in weights for name in tensor.names if verdict_on(dump, tensor, [name], report) == "good"}
    names |= {result.tensor for result in report.not_checked if result.why.startswith(MEANT)}
    unchecked = {result.tensor for result in report.not_checked if result.about in ("order", "no-ids")}
    if names - unchecked or next(compared(dump), None) is not None:
        return ""
    pairs = {(result.tensor, result.why) for result in report.not_checked if result.about in ("order", "no-ids")}
    reasons = Counter(why for _, why in pairs).most_common()
    of = f"; of {reasons[0][1]:,} of them" if len(reasons) > 1 else ""
    why = f"{of}: {reasons[0][0]}" if reasons else ""
    return f"nothing was checked in {counted(report.num_tensors, 'tensor')}{why}"
