"""Causes of results off by any other number, or changed by one operation: a clip, a rounding, a cast, a transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardviz.explain.cause import Cause

if TYPE_CHECKING:
    from fractions import Fraction


class ScaledBackward(Cause, kind="wrong-scale"):
    """Backward runs on a different loss than the step returns, so all gradients have one factor.

    A loss scale that is never taken out, a weight of the loss, or micro-batches that are not divided all do this. The
    logged loss is right, and all gradients differ from the right ones by the same factor.

    Attributes:
        runs: How many micro-batches the step ran; None if that is not known.
        loss: `unseen` if nobody recorded the loss, so that it may have the factor, too.
        ranks: How many ranks of a job, times `runs`, are the factor; None if none are.
    """

    factor: Fraction | float
    runs: int | None = None
    loss: Literal["", "unseen"] = ""
    ranks: int | None = None
    why = (
        (
            "{ranks:?The loss is multiplied by the number of ranks, {ranks}, and not divided by the number of "
            "micro-batches, {runs}. transformers' Trainer does this if forward takes **kwargs: it then expects a loss "
            "that is summed and divided by num_items_in_batch|{is_of_micro_batches:?The step runs {runs} "
            "micro-batches, and {is_larger:?nothing divides their losses by {runs}|the loss is divided by {runs} "
            "twice{loss:?, as by the code and by a library (gradient_accumulation_steps)|}}|}}"
        ),
        (
            "{elements:?If the loss has the factor, too, it is {is_larger:?a sum where the other job's is a mean|a "
            "mean where the other job's is a sum}, over {elements} elements|}"
        ),
        (
            "Backward runs on {factor:times} the returned loss: {runs:?a weight{is_larger:? or a loss scale}|"
            "{is_larger:?a loss scale, a weight, or undivided losses of micro-batches|a weight, or a second division "
            "by the number of micro-batches}}{loss:?; or something multiplies the gradients after it, as clipping to "
            "another norm does|}"
        ),
    )
    how = (
        (
            "{ranks:?set model.accepts_loss_kwargs = False, or divide the summed loss by num_items_in_batch in "
            "forward; without transformers, divide by both numbers|{is_of_micro_batches:?divide each micro-batch's "
            "loss by {runs}{is_larger:?|, once}|}}"
        ),
        "{elements:?compare the losses that both jobs print, and what each divides by (reduction=)|}",
        "{is_larger:?unscale the gradients, or divide each micro-batch's loss by their number|call backward() on the "
        "returned loss}",
    )

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


class ScaledReduction(Cause, kind="wrong-scale"):
    """Backward runs on the loss itself, and hooks multiply all gradients by one factor.

    A communication hook of DDP, or a hook of parameters, divides before its sum and again after it, or not at all.

    Attributes:
        is_of_ddp: Whether DDP reduces the gradients.
    """

    factor: Fraction | float
    is_of_ddp: bool = False
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


class ClippedByOwnNorms(Cause):
    """Each rank clips its gradients by a norm of its own, in a call that was seen.

    Clipping before the gradients are reduced scales each rank's term by another number, and the mean of clipped terms
    is not the clipped mean. Shards that are plain tensors have a norm of their own, too.

    Attributes:
        norms: The norm by which each rank clipped, as text.
        is_reduced: Whether all ranks have equal gradients in the end: they were reduced after clipping.
    """

    norms: tuple[str, ...]
    limit: float
    is_reduced: bool
    kinds = ("wrong-value", "wrong-scale")
    why = (
        "clip_grad_norm_ to {limit:g} ran on each rank with the norm of its own gradients ({norms:4})"
        "{is_reduced:?, before they were reduced: the mean of clipped gradients is not the clipped mean|}"
    )
    how = (
        "{is_reduced:?reduce the gradients first, then clip them|clip by the norm of all gradients: all_reduce the sum "
        "of squares, with each shard counted once, before the square root}"
    )


class ScaledByOwnCount(Cause, kind="wrong-scale"):
    """Each rank multiplies or divides a result by a number that it counted in its own part.

    Token counts, norms and means differ between ranks whenever their parts differ. Code that is right on one process
    then normalizes every rank's result differently.
    """

    why = "Each rank multiplies or divides by a number of its own part: a token count, a norm or a mean"
    how = "all_reduce the count, the sum or the squares behind that number before it is used"


class LossScaleLeft(Cause, kind="wrong-scale"):
    """Some ranks' gradients still carry the loss scale that the other ranks took out.

    Unscaling stands under a condition on the rank, or in code that only some ranks reach. The gradients differ by a
    large power of two.
    """

    why = (
        "The loss was scaled before backward (GradScaler), and only the other ranks took the scale out of their "
        "gradients"
    )
    how = "call scaler.unscale_(optimizer) on every rank, before anything reads the gradients"


class ScaledInStep(Cause, kind="wrong-scale"):
    """A result has the same factor on every rank, which is not a ratio of small numbers.

    The sharded step scales something that the unsharded step doesn't. Clipping, a loss scale or a weight in the loss
    does this on purpose; anything else is an error. If other gradients are right, the loss is right too, because all
    gradients come from it.

    Attributes:
        of_all: Whether all gradients have the factor; true for results that are not gradients.
    """

    of_all: bool
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


class RoundedNumber(Cause, kind="wrong-scale"):
    """One number that the loss is divided or multiplied by is rounded when ranks sum it.

    bfloat16 has no odd numbers above 256 and float16 none above 2,048, so a count of tokens that is sent in the dtype
    of the activations is another number when it arrives. All gradients are off by one factor near 1, and so is a loss
    that isn't rounded itself.

    Attributes:
        dtype: The dtype in which it is sent.
        axes: The axes of the mesh that it is summed over.
    """

    dtype: str
    axes: tuple[str, ...]
    why = (
        "The step sums one number over {axes:?{axes}|ranks} in {dtype}, which rounds it, and all gradients are "
        "divided or multiplied by it"
    )
    how = "send the number as an integer (torch.int64) or in float32"


class ScaledForward(Cause, kind="wrong-scale"):
    """A result of forward has the same factor on every rank, and no axis has that size.

    The sharded model multiplies by a number that the unsharded one does not have: a quantization scale, or a size
    or count of a rank's own part. If the loss and all gradients have a factor too, it is in what they share.
    """

    why = (
        "The sharded model multiplies by a number in forward that the unsharded model doesn't have, such as a "
        "quantization scale, or a size or count of the rank's own part"
    )
    how = "look for that number in forward and in the loss, and take it from the whole tensor or batch"


class SmallFactor(Cause, kind="wrong-scale"):
    """A gradient is off by a factor close to 1 from what its module's activations give.

    In narrow dtypes such a factor hides in the rounding between two steps. It shows only if the gradient is computed
    again from the module's own input and output gradient.
    """

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
        "before the square root {copied:?count the squares of {copied} on one rank along {copied_along} "
        "only{left:?, and }}{left:?all_reduce {copied:?those|the squares} of {left} over {left_along}}; for gradients "
        "that are DTensors torch.nn.utils.get_total_norm does that"
    )
    references = ("RLinf#1558", "torchtune#2420")


class LossTimesOwnNumber(Cause):
    """Ranks, or micro-batches, multiply their losses by numbers of their own.

    A loss scale of each rank's own, or the last of several micro-batches whose loss isn't divided by their number:
    rows count unequally in every gradient, and each output is right. The numbers are not the shares of one count,
    as those of `mean-of-means` are.

    Attributes:
        is_of_parts: Whether micro-batches of one rank are multiplied by different numbers.
    """

    is_of_parts: bool = False
    kinds = ("wrong-scale",)
    why = (
        "{is_of_parts:?The micro-batches of a rank|Ranks} multiply their losses, or the gradients that these send back "
        "to the model's output, by different numbers. These are not the shares of one count"
    )
    how = (
        "multiply or divide by one number {is_of_parts:?in all micro-batches|on all ranks}: look between the model's "
        "output and backward() for a loss scale, a weight or a divisor that {is_of_parts:?some micro-batches have|each "
        "rank makes by itself}"
    )


class RowsTimesOwnNumbers(Cause):
    """Each row of the batch sends back its right gradient times a number of its own.

    Advantages and rewards are normalized by the mean and standard deviation of a group, classes are weighed by their
    counts, and importance weights are divided by their sum. Taken over a rank's own rows, these statistics weigh each
    row differently. Outputs are right then, and each row's gradient has the right direction and a wrong size.
    """

    kinds = ("wrong-scale",)
    why = (
        "The loss multiplies each row by a number that a rank most likely computes from its own rows: an advantage or "
        "a reward less their mean and over their standard deviation, or a weight over the sum of weights"
    )
    how = "compute the means, deviations, sums and counts behind that number from all ranks' rows: all_reduce them"


class AddedNumber(Cause):
    """The same number is added to every element of a result.

    Shapes stay the same, and a later normalization or softmax can cancel the number.
    """

    number: float
    ranks: tuple[int, ...]
    of_all: bool
    why = (
        "{of_all:?The sharded code|The code on {ranks:ranks}} adds {number:.5g} to every element, and the unsharded "
        "model doesn't"
    )
    how = "look for an offset, an epsilon or a shift of positions of {number:.5g} that only the sharded code has"


class OnlyZerosThere(Cause):
    """Ranks return zeros, and the unsharded model returns other values.

    A weight that was created and never loaded, a mask over all of a rank's part, or an index outside the part gives
    zeros of the right shape.
    """

    ranks: tuple[int, ...]
    of_all: bool
    why = (
        "{of_all:?All ranks multiply|The code on {ranks:ranks} multiplies} by a weight or buffer that nothing filled",
        "A mask or an index covers none of the rank's part",
    )
    how = (
        "print the weights and buffers that the code reads there, and fill those that are zero",
        "compute masks and indices from the rank's own part",
    )


class RoundedResult(Cause):
    """A result is the unsharded model's rounded to a narrower dtype.

    Autocast, a mixed-precision policy or a cast around a collective rounds the result. A later cast to the wide dtype
    hides it.
    """

    dtype: str
    why = (
        "The sharded step rounds the result to {dtype}, and the unsharded model doesn't: autocast, a "
        "MixedPrecisionPolicy, or a cast around a collective"
    )
    how = "use the same dtypes in both, or remove the cast to {dtype}"


class ScaleOfPart(Cause):
    """Ranks cast a tensor to float8 with the scale of their own part, not of the whole.

    A scale brings the largest number of a tensor to the largest that float8 has. If each rank takes the largest of its
    own shard, each shard is rounded with a scale of its own. The result is near enough for any tolerance of float8.

    Attributes:
        largest: What the scale makes of the largest number.
        axes: The axes that split what is cast.
    """

    modules: tuple[str, ...]
    dtype: str
    largest: float
    axes: str
    why = (
        "Each rank scales its own part of what {modules:3} {modules:1?casts|cast} to {dtype} by the largest number of "
        "that part. The parts are rounded with different scales, and the unsharded model has one scale for the whole"
    )
    how = "all_reduce the largest magnitude (amax) over {axes} with ReduceOp.MAX before it becomes a scale"


class UnlikeScale(Cause):
    """Ranks cast a tensor to float8 with a different scale than the unsharded model's.

    The largest magnitude of the whole is the maximum of the ranks' largest. Their sum, the default of
    `all_reduce`, is larger, so the scale leaves most numbers of float8 unused.

    Attributes:
        held: What the scale makes of the largest number.
        wanted: What that of the unsharded model makes of it.
        op: With which op the ranks' largest magnitudes make this scale; empty if none of them does.
        axes: The axes that split what is cast.
    """

    modules: tuple[str, ...]
    dtype: str
    held: float
    wanted: float
    op: str
    axes: str
    why = (
        "{op:?The ranks' largest magnitudes (amax) are reduced over {axes} with {op}, not with MAX. }The scale brings "
        "the largest number that {modules:3} {modules:1?casts|cast} to {dtype} to {held:.5g}, and that of the "
        "unsharded model to {wanted:.5g}"
    )
    how = "make the scale from the whole tensor's largest magnitude (amax): all_reduce that of each part with MAX"


class TransposedResult(Cause, kind="misordered"):
    """A result has its dims exchanged.

    Code that splits or gathers along a dim other than the first transposes before and after. If one transpose is
    missing and the dims have equal sizes, the shape is right.

    Attributes:
        dims: For each dim, the dim of the unsharded model's result that it is.
    """

    dims: tuple[int, ...]
    why = "The dims are in the order {dims}: the code doesn't undo a transpose before or after a collective"
    how = "transpose back by the inverse permutation, or leave out both transposes and pass the dim to the collective"


class NotFiniteAfterStep(Cause):
    """A weight or an optimizer's state has nan or infinite elements after the step.

    The gradients are finite, and so is what the unsharded model has. A part of a weight may be all zeros or empty where
    the whole isn't: its norm or its mean is then zero, or of nothing.
    """

    why = (
        "The optimizer divides by a norm, a mean or a second moment that is zero in this rank's part",
        "The optimizer's state was loaded or cast with such elements",
        "Code that runs after the step wrote them",
    )
    how = (
        "reduce the norm or the mean over the ranks that have parts, and add eps before dividing",
        "look at the optimizer's state on these ranks before the step",
        "look for writes to the weight between the steps",
    )
