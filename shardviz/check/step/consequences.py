"""The causes among the wrong results of a step: a wrong output makes the loss wrong, a wrong loss the gradients.

Results that are left out are counted: in the finding that they follow from, or as not checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.hiding import unhidden
from shardviz.check.report import NotChecked
from shardviz.check.step.rules.ratios.scale import ratio_to_wanted
from shardviz.explain.finding import Finding
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardviz.check.step.compared import Compared

Found = tuple["Compared", Finding]

MAX_LISTED = 4


def without_consequences(pairs: Sequence[Found]) -> Iterator[Finding | NotChecked]:
    """Yield the findings of a step that are not consequences of others among them."""
    outputs = [pair for pair in pairs if pair[0].role == "output"]
    if outputs:
        if len(outputs) < len(pairs):
            yield NotChecked("", "the step's loss and gradients: they are computed from a wrong output", "step")
        findings = [finding for _, finding in outputs]
        explained = [finding for finding in findings if not finding.generic]
        yield from explained
        yield from unhidden([finding for finding in findings if finding.generic], explained, anywhere=True)
        return
    left = _not_from_loss(pairs)
    left_out = len(pairs) - len(left)
    if left_out:
        why = f"{left_out} of the step's gradients that no rule explains: the loss is wrong, too"
        yield NotChecked("", why, "step")
    yield from _with_loss_first(left)


def without_consequences_of_update(results: Iterable[Finding | NotChecked]) -> Iterator[Finding | NotChecked]:
    """Yield what is found after the optimizer's step and follows from nothing else that is found there."""
    results = list(results)
    left = unhidden(results, [one for one in results if isinstance(one, Finding) and not one.generic], anywhere=True)
    yield from left
    left_out = [result.tensor for result in results if result not in left]
    if left_out:
        why = f"{listed(left_out, MAX_LISTED)} after the optimizer's step"
        yield NotChecked("", f"{why}: differences may follow from the findings about others", "step")


def _not_from_loss(pairs: Sequence[Found]) -> list[Found]:
    """Return the pairs without the unexplained gradients that a wrong loss accounts for."""
    loss = [finding for result, finding in pairs if result.name == "loss"]
    left = unhidden([finding for result, finding in pairs if result.role == "grad"], loss, anywhere=True)
    return [pair for pair in pairs if pair[0].role != "grad" or pair[1] in left]


def _with_loss_first(pairs: Sequence[Found]) -> Iterator[Finding]:
    """Report gradients that are off by the loss's own ratio with the loss."""
    loss = next((pair for pair in pairs if pair[0].name == "loss" and pair[1].kind == "wrong-scale"), None)
    ratio = ratio_to_wanted(loss[0], loss[0].reduced) if loss is not None else None
    grads = [(result, finding) for result, finding in pairs if ratio and result.role == "grad"]
    alike = {id(finding) for result, finding in grads if ratio_to_wanted(result, result.reduced) == ratio}
    for result, finding in pairs:
        if alike and result.name == "loss":
            gradients = "is one gradient" if len(alike) == 1 else f"are {len(alike):,} gradients"
            yield replace(finding, sentence=f"{finding.sentence}, and so {gradients}")
        elif id(finding) not in alike:
            yield finding
