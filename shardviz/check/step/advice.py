"""Where to look for errors that no rule explains: behind the last result that is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.text import listed

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence

UNEXPLAINED = "The sharded step does not compute what the unsharded model does"
MAX_LISTED = 3

Advice = tuple[str, str]
"""A cause and a fix."""


def where_to_look(evidence: Evidence, one: Compared) -> Advice:
    """Return where to look for the cause of a wrong result that no rule explains."""
    if one.role == "output" or not evidence.outputs_are_right:
        return UNEXPLAINED, _in_forward(evidence)
    if one.role == "scalar":
        return _of_loss(evidence) if one.name == "loss" else _SCALAR
    return _in_backward(evidence) if evidence.loss_is_right else _of_loss(evidence)


def _in_forward(evidence: Evidence) -> str:
    name, (summed, axis) = evidence.first_odd_module, evidence.pending_before
    if summed:
        return (
            f"all_reduce the output of {summed} over {axis} before {name} reads it: its sum over {axis} is the "
            f"unsharded model's, and {name} is the first module whose output is not"
        )
    if name:
        return (
            f"look at {name} first, and at what it is given: it is the first module whose output no split over the "
            "mesh makes a part of the unsharded model's, nor a sum over an axis"
        )
    return "compare the outputs module by module, first to last, and look at the first that differs"


def _in_backward(evidence: Evidence) -> Advice:
    cut = evidence.without_gradient
    if cut:
        return (
            f"{UNEXPLAINED} in backward, although the outputs and the loss are right: nothing flows back to "
            f"{listed(cut, MAX_LISTED)} (.grad is None)",
            f"look for what cuts the graph after {cut[0]}: a collective of torch.distributed, which has no backward "
            "(torch.distributed.nn.functional's have), .detach() or .data",
        )
    return (
        f"{UNEXPLAINED} in backward, although the outputs and the loss are right",
        "look for a collective without a backward, or with one that does not match its forward, and for a term of the "
        "loss that the step scales differently: an auxiliary loss",
    )


def _of_loss(evidence: Evidence) -> Advice:
    """Return where to look for a wrong loss of right outputs; tokens in an order of their own suggest the labels'."""
    cause, fix = _LOSS
    reordered = next((one.name for one in evidence.activations.by_name.values() if one.state == "reordered"), "")
    if not reordered:
        return _LOSS
    return (
        f"{cause}; or labels in another order than the tokens, which {reordered} has in an order of their own",
        f"cut and order the labels with the same positions as the tokens; {fix}",
    )


_LOSS = (
    f"{UNEXPLAINED}, although the outputs are right: a mean of means where ranks or micro-batches count unequal "
    "numbers of tokens or rows, or labels or masks that were shifted or padded after they were cut",
    "divide each sum by the number of tokens of all ranks, all_reduced, or of all micro-batches; shift labels before "
    "they are cut",
)
_SCALAR = (
    f"{UNEXPLAINED}, although the outputs are right",
    "look at the parts it is computed from: each counts once, over the axes that split it and no others",
)
