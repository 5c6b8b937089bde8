"""Causes of results off by a factor: axis sizes, divisions, clipping, norms, loss scale."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from shardviz.explain.cause import Cause

if TYPE_CHECKING:
    from fractions import Fraction


class FactorOfAxes(Cause, kind="wrong-scale", listed=False):
    """A factor equal to the size of mesh axes; other causes of that number are printed after it.

    Attributes:
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

    why = (
        "torch.distributed.nn.functional.all_reduce over {over} sums equal gradients in backward",
        "An all_reduce after backward sums gradients over {over} that are already whole",
    )
    how = (
        "use RowwiseParallel, or an autograd.Function that sums only in forward",
        "remove that all_reduce",
    )


class FsdpSumsGradients(FactorOfAxes):
    """FSDP sums gradients over an axis that splits the batch instead of averaging them.

    A divide factor that was set for one module, or for all, replaces FSDP's own average. The gradients keep their
    direction, so only their size shows the error.
    """

    size: int
    of_all: bool
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


class MultipliedTerm(FactorOfAxes):
    """FSDP averages a gradient, which is still too large by the size of an axis.

    A loss that was written for gradients that are summed multiplies by the number of ranks. FSDP divides by as many
    ranks as it reduces over, so something before or after it has the factor.
    """

    size: int
    of_all: bool
    why = (
        "{of_all:?The loss that backward runs on|A term of the loss that reaches only these weights, or their "
        "gradient,} is multiplied by the size of {over}"
    )
    how = "divide {of_all:?the loss|that term or that gradient} by {size}{of_all:?|, and leave the whole loss as it is}"


class UndividedShardGradient(FactorOfAxes):
    """The gradient of weights that ranks split sums all ranks' rows and was never divided.

    This happens to weights that are split over the axis of the batch, such as experts. The rank that owns a shard, or
    an expert, receives contributions of every rank's rows. No reduction averages them, because no other rank has a
    replica of it.

    Attributes:
        along: The axes whose ranks have different shards or experts.
    """

    size: int
    of_all: bool
    along: str
    why = (
        "Each rank's loss is the mean over its own rows. Ranks along {along} have different shards or experts, whose "
        "gradients sum the rows of all of these ranks, and nothing divides them"
    )
    how = (
        "divide the gradient{of_all:?, or each rank's loss,} by {size}, the size of {over}; don't all_reduce it over "
        "{along}, whose ranks have different weights"
    )


class SummedNotAveraged(FactorOfAxes):
    """Gradients are summed over ranks although each rank's loss is already a mean.

    An all_reduce sums unless its op is an average. A gradient that is too large by a constant factor has the right
    direction, and an optimizer that normalizes gradients hides it.
    """

    why = (
        "The all_reduce over {over} sums gradients that it should average",
        "The code reduces the gradient over {over} twice",
    )
    how = (
        "pass it op=ReduceOp.AVG",
        "reduce it once",
    )


class SequenceOfWhole(Cause, kind="wrong-scale"):
    """A module that is given whole activations has a style for parts of a sequence.

    SequenceParallel labels a plain input as a part of a longer sequence, so that the gradients of the module's weights
    are terms of a sum over ranks. If each rank gives it the whole, each of the terms is the gradient already. Outputs
    are right, since they become plain again.
    """

    axes: str
    size: int
    why = (
        "The module is given the whole on each rank, and has a style for parts of a sequence, as SequenceParallel: its "
        "weights' gradients are labeled as terms of a sum over {axes}, which makes them {size} times too large"
    )
    how = (
        "leave the module out of the plan of parallelize_module (its weights may stay copies), or give it each rank's "
        "part of the sequence"
    )


class DividedByWorldSize(FactorOfAxes):
    """A gradient is divided by the world size, although some ranks see the same batch.

    Averaging code that was written for data parallelism uses the world size. With tensor or context parallelism the
    world is larger than the number of batches, and every gradient comes out too small.
    """

    why = (
        "The code divides by the world size, although ranks along {over} see the same batch",
        "The code averages over {over} the parts of a sum",
    )
    how = (
        "divide by the sizes of the axes that split the batch",
        "reduce over {over} with ReduceOp.SUM",
    )


class FsdpDividedAgain(FactorOfAxes):
    """A gradient that FSDP already averages is divided by the axis's size once more.

    Training loops that were written for a manual all_reduce divide the loss or the gradients themselves. Under FSDP
    that is one division too many, and only the size of the gradient shows it.

    Attributes:
        averaged: The axes, if FSDP was seen to divide by the number of ranks: then no other factor was set.
        by: What averages, if it isn't FSDP.
    """

    size: int
    of_all: bool
    averaged: str = ""
    by: str = ""
    why = (
        (
            "{by:?{by}|FSDP} averages over {over}, and {of_all:?the loss or the gradient is divided by {size} again: "
            "by hand, or as a sum over own rows that is divided by a count of all ranks|the code divides a loss term "
            "of these weights by {size} again}"
        ),
        (
            "{of_all:?|{averaged:?Code after backward divides|set_gradient_divide_factor, or code after backward, "
            "divides} these gradients by {size} again}"
        ),
    )
    how = (
        "{of_all:?remove that division, or multiply the loss that backward runs on by {size}|remove that division by "
        "{size}}",
        "remove that {averaged:?code|call or that code}",
    )


