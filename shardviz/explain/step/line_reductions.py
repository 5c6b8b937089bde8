"""Causes in one line that lacks a reduction, or reduces wrongly: in forward, in backward, or of gradients."""

from __future__ import annotations

from shardviz.explain.cause import AtLine, AtPlace, Cause


class UnaveragedLine(AtLine):
    """A line takes the mean of each rank's own part, and nothing averages the means.

    A batch norm that takes its statistics from the rank's own rows does this, and so does any mean over a dim that an
    axis splits. The mean of a part has the shape and about the size of the whole mean, so nothing raises.

    Attributes:
        axes: The axes over which the ranks' results have the right mean.
        size: The number of ranks over them.
        is_same: Whether all ranks compute the same of the mean, so that each has its whole gradient.
        is_own: Whether each rank goes on with its own rows, so that each has its own part of the gradient.
    """

    axes: str
    size: int
    is_same: bool = False
    is_own: bool = False
    why = "{function} in {place} gives each rank the mean of its own part. Nothing averages the means over {axes}"
    how = (
        "all_reduce the result of {function} in {place} with ReduceOp.AVG over {axes}; in backward, "
        "{is_same:?divide its gradient by {size} and don't reduce it, as every rank has the whole gradient|"
        "{is_own:?all_reduce its gradient with ReduceOp.AVG, too, as torch.distributed.nn.functional.all_reduce does|"
        "divide its gradient by {size} if all ranks compute the same afterwards, and all_reduce it with ReduceOp.AVG "
        "if each uses its own part}}"
        "{is_batch_norm:?; or use SyncBatchNorm}"
    )

    @property
    def is_batch_norm(self) -> bool:
        """Whether torch has a module for it."""
        return self.function == "batch_norm"


class MeansSummedLine(AtLine, kind="wrong-scale"):
    """A collective in a line sums the means of ranks' parts, and nothing divides the sum.

    The sum of means is as many times the mean of the whole as there are parts. A sum of sums would be right.

    Attributes:
        mean: The line that takes the means, as `moe.py:83`; empty if that isn't known.
        axes: The axes over which it sums.
        times: The ranks over them.
    """

    mean: str
    axes: str
    times: int
    why = (
        "{function} in {place} sums over {axes} {mean:?the means that {mean} takes of each rank's own part|each rank's "
        "mean of its own part}, so the result is {times} times the mean of the whole"
    )
    how = (
        "{is_over_several:?divide by {times} once, behind the last of these sums|divide the result of {place} by "
        "{times}}, or average there: op=ReduceOp.AVG"
    )

    @property
    def is_over_several(self) -> bool:
        """Whether it sums over one axis after the other."""
        return " and " in self.axes


class ExtremeOfPart(AtLine):
    """A line takes the maximum of each rank's own part, and nothing reduces the ranks' maxima.

    A softmax over a vocabulary in shards is taken relative to the largest logit of all shards, and a scale for rounding
    is made of the largest element of all. The maximum of a part has the right shape, and is right on some rank. The
    same holds for a minimum, a norm and a logsumexp.

    Attributes:
        axis: The axis over which the ranks' results have the right one.
        op: What the right one is of theirs: `max`, `min`, `norm` or `logsumexp`.
    """

    axis: str
    op: str
    why = (
        "{function} in {place} gives each rank the {op} of its own part. Nothing takes the {op} of the ranks' results "
        "over {axis}"
    )
    how = (
        "{is_of_powers:?gather the results of {function} in {place} over {axis} and take their logsumexp: their "
        "maximum by ReduceOp.MAX, and the sum of their exponentials relative to it by ReduceOp.SUM|all_reduce the "
        "{is_norm:?square of the result of {function} in {place} over {axis} with op=ReduceOp.SUM, and take the root|"
        "result of {function} in {place} over {axis} with op=ReduceOp.{op:upper} before anything uses it}}"
    )

    @property
    def is_of_powers(self) -> bool:
        """Whether it is the logarithm of a sum of exponentials, for which there is no reduction."""
        return self.op == "logsumexp"

    @property
    def is_norm(self) -> bool:
        """Whether it is the root of a sum of squares."""
        return self.op == "norm"


