"""Weights that nobody could check, or that are on no rank, if a step is wrong for no reason that a rule knows.

They are the first thing to look at: what is wrong with them shows in the output, which names the first odd module
instead. As long as the step is right, they are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.order.rules.rewritten import check_recomputed, check_zeros
from shardviz.check.report import NotChecked
from shardviz.errors import ShardvizError
from shardviz.explain.finding import Finding
from shardviz.explain.whole import UncheckedWeights
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.check.order.laid_out import LaidOut

MAX_LISTED = 3


def with_suspects(
    of_step: Iterable[Finding | NotChecked], laid_out: LaidOut, weights: Iterable[Finding]
) -> list[Finding | NotChecked]:
    """Return a step's results with the weights to look at first in those that no rule explains.

    Args:
        of_step: What was found of the step.
        laid_out: The stamped tensors.
        weights: What was found of the weights: the step of a model that lacks some shows nothing.
    """
    results = list(of_step)
    if not any(map(_is_unexplained, results)):
        return results
    absent = [one.tensor for one in weights if one.kind == "incomplete" and one.tensor and not one.ranks]
    if absent:
        why = f"the step: its numbers come from a model without {listed(absent, MAX_LISTED)}"
        kept = [one for one in results if one.tensor and not _is_unexplained(one)]
        return [*kept, NotChecked("", why, "step")]
    suspects = list(_suspects(laid_out))
    return [_blamed(one, suspects) if suspects and _is_unexplained(one) else one for one in results]


def _is_unexplained(result: Finding | NotChecked) -> bool:
    return isinstance(result, Finding) and result.kind == "wrong-value" and result.generic


def _suspects(laid_out: LaidOut) -> Iterator[tuple[str, str, str]]:
    """Yield names of plain tensors whose values were not checked, each with what is odd and what to compare."""
    for tensor in laid_out.dump.at("stamped"):
        for name in tensor.names if tensor.claimed is None else ():
            try:
                cases = laid_out.cases(tensor, name)
            except ShardvizError:  # it is not checked for that reason already
                continue
            if any(any(check_recomputed(case)) for case in cases):
                yield (
                    name,
                    "computed again on every rank once the model was built",
                    "numbers with the unsharded model's",
                )
            elif any(any(check_zeros(case)) for case in cases):
                yield (
                    name,
                    "zero on some ranks only",
                    "use: is it a term of a sum over ranks, or a copy to be broadcast",
                )


def _blamed(result: Finding | NotChecked, suspects: list[tuple[str, str, str]]) -> Finding | NotChecked:
    assert isinstance(result, Finding)
    return result.because(UncheckedWeights(tuple(suspects), result.explanation))
