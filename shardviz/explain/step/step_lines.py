"""Causes in one line of a training step: of its backward, of what it does to gradients, or of torch's operators."""

from __future__ import annotations

import math

from shardviz.explain.cause import AtLine, AtPlace
from shardviz.relate.tolerance import SINGLE


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


class BackwardLine(AtPlace, kind="wrong-scale"):
    """Backward runs on a number that isn't the loss.

    A loss scale that nothing takes out, losses of micro-batches that nothing divides, or the rank's term of a sum where
    the gradients are averaged. The step returns the right loss, and all gradients have one factor.

    Attributes:
        times: The number by which what it runs on is too large, in the mean over ranks.
        count: How many backward passes the step runs.
    """

    times: float
    count: int = 1
    why = (
        "Backward in {place} runs on {is_of_micro_batches:?the losses of {count} micro-batches, and nothing divides "
        "them by {count}|{times:.5g} times the loss, in the mean over ranks, and nothing makes up for it afterwards}"
    )
    how = (
        "{is_of_micro_batches:?divide each loss by {count} before {place}|call backward() in {place} on the loss "
        "itself, or divide the gradients by {times:.5g} afterwards}"
    )

    @property
    def is_of_micro_batches(self) -> bool:
        """Whether the number is that of the backward passes."""
        return self.count > 1 and math.isclose(self.times, self.count, rel_tol=SINGLE)


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