class WrongReductionLine(AtLine):
    """A collective in a line runs over the wrong ranks, or with the wrong operation, or twice.

    A reduction returns the same shape whatever it runs over, so nothing raises.

    Attributes:
        ranks: The ranks of its group that the first rank is in.
        axis: The axis over which its input is one term of a sum; empty if that is not known.
        op: The reduction that its input needs, if that is no sum: `max` or `min`.
        averages: Whether its result is the sum, divided by the number of these ranks.
    """

    ranks: tuple[int, ...]
    axis: str = ""
    op: str = ""
    averages: bool = False
    why = (
        "{averages:?{function} in {place} averages over {ranks:ranks} what are terms of a sum over {axis}|{function} "
        "in {place} over {ranks:ranks} doesn't give the whole of its inputs: the group or the op is wrong}"
    )
    how = (
        "{averages:?in {place}, sum the terms: op=ReduceOp.SUM|in {place}, reduce the terms once, with "
        "ReduceOp.{op:?{op:upper}|SUM}, over the group of {axis:?{axis}|what splits them}}"
    )


class CopiesSummedLine(AtLine):
    """A collective in a line sums terms over ranks, some of which have the same term.

    A count of tokens that is summed over all ranks counts a batch once for each rank that has it.

    Attributes:
        ranks: The ranks of its group that the first rank is in.
        axis: The axes over which its input is one term of a sum.
        copies: The other axes of the group.
        times: How often each term counts.
    """

    ranks: tuple[int, ...]
    axis: str
    copies: str
    times: int
    why = (
        "{function} in {place} sums over {ranks:ranks}. Ranks along {copies} have the same term of the sum over "
        "{axis}, so each term counts {times} times"
    )
    how = "in {place}, sum over the group of {axis} alone"


class RepeatedReductionLine(AtLine, kind="wrong-scale"):
    """A collective in a line sums a value that is already the whole sum.

    Two layers of code each sum the terms: a row-parallel layer and the block around it, or a module and a hook.
    Every rank adds equal numbers, so the result is as many times too large as there are ranks.

    Attributes:
        times: By what the result is too large.
        ranks: The ranks of its group that the first rank is in.
    """

    times: int
    ranks: tuple[int, ...]
    why = (
        "{function} in {place} sums over {ranks:ranks} a value that is already the whole, so the result is {times} "
        "times too large"
    )
    how = "remove {function} in {place}, or the sum before it"


class UnsummedLineBackward(AtPlace, kind="unreduced-gradient"):
    """Nothing sums a gradient that each rank computes for its own part only.

    A different line uses the same tensor whole, as a residual does, or the backward of a branch beside it sums. Both
    send back a whole gradient. The tensor then gets neither the whole gradient nor a term of it, and a sum of the
    weights' gradients after backward doesn't repair that.

    Attributes:
        is_alone: Whether no other use is known to add a whole gradient.
    """

    axis: str
    is_alone: bool = False
    why = (
        "{place} sends back each rank's own part of a gradient. Nothing sums the parts over {axis}{is_alone:?| before "
        "a different use adds its whole gradient, as a residual does, or a branch whose backward sums}"
    )
    how = (
        "sum the gradient over {axis} at the input of {place}: a torch.autograd.Function that returns its input in "
        "forward and all_reduces in backward (ColwiseParallel)"
    )


class WholeGradientSummedAgain(AtPlace):
    """A backward sums over ranks a gradient that every rank already has whole.

    A tensor that each rank uses for its own part gets a function whose backward sums the ranks' gradients. A layer
    that every rank computes in full, such as a shared expert, sends back its whole gradient on every rank. If it
    reads the same tensor, the sum counts its gradient once for each rank. Losses and the layer's own weights stay
    right.

    Attributes:
        place: The line whose backward sums, as `moe.py:83`.
        reader: The line that hands back the whole gradient.
        times: The ranks along it.
    """

    reader: str
    axis: str
    times: int
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
    why = (
        "{part:?Each rank along {axis} uses {part} of {function} in {place} for its own part, and nothing sums its "
        "gradient over {axis} before it joins the whole gradients of other parts|{axis:?Each rank along {axis} uses "
        "the result of {place} differently, and nothing sums the result's gradient over {axis}|{place} gets a right "
        "gradient and sends back a wrong one. Either ranks use what it gets for their own parts, and no backward sums "
        "its gradient, or the backward of {function} doesn't match its forward}}"
    )
    how = (
        "{part:?sum the gradient of {part} over {axis}, and no other: pass it through a torch.autograd.Function that "
        "returns its input in forward and all_reduces in backward|{axis:?all_reduce the gradient over {axis} in the "
        "backward of {place}|check {place}: a tensor that all ranks have and each uses for its own part needs a sum in "
        "backward; terms of a sum need none}}"
    )


