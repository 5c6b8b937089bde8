"""Causes of results that are scaled by a number of no axis: clipping, a norm, a loss scale, a count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.explain.cause import Cause
from shardviz.explain.factors import KNOWN

if TYPE_CHECKING:
    from fractions import Fraction


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
    kinds = ("wrong-scale",)
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
        of_all: Whether all gradients have the factor, or it is no gradient.
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
    kinds = ("wrong-scale",)
    why = (
        "{copied:?Ranks along {copied_along} have copies of the gradient of {copied}, and each copy was "
        "counted{left:?; }}{left:?{left_along} splits the gradient of {left}, and the other parts were left out}"
    )
    how = (
        "for each gradient all_reduce the squares over the axes that split it, and no others, before the root; "
        "torch.nn.utils.get_total_norm does so for DTensors"
    )
    references = ("RLinf#1558", "torchtune#2420")
