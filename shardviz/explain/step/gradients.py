"""Causes of gradients that are absent, cut off, of tied weights, or of wrong micro-batches."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class GradientOnSomeRanks(Cause, kind="unreduced-gradient"):
    """Some ranks that hold a weight have no gradient of it after the step.

    Those ranks did not use the weight, or froze it. Their optimizer skips it while the others step it, so the parts of
    the weight no longer belong to one model.
    """

    why = (
        "These ranks don't use the weight in their forward",
        "requires_grad is False on these ranks",
    )
    how = (
        "use the weight on every rank, if only times zero, or all_reduce its gradient with zeros where .grad is None",
        "set requires_grad alike on all ranks",
    )


class ReductionSwitchedOff(Cause):
    """FSDP still holds gradients back after the last micro-batch.

    Gradient accumulation switches the reduction off for all micro-batches but the last. If it stays off, `.grad` is
    None, and an optimizer silently skips such parameters. If it was on for an earlier micro-batch only, `.grad`
    lacks the later ones.
    """

    kinds = ("unreduced-gradient", "wrong-value")
    why = (
        "FSDP's gradient reduction was off in the last backward of the step: "
        "set_requires_gradient_sync(False) or set_requires_all_reduce(False)"
    )
    how = "call the same method with True before the backward of the last micro-batch"


class CutGraph(Cause):
    """No rank has a gradient of a weight that has one in the unsharded model.

    The graph is cut somewhere behind the weight, or the sharded parameter no longer requires a gradient. Forward is
    unaffected, so outputs and loss are right while the weight never learns.

    Attributes:
        weights: Weights without a gradient, if the finding is about another gradient.
    """

    weights: tuple[str, ...] = ()

    why = (
        (
            "The outputs are right, but nothing flows back{weights:? to {weights:3} (.grad is None)}: the code cuts "
            "the graph behind {weights:?{weights[0]}|this weight}"
        ),
        "The sharded parameter has requires_grad=False",
    )
    how = (
        (
            "if requires_grad is True: remove .detach(), .data and no_grad, and use torch.distributed.nn.functional, "
            "since collectives of torch.distributed have no backward"
        ),
        "set requires_grad=True after sharding",
    )


class CutInModule(Cause):
    """One module lets no gradient through, although the unsharded model's does.

    A collective of torch.distributed has no backward, and `.detach()` or `.data` cut the graph on purpose. Forward
    stays right, and everything before the module stops learning.

    Attributes:
        through: What gets no gradient: `the input of layers.0`.
    """

    module: str
    through: str
    why = "{module:called} cuts the graph in forward, so nothing flows back to {through}"
    how = (
        "in {module:called}, remove .detach(), .data and no_grad, let each autograd.Function return its gradient, and "
        "replace collectives of torch.distributed (they have no backward) by torch.distributed.nn.functional"
    )


class GraphCutBehind(Cause):
    """No gradient comes back to an output of a module, although the module itself cuts nothing.

    What reads the output detaches it first, or gets it from a different rank: a pipeline sends tensors without their
    graph, and each stage starts its backward with gradients that the next one sends back, one for each output.

    Attributes:
        output: The output: `output[1] of front`.
        is_sent: Whether the modules that follow run on other ranks.
    """

    output: str
    is_sent: bool
    why = (
        (
            "{is_sent:?The ranks that run what follows don't send the gradient of {output} back, or backward isn't "
            "started with it|The code between {output} and what reads it cuts the graph}"
        ),
    )
    how = (
        "{is_sent:?send back the gradient of every tensor that was sent forward, and start backward from all outputs: "
        "torch.autograd.backward(outputs, gradients)|where the output is passed on, remove .detach(), .data and "
        "no_grad, let each autograd.Function return its gradient, and replace collectives of torch.distributed (they "
        "have no backward) by torch.distributed.nn.functional}"
    )


class WrongOutside(Cause):
    """An output that no module reads gets a wrong gradient back.

    A module returns more than one tensor: beside hidden states the logits of a router, or values that later layers and
    stages use. Its output is right, and so is the gradient of what the next module reads; the gradient of the further
    output comes from code that belongs to no module.

    Attributes:
        output: The output: `output[1] of moe`.
        around: The module whose code has the output, and may use it; empty for the model itself.
        is_sent: Whether the modules that follow run on other ranks.
        may_exchange: Whether the code around may have a collective; its lines tell.
    """

    output: str
    around: str
    is_sent: bool
    may_exchange: bool = True
    why = (
        (
            "{is_sent:?The next stage uses {output} and doesn't send its gradient back, or the gradient isn't added|A "
            "term of the loss uses {output}, and that term is scaled differently than in the unsharded model}"
        ),
        (
            "{may_exchange:?{around:?The code of {around:called}|The model's own code} uses {output} in a collective "
            "without a backward|}"
        ),
    )
    how = (
        (
            "{is_sent:?send back the gradient of every tensor that was sent forward, and start backward from all "
            "outputs: torch.autograd.backward(outputs, gradients)|scale the term of the loss that uses {output} like "
            "the other terms: divide by the number of ranks either all or none}"
        ),
        "{may_exchange:?give that collective a backward (torch.distributed.nn.functional)|}",
    )


class CutResidual(Cause):
    """The gradient of a residual connection does not flow back.

    A module's input is added to an output, and the graph is cut on that path only. The path through the module still
    has a gradient, so the sum of both exists and is too small.
    """

    module: str
    why = (
        "The code adds the input of {module:called} to an output as a residual and cuts the graph there: .detach(), "
        ".data, no_grad, or a collective without a backward"
    )
    how = "add the tensor itself, or pass it through a collective of torch.distributed.nn.functional"


class UnsummedInputGradient(Cause, kind="unreduced-gradient"):
    """Each rank sends back its own part of the gradient of an input, and nothing sums them.

    A column-parallel layer reads one input on all ranks and uses it for its own features, and so does attention with
    keys that several heads share. Its backward needs a sum over the axis, which a plain Linear does not have. Forward
    is right without it.

    Attributes:
        module: The module that reads the input.
        inner: The module within it whose output is read; empty if it is the module's own input.
        argument: Which input it is, as `input 1`, counted from 0, if the module has several; else empty.
        others: Other modules that read the same tensor, and send back a part of its gradient, too.
        maker: What makes the tensor, if all that read it send back parts; else empty.
        late: The line in front of it, as `lora.py:21`, in whose backward a sum comes too late: behind a weight that has
            got one term by then; empty if none does.
    """

    module: str
    axis: str
    inner: str = ""
    argument: str = ""
    others: tuple[str, ...] = ()
    maker: str = ""
    late: str = ""
    why = (
        "Every rank along {axis} uses {inner:?the output of {inner:called}|{argument:?{argument} (counted from "
        "0)|the input} of {module:called}} for its own part of {module:called}{others:?, and the same tensor for its "
        "own part of {others}|}. {late:?The backward of {late} sums the ranks' parts of the gradient too late, behind "
        "weights that have already got one part|Nothing sums the ranks' parts of the gradient in backward}"
    )
    how = (
        "sum the gradient {argument:?of {argument} |}over {axis} {inner:?behind {inner:called}|{maker:?once, behind "
        "{maker:called}|where {module:called} begins{others:?, and {others}|}}}: PrepareModuleInput, "
        "to_local(grad_placements=[Partial()]) of a DTensor, or a torch.autograd.Function that returns its input in "
        "forward and all_reduces in backward (ColwiseParallel){late:?. The sum that stands in {late} now is then one "
        "too many for this branch: move it, or let the branch read what stands in front of it|}"
    )


class RepeatedBackwardSum(Cause, kind="wrong-scale"):
    """A module's backward sums gradients over ranks that are equal already.

    `torch.distributed.nn.functional.all_reduce` sums in backward too. If every rank computes the same loss, that
    makes the gradient too large by the number of ranks. Forward is right.
    """

    module: str
    axes: str
    why = (
        (
            "The backward of {module:called} sums equal gradients{axes:? over {axes}} once too often, as "
            "torch.distributed.nn.functional.all_reduce does, or a function for it that is applied twice"
        ),
        "{axes:?|The backward of {module:called} multiplies the gradient}",
    )
    how = (
        (
            "in {module:called}, sum in backward once, where ranks begin to use a tensor for their own parts; where "
            "forward sums their terms, use RowwiseParallel, or a torch.autograd.Function that all_reduces in forward "
            "and returns the gradient unchanged in backward"
        ),
        "{axes:?|look for hooks and torch.autograd.Functions in {module:called}}",
    )


class ScaledOnTheWayBack(Cause, kind="wrong-scale"):
    """A gradient is multiplied by a number on its way back from one module to another.

    Both modules are right. The fault is in code between them, such as a torch.autograd.Function that gathers in forward
    and sums or divides in backward. Forward is right.

    Attributes:
        module: The module whose output gets the wrong gradient.
        reader: The module that sends a right one back, or several.
        over: Axes of the mesh whose size the factor is; empty if there are none.
        is_larger: Whether the gradient is too large.
    """

    module: str
    reader: str
    over: str
    is_larger: bool
    why = (
        "In backward, the code between {module:called} and {reader:called} {is_larger:?{over:?sums over {over} what is "
        "the whole gradient on every rank already|multiplies the gradient}|{over:?averages over {over} what it should "
        "sum or pass on|divides the gradient}}"
    )
    how = (
        "look at the torch.autograd.Function, hook or collective that passes the output of {module:called} on: its "
        "backward {is_larger:?{over:?takes the rank's own part of the gradient and sums nothing|multiplies by "
        "nothing}|divides by nothing}"
    )


class AveragedBackward(Cause, kind="wrong-scale"):
    """A module's backward averages or divides a gradient that should be summed.

    A hook or the backward of a hand-written collective divides by the number of ranks. Forward is right, and the
    gradients before the module are too small.
    """

    module: str
    axes: str
    why = (
        "The backward of {module:called} {axes:?averages gradients over {axes} that it should sum|divides the gradient}"
    )
    how = (
        "remove the division: look at hooks, torch.autograd.Functions and the backward of collectives in "
        "{module:called}"
    )


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
        "Several stages have a copy of the tied weight. {uses:?The reduction averages the copies' gradients instead of "
        "summing them|Nothing sums the copies' gradients, so the copies start equal and drift apart}"
    )
    how = (
        "after backward, all_reduce the gradients of all copies with ReduceOp.SUM over the ranks that have a "
        "copy{uses:?, and don't divide by {uses}|; start from equal weights}"
    )
    references = ("Megatron-LM#299",)


class TiedShardsMisaligned(Cause):
    """The gradients of a tied weight's copies are reduced although their shards do not match.

    One copy is split by rows and the other by columns, or by other ranks. Local shards of equal size are summed
    without an error, and each gets gradients that belong to other elements.
    """

    why = (
        "The copies of the tied weight are split along different dims or over different ranks, and a reduction still "
        "adds the gradients of their local shards"
    )
    how = (
        "split both copies along the same dim, or all_gather each gradient before the sum and cut this rank's part "
        "afterwards"
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
    why = (
        "{batches:?The step ran micro-batch{batches:1?|es} {batches:8} (counted from 0) in place of others|{times:?The "
        "step ran {times} micro-batches, and all of them were the same|The step computed one part of the batch several "
        "times in place of others}}: an index doesn't advance, or a buffer is read before it is filled"
    )
    how = "pass and send each micro-batch once: advance the index, and wait() for a receive before you read its buffer"


class LostMicroBatches(Cause):
    """Some micro-batches do not count in the gradients, often all but the last.

    `zero_grad()` or an optimizer's step comes between them, a gradient is overwritten, or their backward never runs.
    The gradient has the right shape and a plausible size, and all losses are right.

    Attributes:
        batches: The micro-batches; empty if only the last one counts.
    """

    batches: tuple[int, ...] = ()
    why = (
        "{batches:?Micro-batch{batches:1? {batches:8} (counted from 0) does|es {batches:8} (counted from 0) do} not "
        "count: zero_grad() or the optimizer's step runs after {batches:1?it|them}, or {batches:1?its|their} backward "
        "doesn't run|Only the last micro-batch counts: the loop zeroes or overwrites gradients before each backward}"
    )
    how = "call zero_grad() once, before the first micro-batch, and backward() for each: it adds to .grad"


class MicroBatchesReducedAgain(Cause):
    """Gradients are reduced after every micro-batch, so earlier ones are summed again each time.

    An all_reduce of `.grad` in the loop reduces what was already reduced before. Each micro-batch then counts more
    than the next by the number of ranks.

    Attributes:
        ratio: How many times as much a micro-batch counts as the next.
        is_sum: Whether the last one counts too often, too.
    """

    axes: str
    ratio: float
    is_sum: bool = False
    why = (
        "The loop sums gradients over {axes} after every micro-batch, and sums earlier micro-batches again each time: "
        "each counts {ratio:.5g} times as much as the next"
    )
    how = "reduce over {axes} once, after the last micro-batch{is_sum:?, and average: op=ReduceOp.AVG|}"


class ReducedAtEachUse(Cause):
    """A hook reduces a shared module's gradient after each use, and earlier uses again.

    Under reentrant activation checkpointing each use of a module has a backward of its own, in which its weights'
    gradients are accumulated and their hooks fire. An all_reduce of `.grad` there sums what the uses before added, and
    was summed already.

    Attributes:
        module: The module that is used several times.
        op: What reduces its gradients.
        times: How often each of them is reduced.
    """

    module: str
    op: str
    times: int
    why = (
        "{op} reduces each gradient of {module:called} {times} times in one backward, once after each use of the "
        "module, and reduces what the uses before added again"
    )
    how = (
        "reduce the gradients once, after backward(); or pass use_reentrant=False to checkpoint, with which hooks fire "
        "once"
    )


class UnclearedGradients(Cause):
    """A micro-batch's gradient is added again with every later one.

    A main gradient gets `.grad` after each micro-batch, and `.grad` is not cleared in between. The first micro-batch
    then counts as often as there are any, the last one once.

    Attributes:
        axes: Axes of a size that sums after every micro-batch would show as well; empty if there are none.
    """

    axes: str = ""
    why = "Nothing clears .grad, so the code adds each micro-batch's gradient again after every later micro-batch"
    how = "set .grad to None after you add it, or accumulate in .grad alone"

    @property
    def rivals(self) -> tuple[Cause, ...]:
        """A reduction after every micro-batch."""
        return (MicroBatchesReducedAgain(self.axes, 2.0),) if self.axes else ()


class UnequalMicroBatches(Cause):
    """Micro-batches count with different weights in the gradients.

    Each micro-batch's loss is divided by its own number of rows or labels. The mean over all of them is then not the
    mean over the batch.
    """

    why = (
        "Micro-batches count differently: the code divides each micro-batch's loss by that micro-batch's own number of "
        "rows or labels"
    )
    how = "divide every micro-batch's loss by one number: the rows or labels of all micro-batches together"


class SlicesWithoutGradient(Cause):
    """Nothing flows back to some rows of a weight, and the others get the right gradient.

    A mask, an index or `padding_idx` that counts in the rank's own rows hits a different row than in the unsharded
    model. The forward is right, and the rows stay as they were initialized.

    Attributes:
        slices: The rows, as `12` or `0:4+8`.
        dim: The dim that they are counted along.
        ranks: The ranks that should give them a gradient.
    """

    tensor: str
    slices: str
    dim: int
    ranks: tuple[int, ...]
    why = "A mask, an index or padding_idx on {ranks:ranks} leaves out dim {dim}'s {slices} of {tensor}"
    how = (
        "count padding_idx, masks and indices from the rank's first row: subtract its offset, and pass padding_idx "
        "only on the rank that has that row"
    )


class ReadBySegments(Cause, kind="misordered"):
    """A layer reads a rank's part of a weight as parts of several segments.

    The weight is cut as one stretch. The other weights of a fused layer (gate and up, or q, k and v) are cut segment by
    segment, and an adapter's or a bias is not. While it is zero the outputs are right; once it isn't, rows of one
    segment are added to another's.

    Attributes:
        segments: How many segments there are.
        axis: The axis that cuts the weight.
    """

    segments: int
    axis: str
    dim: int = 0
    why = (
        "The layer reads each rank's part of dim {dim} as its parts of {segments} segments (gate/up or q/k/v), one "
        "behind the other, and the weight is cut over {axis} as one stretch"
    )
    how = (
        "cut each of the {segments} segments over {axis} and join a rank's parts, as for the layer's other weights, or "
        "give each segment a Linear of its own"
    )
