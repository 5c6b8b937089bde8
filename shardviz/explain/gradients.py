"""Causes of gradients that are absent, cut off, of tied weights, or of the wrong micro-batches."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class GradientOnSomeRanks(Cause):
    """Some ranks that hold a weight have no gradient of it after the step.

    Those ranks did not use the weight, or froze it. Their optimizer skips it while the others step it, so the parts of
    the weight no longer belong to one model.
    """

    kinds = ("unreduced-gradient",)
    why = (
        "These ranks did not use the weight in their forward, or froze it (requires_grad is False there), or nothing "
        "sent them its gradient; their optimizer leaves it alone while the others step it"
    )
    how = (
        "compare requires_grad on these ranks with the others; let every rank use the weight, if only times zero, or "
        "all_reduce its gradient with zeros where it is None"
    )


class ReductionSwitchedOff(Cause):
    """The optimizer steps while FSDP still holds gradients back.

    Gradient accumulation switches the reduction off for all micro-batches but the last. If it stays off, `.grad` is
    None, and an optimizer skips such parameters without a word.
    """

    kinds = ("unreduced-gradient",)
    why = (
        "Gradient reduction of FSDP is still switched off in the last backward before the optimizer: "
        "set_requires_gradient_sync(False) or set_requires_all_reduce(False)"
    )
    how = "call it with True before the backward of the last micro-batch"


class CutGraph(Cause):
    """No rank has a gradient of a weight that has one in the unsharded model.

    The graph is cut somewhere behind the weight, or the sharded parameter no longer requires a gradient. Forward is
    unaffected, so outputs and loss are right while the weight never learns.

    Attributes:
        weights: Weights without a gradient, if the finding is about another gradient.
    """

    weights: tuple[str, ...] = ()

    kinds = ("wrong-value",)
    why = (
        "The outputs are right, but nothing flows back{weights:? to {weights:3} (.grad is None)}: the graph is cut "
        "behind {weights:?{weights[0]}|it} (.detach(), .data, no_grad, a collective of torch.distributed, which has no "
        "backward), or the sharded parameter does not require a gradient: requires_grad tells these apart"
    )
    how = (
        "where requires_grad is True, use a collective with a backward (torch.distributed.nn.functional, funcol) and "
        "no .detach(); where it is False, set it after sharding"
    )


class CutInModule(Cause):
    """One module lets no gradient through, although the unsharded model's does.

    A collective of torch.distributed has no backward, and `.detach()` or `.data` cut the graph on purpose. Forward
    stays right, and everything before the module stops learning.

    Attributes:
        module: The module.
        through: What gets no gradient: `the input of layers.0`.
    """

    module: str
    through: str
    kinds = ("wrong-value",)
    why = (
        "The graph is cut in {module}: nothing flows back to {through}. A .detach(), .data or no_grad, or a collective "
        "of torch.distributed, which has no backward"
    )
    how = (
        "look for it in the forward of {module}; torch.distributed.nn.functional and functional collectives have a "
        "backward"
    )


class CutResidual(Cause):
    """The gradient of a residual connection does not flow back.

    A module's input is added to an output, and the graph is cut on that path only. The path through the module still
    has a gradient, so the sum of both exists and is too small.
    """

    module: str
    kinds = ("wrong-value",)
    why = (
        "The input of {module} is also added to an output, as a residual, and the graph is cut there: the residual is "
        "taken by .detach(), .data or no_grad, or passed through a collective without a backward"
    )
    how = "add the tensor itself, or pass it through a collective of torch.distributed.nn.functional"


class UnsummedInputGradient(Cause):
    """Each rank sends back its own part of the gradient of an input, and nothing sums them.

    A column-parallel layer reads one input on all ranks and uses it for its own features, and so does attention with
    keys that several heads share. Its backward needs a sum over the axis, which a plain Linear does not have. Forward
    is right without it.

    Attributes:
        module: The module that reads the input.
        axis: The axis along which the parts are.
        inner: The module within it whose output is read; empty if it is the module's own input.
    """

    module: str
    axis: str
    inner: str = ""
    kinds = ("unreduced-gradient",)
    why = (
        "Each rank along {axis} sends back its own part of the gradient of the {inner:?output of {inner}|input of "
        "{module}}, and nothing sums them: {module} reads the same on all ranks and uses it for a part of its own"
    )
    how = (
        "{inner:?in {module}, sum the gradient of the output of {inner} over {axis}|sum the gradient over {axis} where "
        "{module} begins}: a torch.autograd.Function that returns its input in forward and all_reduces in backward "
        "(ColwiseParallel does so), PrepareModuleInput, or, of a DTensor, to_local(grad_placements=[Partial()])"
    )


class RepeatedBackwardSum(Cause):
    """A module's backward sums gradients over ranks that are equal already.

    `torch.distributed.nn.functional.all_reduce` sums in backward too. If every rank computes the same loss, that
    makes the gradient too large by the number of ranks. Forward is right.
    """

    module: str
    axes: str
    kinds = ("wrong-scale",)
    why = (
        "In the backward of {module} equal gradients are summed{axes:? over {axes}} once more: the backward of "
        "torch.distributed.nn.functional.all_reduce is a sum over ranks too, which is one too many where every rank "
        "computes the same loss; or the gradient is scaled there"
    )
    how = (
        "in {module}, use RowwiseParallel or a torch.autograd.Function that all_reduces in forward and returns the "
        "gradient as it is in backward"
    )


class AveragedBackward(Cause):
    """A module's backward averages or divides a gradient that should be summed.

    A hook or the backward of a hand-written collective divides by the number of ranks. Forward is right, and the
    gradients before the module are too small.
    """

    module: str
    axes: str
    kinds = ("wrong-scale",)
    why = (
        "In the backward of {module} a gradient is averaged{axes:? over {axes}} that should be summed, or divided once "
        "too often"
    )
    how = "look at what {module} does to gradients: hooks, torch.autograd.Functions, the backward of its collectives"


class UnsummedTiedGradients(Cause):
    """The gradients of a tied weight's copies on several stages are not summed.

    An embedding and a head that share a weight cannot share storage between processes, so their gradients must be added
    up. Without a sum, copies that start equal stop being copies. With an average they stay equal, and only the size of
    the gradient is wrong.

    Attributes:
        uses: How many gradients were averaged; 0 if they were not reduced.
    """

    uses: int = 0
    kinds = ("unreduced-gradient", "wrong-scale")
    why = (
        "A tied weight has a copy on each of several stages, and {uses:?the mean of the copies' gradients was taken in "
        "place of their sum|nothing summed the copies' gradients: they start equal and drift apart}"
    )
    how = (
        "after backward, all_reduce the gradients of all copies with ReduceOp.SUM over a group of the ranks that have "
        "them{uses:?, and do not divide by {uses}|; start from equal weights}"
    )
    references = ("Megatron-LM#299",)


class TiedShardsMisaligned(Cause):
    """The gradients of a tied weight's copies are reduced although their shards do not match.

    One copy is split by rows and the other by columns, or by other ranks. Local shards of equal size are summed
    without an error, and each gets gradients that belong to other elements.
    """

    kinds = ("wrong-value",)
    why = (
        "The copies of a tied weight are split along different dims, or by other ranks, and their local shards' "
        "gradients were reduced all the same"
    )
    how = (
        "split both copies along the same dim, or all_gather each gradient to the whole tensor before the sum and take "
        "this rank's part of it after"
    )
    references = ("Megatron-LM#299",)


class RepeatedMicroBatch(Cause):
    """Some micro-batches, or parts of the batch, are run several times in place of others.

    An index does not advance, or a buffer is sent or read before it is filled again. The number of micro-batches and
    of rows is right, so the schedule and the loss look normal.

    Attributes:
        batches: The micro-batches, if they are known.
        times: How often one micro-batch is there, if all are one; else 0.
    """

    batches: tuple[int, ...] = ()
    times: int = 0
    kinds = ("wrong-value",)
    why = (
        "{batches:?Micro-batch {batches:8}, counted from 0, was run in place of others|{times:?The step ran {times} "
        "micro-batches, and all of them were the same|One part of the batch was computed several times in place of "
        "different ones}}: an index that does not advance, a micro-batch that is passed or sent again, or a buffer "
        "that is read too early"
    )
    how = (
        "pass and send every micro-batch once: look at the index, and wait for a receive before its buffer is read or "
        "used for the next"
    )


class LostMicroBatches(Cause):
    """Some micro-batches do not count in the gradients, often all but the last.

    `zero_grad()` or an optimizer's step comes between them, a gradient is overwritten, or their backward never runs.
    The gradient has the right shape and a plausible size, and all losses are right.

    Attributes:
        batches: The micro-batches; empty if only the last one counts.
    """

    batches: tuple[int, ...] = ()
    kinds = ("wrong-value",)
    why = (
        "{batches:?Micro-batches {batches:8}, counted from 0, do not count: zero_grad() or an optimizer's step came "
        "after them, or their backward did not run|Only the last micro-batch counts: gradients were zeroed, or "
        "overwritten, before each one's backward}"
    )
    how = "call zero_grad() once, before the first micro-batch, and backward() for each, which adds to .grad"


class MicroBatchesReducedAgain(Cause):
    """Gradients are reduced after every micro-batch, so earlier ones are summed again each time.

    An all_reduce of `.grad` in the loop reduces what was already reduced before. Each micro-batch then counts more
    than the next by the number of ranks.

    Attributes:
        axes: The axes over which the gradients are reduced.
        ratio: How many times as much a micro-batch counts as the next.
    """

    axes: str
    ratio: float
    kinds = ("wrong-value",)
    why = (
        "Gradients were summed over {axes} after every micro-batch, so that what was reduced before was summed again: "
        "each counts {ratio:.5g} times as often as the next"
    )
    how = (
        "reduce over {axes} once, after the last micro-batch; or reduce each micro-batch's gradient before it is added"
    )


class UnclearedGradients(Cause):
    """A micro-batch's gradient is added again with every later one.

    A main gradient gets `.grad` after each micro-batch, and `.grad` is not cleared in between. The first micro-batch
    then counts as often as there are any, the last one once.

    Attributes:
        axes: Axes of a size that sums after every micro-batch would show as well; empty if there are none.
    """

    axes: str = ""
    kinds = ("wrong-value",)
    why = "What a micro-batch leaves in .grad is added to the gradient again after each later one: nothing clears it"
    how = "set .grad to None once it was added, or add up in .grad alone"

    @property
    def rivals(self) -> tuple[Cause, ...]:
        """A reduction after every micro-batch."""
        return (MicroBatchesReducedAgain(self.axes, 2.0),) if self.axes else ()


class UnequalMicroBatches(Cause):
    """Micro-batches count with different weights in the gradients.

    Each micro-batch's loss is divided by its own number of rows or labels. The mean over all of them is then not the
    mean over the batch.
    """

    kinds = ("wrong-value",)
    why = (
        "Each micro-batch's loss has a weight of its own: it was divided by its own number of rows or labels, or "
        "scaled between them"
    )
    how = "divide every micro-batch's loss by the same number, of all micro-batches together"


class SlicesWithoutGradient(Cause):
    """Nothing flows back to some rows of a weight, and the others get the right gradient.

    A mask, an index or `padding_idx` that counts in the rank's own rows hits another row than in the unsharded model.
    The forward is right, and the rows stay as they were initialized.

    Attributes:
        tensor: The weight.
        slices: The rows, as `12` or `0:4+8`.
        dim: The dim that they are counted along.
        ranks: The ranks that should give them a gradient.
    """

    tensor: str
    slices: str
    dim: int
    ranks: tuple[int, ...]
    kinds = ("wrong-value",)
    why = "A mask, an index or padding_idx on {ranks:ranks} leaves out dim {dim}'s {slices} of {tensor}"
    how = (
        "count padding_idx, masks and indices from the rank's first row: subtract its offset, and pass padding_idx "
        "only on the rank that has that row"
    )
