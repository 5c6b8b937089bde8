"""Causes in one line of the user's code, the first at which gradients go wrong in backward."""

from __future__ import annotations

from shardviz.explain.cause import AtLine, Cause
from shardviz.explain.step.lines import WRONG


class UnsummedLineBackward(Cause, kind="unreduced-gradient"):
    """Nothing sums a gradient that each rank computes for its own part only.

    A different line uses the same tensor whole, as a residual does, or the backward of a branch beside it sums. Both
    send back a whole gradient. The tensor then gets neither the whole gradient nor a term of it, and a sum of the
    weights' gradients after backward doesn't repair that.

    Attributes:
        place: The line, as `moe.py:83`.
        axis: The axis of the missing sum.
    """

    place: str
    axis: str
    why = (
        "{place} sends back each rank's own part of a gradient. Nothing sums the parts over {axis} before a different "
        "use adds its whole gradient, as a residual does, or a branch whose backward sums"
    )
    how = (
        "sum the gradient over {axis} at the input of {place}: a torch.autograd.Function that returns its input in "
        "forward and all_reduces in backward (ColwiseParallel)"
    )


class WholeGradientSummedAgain(Cause):
    """A backward sums over ranks a gradient that every rank already has whole.

    A tensor that each rank uses for its own part gets a function whose backward sums the ranks' gradients. A layer
    that every rank computes in full, such as a shared expert, sends back its whole gradient on every rank. If it
    reads the same tensor, the sum counts its gradient once for each rank. Losses and the layer's own weights stay
    right.

    Attributes:
        place: The line whose backward sums, as `moe.py:83`.
        reader: The line that hands back the whole gradient.
        axis: The axis of the sum.
        times: The ranks along it.
    """

    place: str
    reader: str
    axis: str
    times: int
    kinds = WRONG
    why = (
        "Every rank computes {reader} in full and sends back its whole gradient. The backward of {place} sums it over "
        "{axis}, so it counts {times} times"
    )
    how = (
        "in {reader}, read the tensor from before {place}, whose backward is only for values that ranks use differently"
    )


class WrongLineBackward(AtLine):
    """A line's forward is right, and its backward returns a wrong gradient.

    An operation in the line has no backward, or one that does not match its forward. Parts and terms that ranks use
    differently need a sum in backward; terms of one sum need none.

    Attributes:
        axis: The axis of a sum that is missing in backward; empty if it is something else.
        part: Which of its results lacks the sum, as `result[1]`, if its gradient joins those of other parts there.
    """

    axis: str = ""
    part: str = ""
    kinds = WRONG
    why = (
        "{part:?Each rank along {axis} uses {part} of {function} in {place} for its own part, and nothing sums its "
        "gradient over {axis} before it joins the whole gradients of other parts|{axis:?Each rank along {axis} uses "
        "the result of {place} differently, and nothing sums the result's gradient over {axis}|The backward of "
        "{function} in {place} doesn't match its forward}}"
    )
    how = (
        "{part:?sum the gradient of {part} over {axis}, and no other: pass it through a torch.autograd.Function that "
        "returns its input in forward and all_reduces in backward|{axis:?all_reduce the gradient over {axis} in the "
        "backward of {place}|check {place}: a tensor that all ranks have and each uses for its own part needs a sum in "
        "backward; terms of a sum need none}}"
    )


class UnreducedGather(Cause):
    """A gather's backward keeps a rank's part of its own gradient, and drops what others send.

    All ranks get the gathered tensor, and each uses it for its own rows: its gradient is a term of a sum on every rank.
    A gather's backward is a reduce-scatter. `full_tensor()` and `to_local()` take each rank's gradient for the whole
    unless `grad_placements` says otherwise. The forward and the loss are right.

    Attributes:
        place: The line, as `ring.py:25`.
        axis: The axis over which it gathers.
        is_dtensor: Whether a DTensor gathers, and no function of the user's.
    """

    place: str
    axis: str
    is_dtensor: bool
    kinds = WRONG
    why = (
        "{place} gathers over {axis}, and each rank uses the result for its own part. In backward each rank keeps its "
        "part of its own gradient, and nothing adds what the other ranks along {axis} send back"
    )
    how = (
        "{is_dtensor:?pass grad_placements=[Partial()] to full_tensor() or to_local() in {place}, with Partial() for "
        "{axis}|sum the gradients over {axis} in the backward of {place} before it takes the rank's part: a "
        "reduce_scatter, or an all_reduce and a chunk; torch.distributed.nn.functional.all_gather has such a backward}"
    )


class GradientsOfOtherMicroBatches(Cause):
    """Gradients of micro-batches come back to the outputs of other ones.

    A stage of a pipeline keeps its outputs until their gradients arrive. If it takes the last output first, and the
    next stage runs backward for the first micro-batch first, each gradient meets another micro-batch's output. Losses
    are right, and so are the stages behind.

    Attributes:
        rank: A rank to which they come back.
        outputs: The micro-batches of the outputs, counted from 0.
        gradients: Those of their gradients, in the same order.
    """

    rank: int
    outputs: str
    gradients: str
    why = (
        "On rank {rank}, the outputs of micro-batches {outputs} get the gradients of micro-batches {gradients}: the "
        "rank takes its outputs in another order than the gradients are sent in"
    )
    how = (
        "take outputs for backward in the order in which the next stage sends gradients, and send the gradients of "
        "inputs in that order: outputs.pop(0) on both stages if the first micro-batch comes first"
    )
