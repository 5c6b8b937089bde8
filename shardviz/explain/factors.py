"""Causes of results that are off by the size of axes: a sum for a mean, a mean for a sum, a division too many."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from shardviz.explain.cause import Cause
from shardviz.text import continued

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
    def cause(self) -> str:
        """The cause, with the others."""
        texts = dict.fromkeys((super().cause, *(other.cause for other in self.or_over)))
        return "; or: ".join((*texts, *([continued(self.or_else.cause)] if self.or_else else [])))

    @property
    def fix(self) -> str:
        """The fix, with the others'."""
        texts = dict.fromkeys((super().fix, *(other.fix for other in self.or_over)))
        return "; or ".join((*texts, *([self.or_else.fix] if self.or_else else [])))


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