class DivideFactorOfSome(Cause, kind="wrong-scale"):
    """FSDP divides some gradients by another number than the rest: the factor they are off by.

    `set_gradient_divide_factor` sets the number of the module that it is called on, and not of the modules in it. A
    loop over the blocks leaves out the root, and a call on the root leaves out the blocks.

    Attributes:
        divides_by: The number for these gradients.
        divides_others_by: The number for the others.
    """

    divides_by: float
    divides_others_by: float
    why = (
        "FSDP divides these gradients by {divides_by:g} and others by {divides_others_by:g}: "
        "set_gradient_divide_factor sets only the module that it is called on, not the modules in it"
    )
    how = "call set_gradient_divide_factor({divides_others_by:g}) on every FSDPModule in model.modules()"


class DividedShardGradient(FactorOfAxes):
    """The gradient of a shard is divided by the size of the axis that splits the weight.

    The rank that owns a shard has the shard's whole gradient. Code that averages every gradient over the axis also
    divides this one, although there is nothing to average.
    """

    size: int
    why = (
        "The gradient is divided by the size of {over}, whose ranks have different parts of the weights. Each rank "
        "already has its part's whole gradient"
    )
    how = "remove that division by {size}; don't reduce over {over}, whose ranks hold different shards"


class AveragedNotSummed(FactorOfAxes):
    """Contributions that add up to a gradient are averaged over an axis.

    The loss is already divided by the size of the whole batch, or each rank has only a part of the gradient. The
    average then divides a second time.

    Attributes:
        of_some: Whether other gradients of the step don't have the factor, so that the loss can't give it.
    """

    of_some: bool = False
    why = (
        "Each rank has a part of the gradient, and the parts are averaged over {over} instead of summed",
        "{of_some:?What these weights make is divided by the size of {over} before the ranks' results are summed, and "
        "nothing sums their gradients|The loss is already divided by the size of {over}, and the average over {over} "
        "divides again}",
    )
    how = (
        "pass op=ReduceOp.SUM to the all_reduce over {over}, and don't divide its result",
        "{of_some:?add it once to the summed result, undivided, or sum these gradients over {over}|don't divide the "
        "loss by the size of {over}, or pass op=ReduceOp.SUM to the all_reduce: not both}",
    )
    references = ("gpt-neox#1259",)


class DdpAveragesShares(FactorOfAxes):
    """DistributedDataParallel averages gradients of losses that add up to the whole loss.

    A loss that is divided by a count of all ranks, such as of all words, is its rows' share of the whole loss, and so
    is a sum over rows. DistributedDataParallel always averages, so the loss has to be multiplied by its size.
    """

    size: int
    why = (
        "DistributedDataParallel averages over {over}, and each rank's loss is its rows' share of the whole loss: a "
        "sum over its rows, or a sum or mean that is divided by a count of all ranks"
    )
    how = (
        "multiply the loss that backward runs on by {size}, or divide it by the rank's own count if all ranks have "
        "equally many"
    )


class SummedContributions(Cause, kind="wrong-scale"):
    """A gradient is a whole number of times too large, and no axis that reduces it has the size.

    The usual source is gradient accumulation without a division by the number of micro-batches. A hook or a second
    reduction does the same to a part of the gradients.

    Attributes:
        is_size: Whether an axis of stages has that size, along which nothing is reduced.
    """

    ratio: Fraction
    of_all: bool
    is_size: bool = field(default=False, kw_only=True)
    why = (
        (
            "{of_all:?The gradients of micro-batches add up, and their losses aren't divided by the number of "
            "micro-batches|A hook, or a loss term that reaches only this weight, multiplies the gradient by {ratio}}"
        ),
        "{of_all:?|Sharding replaced the parameter and lost its hook, which divides the gradient by {ratio}}",
        "The code reduces the gradient several times{is_size:?|: no mesh axis has the size {ratio}}",
    )
    how = (
        "{of_all:?divide each micro-batch's loss by the number of micro-batches|remove that factor of {ratio}}",
        "{of_all:?|register the hook after sharding}",
        "all_reduce the gradient once, after the last backward",
    )


class LostContributions(Cause, kind="wrong-scale"):
    """A gradient is a fraction of the right one, and no axis that reduces it has that size.

    The gradient was divided by a number that has nothing to do with the mesh, or a part of the sum is missing. A
    smaller gradient only slows training down, so nothing fails.

    Attributes:
        is_size: Whether an axis of stages has that size, along which nothing is reduced.
    """

    ratio: Fraction
    divisor: Fraction
    is_size: bool = field(default=False, kw_only=True)
    why = (
        "The code divides the gradient by {divisor}{is_size:?|, and no mesh axis has that size}",
        "The sum has only {ratio} of the contributions",
    )
    how = (
        "divide once, by the number of contributions",
        "all_reduce over all ranks that have a contribution",
    )


class ScaledSharedPart(Cause, kind="wrong-scale"):
    """Ranks that share a part of a weight average its gradient, or sum it twice.

    With fewer key and value heads than ranks, several ranks hold the same heads, and each has the contribution of its
    own query heads. The heads' gradient is the sum of these.

    Attributes:
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
    why = (
        "{num_ranks} ranks share {num_parts} parts of the weight, such as key and value heads. The gradient of a part "
        "is {is_sum:?summed twice|averaged} over the {count} ranks that hold the part"
    )
    how = (
        "sum each rank's own contribution once: all_reduce(grad, op=ReduceOp.SUM, group=group), with group, _ = "
        "torch.distributed.new_subgroups_by_enumeration([{groups:4}]){is_sum:?, and no second sum in backward|}"
    )
