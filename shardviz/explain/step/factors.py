"""Causes of results off by a factor: axis sizes, divisions, clipping, norms, loss scale."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Literal

from shardviz.explain.cause import Cause

if TYPE_CHECKING:
    from fractions import Fraction

KNOWN = ("gpt-neox#1259",)


class FactorOfAxes(Cause, abstract=True):
    """A factor equal to the size of mesh axes; other causes of that number are printed after it.

    Attributes:
        axes: The axes.
        or_over: Causes over other axes, whose sizes also multiply to the factor.
        or_else: A cause that has nothing to do with axes.
    """

    axes: str
    or_over: tuple[FactorOfAxes, ...] = field(default=(), kw_only=True)
    or_else: Cause | None = field(default=None, kw_only=True)

    @property
    def over(self) -> str:
        """The axes, and other axes over which the same cause fits: `dp or tp`."""
        return " or ".join((self.axes, *(cause.axes for cause in self.or_over if type(cause) is type(self))))

    @property
    def rivals(self) -> tuple[Cause, ...]:
        """Different causes over other axes, then the cause that has nothing to do with axes."""
        different = (cause for cause in self.or_over if type(cause) is not type(self))
        return (*different, *([self.or_else] if self.or_else else []))


class RepeatedSum(FactorOfAxes):
    """Equal gradients of one loss are summed over ranks, so each is too large by an axis's size.

    Ranks that see the same batch compute the same loss. A collective whose backward is a sum, or an all_reduce after
    backward, adds up their equal gradients as if each were a part. Shapes and loss stay right, so training merely runs
    with a larger learning rate.
    """

    kinds = ("wrong-scale",)
    why = (
        "torch.distributed.nn.functional.all_reduce over {over} sums equal gradients in backward",
        "An all_reduce after backward sums gradients over {over} that are already whole",
    )
    how = (
        "use RowwiseParallel, or an autograd.Function that sums only in forward",
        "remove that all_reduce",
    )
    references = KNOWN


class FsdpSumsGradients(FactorOfAxes):
    """FSDP sums gradients over an axis that splits the batch instead of averaging them.

    A divide factor that was set for one module, or for all, replaces FSDP's own average. The gradients keep their
    direction, so only their size shows the error.
    """

    size: int
    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        "FSDP sums over {over} instead of averaging: set_gradient_divide_factor was called{of_all:?| on these modules}",
        (
            "{or_else:?|The code multiplies {of_all:?the loss that backward runs on|a loss term of these weights, or "
            "their gradient,} by {size}, the size of {over}}"
        ),
    )
    how = (
        "remove that call, or pass it {size} times the factor",
        "{of_all:?divide the loss by {size}|remove that factor}",
    )
    references = KNOWN


class MultipliedTerm(FactorOfAxes):
    """FSDP averages a gradient, which is still too large by the size of an axis.

    A loss that was written for gradients that are summed multiplies by the number of ranks. FSDP divides by as many
    ranks as it reduces over, so something before or after it has the factor.
    """

    size: int
    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        "{of_all:?The loss that backward runs on|A term of the loss that reaches only these weights, or their "
        "gradient,} is multiplied by the size of {over}"
    )
    how = "divide {of_all:?the loss|that term or that gradient} by {size}{of_all:?|, and leave the whole loss as it is}"
    references = KNOWN


class UndividedShardGradient(FactorOfAxes):
    """A shard's gradient is the sum over all ranks' rows and was never divided.

    This happens to weights that are split over the axis of the batch, such as experts. The rank that owns a shard
    receives contributions of every rank's rows. No reduction averages them, because no other rank has a replica of the
    shard.
    """

    size: int
    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        "Each rank's loss is the mean over its own rows. The shard's gradient sums the rows of all ranks along {over}, "
        "and nothing divides it"
    )
    how = (
        "divide the gradient{of_all:?, or each rank's loss,} by {size}, the size of {over}; don't all_reduce it over "
        "{over}, whose ranks hold different shards"
    )
    references = KNOWN


class SummedNotAveraged(FactorOfAxes):
    """Gradients are summed over ranks although each rank's loss is already a mean.

    An all_reduce sums unless its op is an average. A gradient that is too large by a constant factor has the right
    direction, and an optimizer that normalizes gradients hides it.
    """

    kinds = ("wrong-scale",)
    why = (
        "The all_reduce over {over} sums gradients that it should average",
        "The code reduces the gradient over {over} twice",
    )
    how = (
        "pass it op=ReduceOp.AVG",
        "reduce it once",
    )
    references = KNOWN


class DividedByWorldSize(FactorOfAxes):
    """A gradient is divided by the world size, although some ranks see the same batch.

    Averaging code that was written for data parallelism uses the world size. With tensor or context parallelism the
    world is larger than the number of batches, and every gradient comes out too small.
    """

    kinds = ("wrong-scale",)
    why = (
        "The code divides by the world size, although ranks along {over} see the same batch",
        "The code averages over {over} the parts of a sum",
    )
    how = (
        "divide by the sizes of the axes that split the batch",
        "reduce over {over} with ReduceOp.SUM",
    )
    references = KNOWN


class FsdpDividedAgain(FactorOfAxes):
    """A gradient that FSDP already averages is divided by the axis's size once more.

    Training loops that were written for a manual all_reduce divide the loss or the gradients themselves. Under FSDP
    that is one division too many, and only the size of the gradient shows it.

    Attributes:
        averaged: The axes, if FSDP was seen to divide by the number of ranks: then no other factor was set.
    """

    size: int
    of_all: bool
    averaged: str = ""
    kinds = ("wrong-scale",)
    why = (
        (
            "FSDP averages over {over}, and {of_all:?the training loop divides the loss or the gradient|the code "
            "divides a loss term of these weights} by {size} again"
        ),
        (
            "{of_all:?|{averaged:?Code after backward divides|set_gradient_divide_factor, or code after backward, "
            "divides} these gradients by {size} again}"
        ),
    )
    how = (
        "remove that division by {size}",
        "remove that {averaged:?code|call or that code}",
    )
    references = KNOWN


class DivideFactorOfSome(Cause):
    """FSDP divides some gradients by another number than the rest: the factor they are off by.

    `set_gradient_divide_factor` sets the number of the module that it is called on, and not of the modules in it. A
    loop over the blocks leaves out the root, and a call on the root leaves out the blocks.

    Attributes:
        divides_by: The number for these gradients.
        divides_others_by: The number for the others.
    """

    divides_by: float
    divides_others_by: float
    kinds = ("wrong-scale",)
    why = (
        "FSDP divides these gradients by {divides_by:g} and others by {divides_others_by:g}: "
        "set_gradient_divide_factor sets only the module that it is called on, not the modules in it"
    )
    how = "call set_gradient_divide_factor({divides_others_by:g}) on every FSDPModule in model.modules()"
    references = KNOWN


class DividedShardGradient(FactorOfAxes):
    """The gradient of a shard is divided by the size of the axis that splits the weight.

    The rank that owns a shard has the shard's whole gradient. Code that averages every gradient over the axis also
    divides this one, although there is nothing to average.
    """

    size: int
    kinds = ("wrong-scale",)
    why = (
        "The gradient is divided by the size of {over}, which splits this weight. Each rank already has its shard's "
        "whole gradient"
    )
    how = "remove that division by {size}; don't reduce over {over}, whose ranks hold different shards"
    references = KNOWN


class AveragedNotSummed(FactorOfAxes):
    """Contributions that add up to a gradient are averaged over an axis.

    The loss is already divided by the size of the whole batch, or each rank has only a part of the gradient. The
    average then divides a second time.
    """

    kinds = ("wrong-scale",)
    why = (
        "Each rank has a part of the gradient, and the parts are averaged over {over} instead of summed",
        "The loss is already divided by the size of {over}, and the average over {over} divides again",
    )
    how = "pass op=ReduceOp.SUM to the all_reduce over {over}, or leave the division out of the loss"
    references = KNOWN


class SummedContributions(Cause):
    """A gradient is a whole number of times too large, and no axis has that size.

    The usual source is gradient accumulation without a division by the number of micro-batches. A hook or a second
    reduction does the same to a part of the gradients.
    """

    ratio: Fraction
    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        (
            "{of_all:?The gradients of micro-batches add up, and their losses aren't divided by the number of "
            "micro-batches|A hook, or a loss term that reaches only this weight, multiplies the gradient by {ratio}}"
        ),
        "{of_all:?|Sharding replaced the parameter and lost its hook, which divides the gradient by {ratio}}",
        "The code reduces the gradient several times: no mesh axis has the size {ratio}",
    )
    how = (
        "{of_all:?divide each micro-batch's loss by the number of micro-batches|remove that factor of {ratio}}",
        "{of_all:?|register the hook after sharding}",
        "all_reduce the gradient once, after the last backward",
    )
    references = KNOWN


class LostContributions(Cause):
    """A gradient is a fraction of the right one, and the fraction belongs to no axis.

    The gradient was divided by a number that has nothing to do with the mesh, or a part of the sum is missing. A
    smaller gradient only slows training down, so nothing fails.
    """

    ratio: Fraction
    divisor: Fraction
    kinds = ("wrong-scale",)
    why = (
        "The code divides the gradient by {divisor}, and no mesh axis has that size",
        "The sum has only {ratio} of the contributions",
    )
    how = (
        "divide once, by the number of contributions",
        "all_reduce over all ranks that have a contribution",
    )
    references = KNOWN


class ScaledSharedPart(Cause):
    """Ranks that share a part of a weight average its gradient, or sum it twice.

    With fewer key and value heads than ranks, several ranks hold the same heads, and each has the contribution of its
    own query heads. The heads' gradient is the sum of these.

    Attributes:
        num_parts: How many parts the weight has.
        num_ranks: How many ranks have a gradient of it.
        count: How many ranks hold each part.
        groups: The ranks of each part.
        is_sum: Whether the gradient is too large.
    """

    num_parts: int
    num_ranks: int
    count: int
    groups: tuple[tuple[int, ...], ...]
    is_sum: bool
    kinds = ("wrong-scale",)
    why = (
        "{num_ranks} ranks share {num_parts} parts of the weight, such as key and value heads. The gradient of a part "
        "is {is_sum:?summed twice|averaged} over the {count} ranks that hold the part"
    )
    how = (
        "sum each rank's own contribution once: all_reduce(grad, op=ReduceOp.SUM, group=group), with group, _ = "
        "torch.distributed.new_subgroups_by_enumeration([{groups:4}]){is_sum:?, and no second sum in backward|}"
    )


class ScaledBackward(Cause):
    """Backward runs on a different loss than the step returns, so all gradients have one factor.

    A loss scale that is never taken out, a weight of the loss, or micro-batches that are not divided all do this. The
    logged loss is right, and all gradients differ from the right ones by the same factor.

    Attributes:
        factor: The factor.
        runs: How many micro-batches the step ran; None if that is not known.
        loss: `unseen` if nobody recorded the loss, so that it may have the factor, too.
    """

    factor: Fraction | float
    runs: int | None = None
    loss: Literal["", "unseen"] = ""
    kinds = ("wrong-scale",)
    why = (
        (
            "{elements:?The loss has the factor, too: it is {is_larger:?a sum where the other job's is a mean|a mean "
            "where the other job's is a sum}, over {elements} elements|}"
        ),
        (
            "{is_of_micro_batches:?The step runs {runs} micro-batches, and {is_larger:?nothing divides their losses "
            "by {runs}|the code divides the loss by {runs} twice}|}"
        ),
        (
            "Backward runs on {factor:times} the returned loss: {runs:?a weight{is_larger:? or a loss scale}|"
            "{is_larger:?a loss scale, a weight, or undivided losses of micro-batches|a weight, or a second division "
            "by the number of micro-batches}}"
        ),
    )
    how = (
        "{elements:?compare the losses that both jobs print, and what each divides by (reduction=)|}",
        "{is_of_micro_batches:?divide each micro-batch's loss by {runs}{is_larger:?|, once}|}",
        "{is_larger:?unscale the gradients, or divide each micro-batch's loss by their number|call backward() on the "
        "returned loss}",
    )
    references = KNOWN

    @property
    def is_larger(self) -> bool:
        """Whether gradients are too large."""
        return self.factor > 1

    @property
    def elements(self) -> int:
        """How many elements an unseen loss may be the sum of, or their mean; 0 if it cannot be."""
        numbers = self.factor.as_integer_ratio()  # of a float that is near none of them: two large numbers
        return max(numbers) if self.loss == "unseen" and min(numbers) == 1 else 0

    @property
    def is_of_micro_batches(self) -> bool:
        """Whether the factor is the number of micro-batches, or one divided by it."""
        return self.runs is not None and self.runs > 1 and (self.factor == self.runs or self.factor * self.runs == 1)


class ScaledReduction(Cause):
    """Backward runs on the loss itself, and hooks multiply all gradients by one factor.

    A communication hook of DDP, or a hook of parameters, divides before its sum and again after it, or not at all.

    Attributes:
        factor: The factor.
        is_of_ddp: Whether DDP reduces the gradients.
    """

    factor: Fraction | float
    is_of_ddp: bool = False
    kinds = ("wrong-scale",)
    why = (
        "{is_of_ddp:?Backward runs on the returned loss itself. A communication hook of DDP makes the gradients "
        "{factor:times} what they should be|}",
        "{is_of_ddp:?A hook of the parameters, or a function of the model's, does so in backward|Backward runs on the "
        "returned loss itself. A hook of the parameters, or a function of the model's, makes the gradients "
        "{factor:times} what they should be}",
    )
    how = (
        "{is_of_ddp:?divide once, by the number of ranks, in the function of register_comm_hook|}",
        "look for register_hook, register_post_accumulate_grad_hook and a torch.autograd.Function that multiplies",
    )
    references = KNOWN


class ClippedByParts(Cause):
    """Gradients are clipped by a number that isn't the norm of all gradients.

    Clipping by hand over `.grad` sees local tensors only, and norms of parts can't be summed or averaged; only their
    squares add up. If every rank divides by its own norm, the parts of one gradient no longer fit each other. If all
    ranks have the same wrong norm, the step looks like an ordinary clipped step.

    Attributes:
        norm: How the norm was put together: `the mean over dp of each rank's own`; empty if each rank has its own.
        left: What the gradients were clipped to, if all were to the same.
    """

    norm: str = ""
    left: float = 0.0
    kinds = ("wrong-scale", "wrong-value")
    why = (
        "{norm:?The gradients are clipped to {left:.5g} by {norm}, not by the norm of all gradients|Each rank scales "
        "its gradients by a number of its own, as when it clips by the norm of its own shards}"
    )
    how = (
        "call torch.nn.utils.clip_grad_norm_ on the DTensors, or all_reduce the sum of squares, with each shard "
        "counted once, before the square root"
    )
    references = KNOWN


class ScaledByOwnCount(Cause):
    """Each rank multiplies or divides a result by a number that it counted in its own part.

    Token counts, norms and means differ between ranks whenever their parts differ. Code that is right on one process
    then normalizes every rank's result differently.
    """

    kinds = ("wrong-scale",)
    why = "Each rank multiplies or divides by a number of its own part: a token count, a norm or a mean"
    how = "all_reduce the count, the sum or the squares behind that number before it is used"


class LossScaleLeft(Cause):
    """Some ranks' gradients still carry the loss scale that the other ranks took out.

    Unscaling stands under a condition on the rank, or in code that only some ranks reach. The gradients differ by a
    large power of two.
    """

    kinds = ("wrong-scale",)
    why = (
        "The loss was scaled before backward (GradScaler), and only the other ranks took the scale out of their "
        "gradients"
    )
    how = "call scaler.unscale_(optimizer) on every rank, before anything reads the gradients"


class ScaledInStep(Cause):
    """A result has the same factor on every rank, which is not a ratio of small numbers.

    The sharded step scales something that the unsharded step doesn't. Clipping, a loss scale or a weight in the loss
    does this on purpose; anything else is an error. If other gradients are right, the loss is right too, because all
    gradients come from it.

    Attributes:
        of_all: Whether all gradients have the factor; true for results that are not gradients.
    """

    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        (
            "{of_all:?Only the sharded step clips by a norm|A hook, or clipping of some gradients, scales this "
            "gradient; other gradients are right}"
        ),
        (
            "{of_all:?Only the sharded step has a loss scale or a weight of the loss|A term of the loss that reaches "
            "only this weight is scaled}"
        ),
    )
    how = (
        "{of_all:?clip in optimizer(), not in the step|remove what scales this gradient alone, or clip in optimizer()}",
        "{of_all:?scale in loss(), which both models run, or not at all|give that term the same weight in both models}",
    )


class RoundedNumber(Cause):
    """One number that the loss is divided or multiplied by is rounded when ranks sum it.

    bfloat16 has no odd numbers above 256 and float16 none above 2,048, so a count of tokens that is sent in the dtype
    of the activations is another number when it arrives. The loss and all gradients are off by one factor near 1.

    Attributes:
        dtype: The dtype in which it is sent.
        axes: The axes of the mesh that it is summed over.
    """

    dtype: str
    axes: tuple[str, ...]
    kinds = ("wrong-scale",)
    why = (
        "The step sums one number over {axes:?{axes}|ranks} in {dtype}, which rounds it, and the loss and all "
        "gradients are divided or multiplied by it"
    )
    how = "send the number as an integer (torch.int64) or in float32"


class ScaledForward(Cause):
    """A result of forward has the same factor on every rank, and no axis has that size.

    The sharded model multiplies by a number that the unsharded one does not have: a quantization scale, or a size
    or count of a rank's own part. If the loss and all gradients have a factor too, it is in what they share.
    """

    kinds = ("wrong-scale",)
    why = (
        "The sharded model multiplies by a number in forward that the unsharded model doesn't have, such as a "
        "quantization scale, or a size or count of the rank's own part"
    )
    how = "look for that number in forward and in the loss, and take it from the whole tensor or batch"


class SmallFactor(Cause):
    """A gradient is off by a factor close to 1 from what its module's activations give.

    In narrow dtypes such a factor hides in the rounding between two steps. It shows only if the gradient is computed
    again from the module's own input and output gradient.
    """

    kinds = ("wrong-scale",)
    why = (
        "Ranks divide by different counts of rows or tokens",
        "A loss scale, a divide factor or clipping scales the gradient after its module's backward",
    )
    how = (
        "all_reduce the count before anything divides by it",
        (
            "print this gradient after its module's backward and before optimizer.step(), and check the op of its "
            "reduction"
        ),
    )


class NormOverWrongAxes(Cause):
    """The squares of a gradient norm are summed over axes that do not split the gradients.

    A sum over an axis that keeps replicas counts each replica; without a sum over an axis that splits, a shard is left
    out. One group for all gradients does one or the other as soon as gradients are split differently.

    Attributes:
        copied: A gradient whose replicas were counted; empty if there is none.
        copied_along: The axis along which the replicas are.
        left: A gradient whose other shards were left out; empty if there is none.
        left_along: The axis that splits it.
    """

    copied: str
    copied_along: str
    left: str
    left_along: str
    kinds = ("wrong-scale", "wrong-value")
    why = (
        "{copied:?Ranks along {copied_along} have copies of the gradient of {copied}, and the norm counts each "
        "copy{left:?. }}{left:?{left_along} splits the gradient of {left}, and the norm leaves out the other shards}"
    )
    how = (
        "call torch.nn.utils.get_total_norm on the DTensors, or all_reduce each gradient's squares over the axes that "
        "split it, before the square root"
    )
    references = ("RLinf#1558", "torchtune#2420")
