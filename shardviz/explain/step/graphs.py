"""Causes of gradients that don't come back because a module ran without a graph, or is read outside of it."""

from __future__ import annotations

from shardviz.explain.cause import AtLine, Cause
from shardviz.explain.step.line_reductions import WrongLineBackward


class RanWithoutGraph(Cause):
    """A module runs with gradients switched off, and the unsharded model's doesn't.

    `checkpoint(..., use_reentrant=True)` runs a module so first. It runs it again in backward if one of the tensors
    that it is given needs a gradient: tensors in a tuple or a dict don't count. What code keeps of the first run, such
    as an auxiliary loss on the module, never has a graph.

    Attributes:
        is_recomputed: Whether the module runs again in backward.
    """

    module: str
    is_recomputed: bool
    why = (
        "{module:called} runs with gradients switched off, as checkpoint(..., use_reentrant=True) does first, or "
        "no_grad(){is_recomputed:?. Code outside of it reads what that run kept, such as a loss term on the module: "
        "nothing flows back from there|. Nothing runs it again in backward: no tensor that checkpoint is given itself "
        "needs a gradient, as tensors in a tuple or a dict don't count}"
    )
    how = (
        "call checkpoint(..., use_reentrant=False) on {module:called}, or {is_recomputed:?return what other code reads "
        "from the checkpointed function|give it tensors that need a gradient as arguments of their own; remove "
        "no_grad() around it}"
    )


class ReadElsewhere(AtLine):
    """A tensor that a module makes is read outside of it, too, and gets a wrong gradient back.

    All that reads the tensor in the module sends back what it should, so the rest of its gradient is missing or wrong.
    A forward that keeps a tensor on a module or in a global, for layers behind it, does this under activation
    checkpointing with `use_reentrant=True`: the first forward runs without a graph, and later layers read what that
    run kept. Values that later layers reuse, shared keys, a position bias or an auxiliary loss are usual.

    Attributes:
        module: The module that makes the tensor.
        is_recomputed: Whether activation checkpointing runs the module without a graph first.
        cut: The line that reads the tensor without a graph, as `model.py:83`, if only the sharded model does; else
            empty.
    """

    module: str
    is_recomputed: bool
    cut: str = ""
    why = (
        "{is_recomputed:?Checkpointing runs {module:called} without a graph first (use_reentrant=True). What is kept "
        "of that run, on a module or in a global, has no graph: code outside of {module:called} that reads the tensor "
        "from {place} sends no gradient back to it|{cut:?{cut} takes the tensor from {place} out of the graph, and "
        "the unsharded model doesn't: nothing flows back from what reads it outside of {module:called}|In "
        "{module:called}, {function} sends back what it should to the tensor from {place}. Code outside of "
        "{module:called} reads the tensor, too, and sends back something else or nothing, or a hook changes its "
        "gradient}}"
    )
    how = (
        "{is_recomputed:?call checkpoint(..., use_reentrant=False), or return the tensor from the checkpointed "
        "function and pass it on as an argument|{cut:?remove .detach(), .data or no_grad() in {cut}|look for what else "
        "reads the tensor from {place}, such as what is kept on a module or in a global, and let its gradient flow "
        "back}}"
    )


class FunctionBackward(WrongLineBackward):
    """The backward of a torch.autograd.Function in the program doesn't match its forward.

    The forward is right, its gradient arrives right, and every rank has its own part of what the function is given, so
    no sum over ranks is missing. Often the forward masks what belongs to other ranks, such as labels outside of the
    rank's part of a vocabulary, and the backward still writes to the masked places, at index 0.

    Attributes:
        masks: The line that makes a mask, as `loss.py:22`, if gradients are wrong where it has one of its two values,
            and right elsewhere; empty if there is none.
        value: That value.
        is_zero: Whether the forward sets to zero what has it.
    """

    masks: str = ""
    value: str = ""
    is_zero: bool = False
    why = (
        "The backward of {function} doesn't match its forward{masks:?: gradients are wrong exactly where the mask of "
        "{masks} is {value}. {is_zero:?The forward sets these to zero, and the backward doesn't leave them out|The "
        "backward lacks what the forward does there, or has it with a wrong sign or factor}|. Each rank has its own "
        "part of what {place} gives it, so no sum over ranks is missing}"
    )
    how = (
        "in the backward of {function}, {masks:?{is_zero:?add and subtract nothing where the mask of {masks} is "
        "{value}|check what it adds or subtracts where the mask of {masks} is {value}}: save the mask with "
        "ctx.save_for_backward|derive the gradient anew from each line of the forward, and compare it with autograd's "
        "on one rank by torch.autograd.gradcheck}"
    )


class RecomputedOtherwise(Cause):
    """Backward runs a part of the forward again on other tensors, or with another result.

    Activation checkpointing keeps what a module was given and runs the module again in backward. If ranks keep parts
    of it, they must join them as they cut them. If the second run is given something else, or draws other random
    numbers, gradients belong to a forward that nobody saw.

    Attributes:
        module: The module that is run again, or gives other tensors to what is.
        inner: The first module in it that is given, or returns, something else.
        of_inputs: Whether that is given something else.
    """

    module: str
    inner: str
    of_inputs: bool
    why = (
        (
            "{of_inputs:?What {module:called} gives {inner} in backward is not what it gave in forward: what is kept "
            "of its input is not put together again as it was cut|On the same input, {inner} returns something else in "
            "backward: it draws other random numbers than in forward}"
        ),
        (
            "{of_inputs:?Code in {module:called} before {inner} draws other random numbers in backward than in forward"
            "|{inner} reads a buffer or a number that changes between the two runs}"
        ),
    )
    how = (
        (
            "{of_inputs:?compare what the checkpointing function restores with what it kept: the dim, the order and "
            "the group of its gather|keep and restore the random state of both runs: preserve_rng_state=True, or the "
            "tracker that the model draws from}"
        ),
        "{of_inputs:?keep and restore the random state of both runs|change it once per step, outside of {inner}}",
    )


class AveragedInBackward(AtLine):
    """The backward of an autograd function averages terms of a gradient that it should sum.

    Each rank uses the function's result for its own part, such as its columns or rows, so what comes back to each is
    one term of a sum. A mean of the terms is the sum divided by the number of ranks. Averaging is right only where
    ranks take the mean of their losses afterwards, and gradients of weights are averaged, too.

    Attributes:
        axis: The axis over which the backward averages.
        size: The ranks along it.
    """

    axis: str
    size: int
    why = (
        "The backward of {function} averages over {axis} what comes back. Each rank along {axis} uses the result for "
        "its own part, so these are the terms of a sum, and their mean is 1/{size} of the gradient"
    )
    how = "in the backward of {function}, all_reduce with ReduceOp.SUM over {axis}, and don't divide by {size}"


class DetachedInLine(AtLine):
    """A line cuts the graph at a tensor that gradients flow through in the unsharded model.

    What a line keeps for a log, or a maximum that is subtracted and added again, may be detached. If the result goes on
    into the loss, a part of the gradient is missing, and nothing raises. Collectives of torch.distributed that fill
    another tensor have no backward.

    Attributes:
        is_collective: Whether it is such a collective.
    """

    is_collective: bool = False
    why = "{function} in {place} cuts the graph: nothing flows back through its result, on which the loss depends"
    how = (
        "{is_collective:?in {place}, wrap {function} in a torch.autograd.Function: its backward passes the gradient of "
        "a sum on, and sends that of rows or parts back to the ranks that they came from|remove {function} in {place}, "
        "or detach a copy that only logs read}"
    )
