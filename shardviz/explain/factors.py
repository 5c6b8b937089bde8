"""Causes of results off by a factor: the size of axes, a division too many, clipping, a norm, a loss scale."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from shardviz.explain.cause import Cause

if TYPE_CHECKING:
    from fractions import Fraction

KNOWN = ("gpt-neox#1259",)


class FactorOfAxes(Cause, abstract=True):
    """A factor that is the size of axes; other causes that give the same number are printed after it.

    Attributes:
        or_over: The same of other axes, whose sizes multiply to the factor too.
        or_else: A cause that has nothing to do with axes.
    """

    or_over: tuple[FactorOfAxes, ...] = field(default=(), kw_only=True)
    or_else: Cause | None = field(default=None, kw_only=True)

    @property
    def rivals(self) -> tuple[Cause, ...]:
        """The same of other axes, then what has nothing to do with axes."""
        return (*self.or_over, *([self.or_else] if self.or_else else []))


class RepeatedSum(FactorOfAxes):
    """Equal gradients of one loss are summed over ranks, so each is too large by an axis's size.

    Ranks that see the same batch compute the same loss. A collective whose backward is a sum, or an all_reduce after
    backward, adds their gradients up as if each were a part. The shapes and the loss stay right, so training merely
    runs with a larger learning rate.
    """

    axes: str
    kinds = ("wrong-scale",)
    why = (
        "Ranks along {axes} compute the same loss, and equal gradients were summed over it again: in backward, by "
        "torch.distributed.nn.functional.all_reduce, whose backward is a sum over ranks too, or by an all_reduce after "
        "it"
    )
    how = (
        "leave that sum out: where products are added over {axes} in forward, use RowwiseParallel or a "
        "torch.autograd.Function that all_reduces in forward and returns the gradient as it is in backward"
    )
    references = KNOWN


class FsdpSumsGradients(FactorOfAxes):
    """FSDP sums gradients over an axis that splits the batch instead of averaging them.

    A divide factor that was set for one module, or for all, replaces FSDP's own average. The gradients keep their
    direction, so only their size tells.
    """

    axes: str
    size: int
    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        "FSDP averages over {axes} by itself; {of_all:?it was set to sum (set_gradient_divide_factor), or the loss "
        "that backward ran on is multiplied by the size of {axes}|for these it was set to sum "
        "(set_gradient_divide_factor), or a term of the loss that reaches only them, or their gradient itself, is "
        "multiplied by the size of {axes}}"
    )
    how = (
        "{of_all:?take set_gradient_divide_factor out, or pass it a factor {size} times as large; or divide the loss "
        "by {size}|take set_gradient_divide_factor out of their modules, or pass it a factor {size} times as large; "
        "divide only what reaches no other gradient by {size}, not the loss, which all gradients come from}"
    )
    references = KNOWN


class UndividedShardGradient(FactorOfAxes):
    """A shard's gradient is the sum over all ranks' rows and was never divided.

    This happens to weights that are split over the axis of the batch, such as experts. Their owner receives
    contributions of every rank's rows, and no reduction averages them, because no other rank has a copy.
    """

    axes: str
    size: int
    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        "Each rank's loss is the mean over its own rows, and the gradient of what it alone holds, which {axes} splits, "
        "is the sum over all ranks' rows: nothing divided it"
    )
    how = (
        "divide the gradient{of_all:?, or the loss of each rank,} by {size}, the size of {axes}; do not reduce it over "
        "{axes}, whose ranks hold different parts"
    )
    references = KNOWN


class SummedNotAveraged(FactorOfAxes):
    """Gradients are summed over ranks although each rank's loss is a mean already.

    An all_reduce sums unless its op is an average. A gradient that is too large by a constant factor has the right
    direction, and an optimizer that normalizes gradients hides it.
    """

    axes: str
    kinds = ("wrong-scale",)
    why = "Contributions were summed over {axes} that should be averaged, or were reduced over it more than once"
    how = "reduce over {axes} with ReduceOp.AVG, and once only"
    references = KNOWN


class DividedByWorldSize(FactorOfAxes):
    """A gradient is divided by the world size, although some ranks see the same batch.

    Averaging code that was written for data parallelism uses the world size. With tensor or context parallelism the
    world is larger than the number of batches, and every gradient comes out too small.
    """

    axes: str
    kinds = ("wrong-scale",)
    why = (
        "It was divided by the size of {axes}, too, as by the number of all ranks (world size), though ranks along "
        "{axes} see the same batch; or parts that should be summed over {axes} were averaged"
    )
    how = (
        "divide by the sizes of the axes that split the batch only, not by get_world_size(); where each rank along "
        "{axes} has a part of the gradient, use ReduceOp.SUM"
    )
    references = KNOWN


class FsdpDividedAgain(FactorOfAxes):
    """A gradient that FSDP averages already is divided by the axis's size once more.

    Training loops that were written for manual all_reduce divide the loss or the gradients themselves. Under FSDP
    that is one division too many, and nothing but the size of the gradient shows it.
    """

    axes: str
    size: int
    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        "FSDP averages over {axes} already, and something divides by its size once more: {of_all:?the loss that "
        "backward ran on, or the gradient after it|a divide factor of their modules, a term of the loss that reaches "
        "only them, or the gradient after backward}"
    )
    how = "take that division by {size} out, or pass set_gradient_divide_factor one {size} times smaller"
    references = KNOWN


class DividedShardGradient(FactorOfAxes):
    """The gradient of a shard is divided by the size of the axis that splits the weight.

    A shard's owner has the shard's whole gradient. Code that averages every gradient over the axis divides this one
    too, although there is nothing to average.
    """

    axes: str
    size: int
    kinds = ("wrong-scale",)
    why = "It was divided by the size of {axes}, which splits it: what each rank holds has its whole gradient already"
    how = "take that division by {size} out; do not reduce it over {axes}, whose ranks hold different parts"
    references = KNOWN


class AveragedNotSummed(FactorOfAxes):
    """Contributions that add up to a gradient are averaged over an axis.

    The loss is already divided by the size of the whole batch, or each rank has only a part of the gradient. The
    average then divides a second time.
    """

    axes: str
    kinds = ("wrong-scale",)
    why = (
        "An average was taken over {axes} where the ranks' contributions should be summed, or where they were divided "
        "already"
    )
    how = "reduce over {axes} with ReduceOp.SUM, or divide once only"
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
        "{ratio} contributions, no mesh axis's size, were summed where they should be averaged, {of_all:?as of "
        "micro-batches; or it was reduced several times|or something multiplies these: they were reduced several "
        "times, a hook, a term of the loss that reaches only them}"
    )
    how = (
        "{of_all:?divide each micro-batch's loss by their number; reduce once, after the last|look at what reduces or "
        "multiplies these alone; reduce once, after the last backward}"
    )
    references = KNOWN


class LostContributions(Cause):
    """A gradient is a fraction of the right one, and the fraction belongs to no axis.

    It was divided by a number that has nothing to do with the mesh, or a part of what should be added up is missing.
    A smaller gradient only slows training down, so nothing fails.
    """

    ratio: Fraction
    divisor: Fraction
    kinds = ("wrong-scale",)
    why = "It was divided by {divisor}, not the size of a mesh axis, or has only {ratio} of the contributions"
    how = "divide by the number of contributions, once; reduce over all ranks that have one"
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
        "There are {num_parts} parts on {num_ranks} ranks, as of key and value heads that are fewer than ranks, and "
        "the gradient of a part was {is_sum:?summed twice|averaged} over the {count} ranks that hold it"
    )
    how = (
        "sum each rank's own contribution once: all_reduce(grad, op=ReduceOp.SUM, group=group), with group, _ = "
        "torch.distributed.new_subgroups_by_enumeration([{groups:4}]){is_sum:?, and no sum in backward beside it|}"
    )


class SummedValue(Cause):
    """A logged number is a sum over ranks or micro-batches of what should be averaged.

    Each rank or micro-batch has the same number, for instance a mean. Adding them up multiplies it by how many
    there are, and the curve in the log keeps its shape.
    """

    axes: str
    kinds = ("wrong-scale",)
    why = (
        "Equal contributions were summed{axes:? over {axes}}, or a sum was taken where each rank's mean, or each "
        "micro-batch's, should be averaged"
    )
    how = (
        "reduce{axes:? over {axes}} with ReduceOp.AVG, or reduce once only; divide the loss by the number of "
        "micro-batches"
    )
    references = KNOWN


class DividedMean(Cause):
    """A logged mean is divided by a number of ranks once more.

    The loss function returns a mean, and the reduction that makes the logged number averages it. Dividing by the
    world size afterwards makes it too small by a constant factor.
    """

    axes: str
    divisor: Fraction
    kinds = ("wrong-scale",)
    why = "It was divided by {axes:?the size of {axes}|{divisor}} though it is a mean already"
    how = "divide once only: the reduction takes the mean"
    references = KNOWN


class UnsummedValue(Cause):
    """A logged number counts one rank's part only, and all parts happen to be equal.

    Each rank computes the number of its own rows or shards and nothing adds them up. Because the parts are equal, the
    ranks agree, and no comparison between ranks finds it.
    """

    axes: str
    kinds = ("wrong-scale",)
    why = (
        "Each rank has the number of its own part, which is the same on all of them, and nothing summed it{axes:? over "
        "{axes}}; or it is a mean that was taken twice"
    )
    how = "all_reduce it with ReduceOp.SUM{axes:? over {axes}}; a mean is taken once only"
    references = KNOWN


class ScaledBackward(Cause):
    """Backward runs on another loss than is returned, so all gradients have one factor.

    A loss scale that nobody takes out, a weight of the loss or micro-batches that are not divided all do it. The
    logged loss is right, and the gradients differ from the right ones by one number only.
    """

    factor: Fraction | float
    kinds = ("wrong-scale",)
    why = (
        "Backward ran on another loss than the one that is returned, {factor:times} it: a loss scale that was never "
        "taken out of the gradients, a weight of the loss, {is_larger:?or micro-batches whose losses were not divided "
        "by their number|or the number of micro-batches was divided by twice}"
    )
    how = (
        "call backward() on the loss that is returned, divided by the number of micro-batches; where a loss scale is "
        "meant, divide every gradient by it before the optimizer's step"
    )
    references = KNOWN

    @property
    def is_larger(self) -> bool:
        """Whether gradients are too large."""
        return self.factor > 1


class ClippedByParts(Cause):
    """Gradients are clipped by another number than the norm of all of them.

    Clipping by hand over `.grad` sees local tensors only, and norms of parts cannot be summed or averaged; only their
    squares add up. If every rank divides by its own norm, the parts of one gradient no longer fit each other. If all
    have the same wrong norm, the step looks like an ordinary clipped one.

    Attributes:
        norm: How the norm was put together: `the mean over dp of each rank's own`; empty if each rank has its own.
        left: What the gradients were clipped to, if all were to the same.
    """

    norm: str = ""
    left: float = 0.0
    kinds = ("wrong-scale", "wrong-value")
    why = (
        "{norm:?The gradients were clipped to {left:.5g} by {norm}, which is not the norm of all gradients|Each rank "
        "scaled its gradients by a number that it computed from its own part, as the norm of its shards in clipping by "
        "hand}"
    )
    how = (
        "clip by torch.nn.utils.clip_grad_norm_ on the DTensors, or all_reduce the sum of squares, each part once, "
        "before the root"
    )
    references = KNOWN


class ScaledByOwnCount(Cause):
    """Each rank multiplies or divides a result by a number that it counted in its own part.

    Token counts, norms and means differ between ranks whenever their parts do. Code that is right on one process then
    normalizes every rank's result differently.
    """

    kinds = ("wrong-scale",)
    why = "Each rank multiplies or divides by a number of its own part: a count of tokens, a norm, a mean"
    how = "compute that number over all ranks: all_reduce what it is made of before it is used"


class LossScaleLeft(Cause):
    """Some ranks' gradients still carry the loss scale that the other ranks took out.

    Unscaling stands under a condition on the rank, or in code that only some ranks reach. The gradients differ by a
    large power of two.
    """

    kinds = ("wrong-scale",)
    why = (
        "The loss was scaled before backward, as GradScaler does, and only the other ranks took the scale out of their "
        "gradients; or these ranks scaled theirs by a number of their own"
    )
    how = (
        "unscale on every rank, scaler.unscale_(optimizer) under no condition on the rank, before anything reads the "
        "gradients"
    )


class ScaledInStep(Cause):
    """A result has the same factor on every rank, which is not a ratio of small numbers.

    The sharded step scales something that the unsharded model's does not. Clipping, a loss scale or a weight in the
    loss does so on purpose; anything else is an error. If other gradients are right, it is not the loss, which all
    gradients come from.

    Attributes:
        of_all: Whether all gradients have the factor; true for results that are not gradients.
    """

    of_all: bool
    kinds = ("wrong-scale",)
    why = (
        "The sharded step scales this and the unsharded model's does not{of_all:?: clipping by its own norm, a loss "
        "scale, a weight of its own in the loss|, and other gradients are right: clipping of some gradients only, a "
        "hook, a term of the loss that reaches only these and has a weight of its own}"
    )
    how = (
        "{of_all:?scale in loss() or not at all in the step that is compared; clip in optimizer(); where it is not "
        "yours, look for what scales it|look for what scales these alone; clip in optimizer()}"
    )


class SmallFactor(Cause):
    """A gradient is off by a factor close to 1 from what its module's activations give.

    In narrow dtypes such a factor hides in the rounding between two steps. It shows only when the gradient is computed
    again from the module's own input and output gradient.
    """

    kinds = ("wrong-scale",)
    why = (
        "It is multiplied or divided after its module made it: by a count of rows or tokens that ranks do not share, "
        "by a loss scale, a divide factor or clipping"
    )
    how = "look at what scales this gradient between its module's backward and the optimizer, and at the reduction's op"


class NormOverWrongAxes(Cause):
    """The squares of a gradient norm are summed over axes that do not split the gradients.

    Summed over an axis that keeps copies, each copy counts; not summed over an axis that splits, a part is left out.
    One group for all gradients does one or the other as soon as they are split differently.

    Attributes:
        copied: A gradient whose copies were counted; empty if there is none.
        copied_along: The axis along which they are.
        left: A gradient whose other parts were left out; empty if there is none.
        left_along: The axis that splits it.
    """

    copied: str
    copied_along: str
    left: str
    left_along: str
    kinds = ("wrong-scale", "wrong-value")
    why = (
        "{copied:?Ranks along {copied_along} have copies of the gradient of {copied}, and each copy was "
        "counted{left:?; }}{left:?{left_along} splits the gradient of {left}, and the other parts were left out}"
    )
    how = (
        "for each gradient all_reduce the squares over the axes that split it, and no others, before the root; "
        "torch.nn.utils.get_total_norm does so for DTensors"
    )
    references = ("RLinf#1558", "torchtune#2420")