class HaloNotSentBack(AtLine):
    """A rank uses elements of another rank's part, and doesn't send their gradient back.

    A convolution or a shift over a split sequence needs the last elements of the rank before. The function that
    fetches them returns them in front of the rank's own part. Its backward must send the gradient of what it fetched
    to where that came from. Without this the loss is right, and gradients are off by what comes back from the border.

    Attributes:
        dim: The dim that is split.
        first: The first of the elements on `rank` that another rank uses, too.
        last: The last of them.
        other: The rank that uses them.
    """

    dim: int
    first: int
    last: int
    rank: int
    other: int
    why = (
        "Through {place}, rank {other} uses {elements} of dim {dim} of rank {rank}'s part, too. Its backward doesn't "
        "send back the gradient of what came from another rank"
    )
    how = (
        "in the backward of {place}, send the gradient of what came from another rank back to that rank, and add it to "
        "the gradient of the elements that it has"
    )

    @property
    def elements(self) -> str:
        """The elements in words."""
        return f"elements {self.first} to {self.last}" if self.last > self.first else f"element {self.first}"


class UnreducedGather(AtPlace):
    """A gather's backward keeps a rank's part of its own gradient, and drops what others send.

    All ranks get the gathered tensor, and each uses it for its own rows: its gradient is a term of a sum on every rank.
    A gather's backward is a reduce-scatter. `full_tensor()` and `to_local()` take each rank's gradient for the whole
    unless `grad_placements` says otherwise. The forward and the loss are right.

    Attributes:
        is_dtensor: Whether a DTensor gathers, and no function of the user's.
    """

    axis: str
    is_dtensor: bool
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


class GradientLine(AtLine):
    """A line of the training step leaves wrong gradients.

    The backward leaves gradients that only need their sum or mean over ranks, or a number taken out. A collective over
    the wrong ranks mixes shards, a sum that nothing divides leaves a multiple, and so does a second division. Shapes
    and the loss are right.

    Attributes:
        ranks: The ranks of the collective that it is, of the first rank's group; empty if it is none.
        times: By what it leaves the gradient too large; 0 if it leaves something else.
        before: By what the backward left it too large, in the mean over ranks.
        runs: How often it reduced the same gradient, if that was right before the last time; else empty.
    """

    ranks: tuple[int, ...] = ()
    times: float = 0
    before: float = 1
    runs: str = ""
    kinds = ("wrong-scale", "wrong-value", "unreduced-gradient")
    why = (
        "{runs:?{place} reduces this gradient {runs} times, and it is right before the last: a loop over modules meets "
        "a tied weight under each of its names, or the loop runs again|{times:?{ranks:?{function} in {place} sums "
        "gradients over {ranks:ranks} that it should average, or sums what is the whole, and nothing divides them "
        "afterwards|{place} multiplies or divides the gradients by a wrong number}|{function} in {place} combines "
        "gradients that don't belong together: the group or the op is wrong, or the ranks hold different shards}}"
    )
    how = (
        "{runs:?reduce each gradient once: loop over model.parameters(), which has a tied weight once|{times:?{ranks:?"
        "pass {place} op=ReduceOp.AVG, divide by the number of ranks, or leave gradients out that are the whole|divide "
        "by {times:.5g} times what {place} divides by now, or leave it out}|reduce in {place} only over ranks that "
        "hold the same shard, once}}"
    )


class SummedLossAveraged(AtPlace, kind="wrong-scale"):
    """The loss is summed over ranks in forward, and their gradients are averaged.

    Each rank's own loss is a term of the sum, and the backward of the sum returns the gradient unchanged. FSDP and DDP
    then average what should be added up. The loss is right, and all gradients are too small by the number of ranks.

    Attributes:
        place: The line that sums, as `train.py:30`.
    """

    axes: str
    why = (
        "{place} sums the ranks' losses over {axes}, with a backward that returns the gradient unchanged, and the "
        "gradients are then averaged over {axes} instead of summed"
    )
    how = (
        "run backward on the rank's own loss times the number of ranks along {axes}, and sum the loss in {place} for "
        "the log only"
    )


