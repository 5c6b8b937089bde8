"""Where to look for errors that no rule explains: behind the last result that is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.trace.backward import OUTPUT
from shardviz.explain.gradients import CutGraph
from shardviz.explain.losses import UnexplainedLoss, UnexplainedValue
from shardviz.explain.step import UnexplainedBackward, UnexplainedForward

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.cause import Cause


def where_to_look(evidence: Evidence, result: Compared) -> Cause:
    """Return the place of a wrong result that no rule explains, as its cause."""
    if result.role == "output" or not evidence.outputs_are_right:
        return UnexplainedForward()
    if result.role == "scalar":
        return unexplained_value(evidence, result)
    return _in_backward(evidence) if evidence.loss_is_right else _of_loss(evidence)


def unexplained_value(evidence: Evidence, result: Compared) -> UnexplainedLoss | UnexplainedValue:
    """Return what is known of a logged value that is wrong although the outputs are right."""
    return _of_loss(evidence) if result.name == "loss" else UnexplainedValue()


def _in_backward(evidence: Evidence) -> Cause:
    cut = evidence.without_gradient
    return CutGraph(cut) if cut else UnexplainedBackward(_is_of_loss(evidence))


def _is_of_loss(evidence: Evidence) -> bool:
    """Whether what comes back to the model's own output is wrong already."""
    return any(call.is_bad(OUTPUT) for call in evidence.calls.by_module.get("", ()))


def _of_loss(evidence: Evidence) -> UnexplainedLoss:
    """Return what is known of a wrong loss of right outputs; tokens in an order of their own suggest the labels'."""
    reordered = next((one.name for one in evidence.activations.by_name.values() if one.state == "reordered"), "")
    return UnexplainedLoss(reordered)