class LeftOutOfReduction(AtPlace, kind="unreduced-gradient"):
    """The training loop reduces other gradients, and one never reaches the reduction.

    Gradients are reduced in buckets, and the last bucket is not full when the loop ends. A list of parameters, a
    condition or a name leaves one out. Each rank then steps with its own part of the gradient.

    Attributes:
        place: The line that reduces the others, as `train.py:41`.
    """

    axis: str
    why = "{place} reduces other gradients over {axis}. The step never passes this gradient to it"
    how = "pass every gradient to {place}, the last bucket too, and those that a condition or a list leaves out"


class NarrowReduction(AtLine, kind="unreduced-gradient"):
    """The training loop reduces a gradient over some ranks and leaves out an axis that needs it.

    A reduction over the data-parallel group leaves out the axis that splits the sequence, or the reverse. The gradient
    is then equal along one axis and differs along the other.

    Attributes:
        place: The line that reduces it, as `train.py:41`.
        ranks: The ranks that it reduces over, of the first rank's group.
    """

    ranks: tuple[int, ...]
    axis: str
    why = "{function} in {place} runs over {ranks:ranks} and leaves {axis} out"
    how = "reduce over {axis} in {place}, too, by a group that joins both axes or by a second reduction"


class ReductionNotStored(AtPlace, kind="unreduced-gradient"):
    """The training loop reduces a copy of a gradient, and the optimizer reads the gradient.

    Gradients are reduced in a flat bucket and copied back. `reshape(-1)` and `flatten()` return a copy if a gradient
    isn't contiguous, such as a transposed weight's, and what is written into that copy is lost.

    Attributes:
        place: The line that reduces the copy, as `train.py:41`.
        written: The line that writes the result into a copy; empty if nothing writes it.
    """

    axis: str
    written: str = ""
    why = (
        "{written:?{written} writes what {place} reduces over {axis} into a copy of the gradient: reshape(), flatten() "
        "and contiguous() copy a tensor that isn't contiguous|{place} reduces a copy of the gradient over {axis}. "
        "Nothing writes the result into .grad}"
    )
    how = (
        "{written:?in {written}, write into the gradient itself: grad.copy_(part.view(grad.shape))|copy the result of "
        "{place} into .grad before the optimizer steps}"
    )


class LocalWeight(AtPlace, kind="unreduced-gradient"):
    """A module takes its part of a DTensor weight without naming the gradient's placements.

    `to_local()` without `grad_placements` labels the gradient with the weight's placements. If each rank uses a
    replicated weight for its own rows or tokens, its gradient is one term of a sum, and the label says it is the whole.
    """

    axis: str
    why = (
        "to_local() in {place} has no grad_placements. Its backward takes each rank's gradient for the whole, and "
        "nothing sums it over {axis}"
    )
    how = "in {place}, call to_local(grad_placements=[Partial()]), with Partial() for {axis}"


class WrongOperator(AtLine):
    """torch gives something else of DTensors than of the whole tensors.

    A function of DTensors runs on each rank's part, and a rule of torch's says what the parts' results are of the
    whole. Some rules are wrong, and nothing raises. In torch 2.13 the mean of `mse_loss`, `smooth_l1_loss`,
    `huber_loss`, `soft_margin_loss` and `binary_cross_entropy` has a backward that divides by the size of the rank's
    part, so that gradients are as many times too large as there are parts; `cumsum(-1)` and `logcumsumexp(-1)` run
    over each part alone. `shardviz audit` tries such functions on the installed torch.

    Attributes:
        labels: The placements of what it is given.
        is_backward: Whether its forward is right, and its backward is wrong.
    """

    labels: str
    is_backward: bool = False
    why = (
        "torch's rule for {is_backward:?the backward of }{function} with {labels} is wrong in this version: what it is "
        "given in {place} is right, and what it gives is not"
    )
    how = (
        "in {place}, {is_mean:?pass reduction='sum' and divide by the whole's number of elements; or }redistribute "
        "what {function} is given to Replicate() before. Report it to PyTorch"
    )

    @property
    def is_mean(self) -> bool:
        """Whether it is a loss whose backward divides by a number of elements."""
        return self.is_backward and ("loss" in self.function or "cross_entropy" in self.function)
