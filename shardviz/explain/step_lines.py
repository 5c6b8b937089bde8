"""Causes that lie in one line of a training step, in its backward or in what it does to gradients."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class GradientLine(Cause):
    """A line of the training step leaves wrong gradients.

    The backward leaves gradients that only need their sum or mean over ranks, or a number taken out. A collective over
    the wrong ranks mixes shards, a sum that nothing divides leaves a multiple, and so does a second division. Shapes
    and the loss are right.

    Attributes:
        place: The line, as `train.py:40`.
        function: What it calls.
        ranks: The ranks of the collective that it is, of the first rank's group; empty if it is none.
        times: By what it leaves the gradient too large; 0 if it leaves something else.
        before: By what the backward left it too large, in the mean over ranks.
    """

    place: str
    function: str
    ranks: tuple[int, ...] = ()
    times: float = 0
    before: float = 1
    kinds = ("wrong-scale", "wrong-value", "unreduced-gradient")
    why = (
        "{times:?{ranks:?{function} in {place} sums gradients over {ranks:ranks} that it should average, or sums what "
        "is the whole, and nothing divides them afterwards|{place} multiplies or divides the gradients by a wrong "
        "number}|{function} in {place} combines gradients that don't belong together: the group or the op is wrong, or "
        "the ranks hold different shards}"
    )
    how = (
        "{times:?{ranks:?pass {place} op=ReduceOp.AVG, divide by the number of ranks, or leave gradients out that are "
        "the whole|divide by {times:.5g} times what {place} divides by now, or leave it out}|reduce in {place} "
        "only over ranks that hold the same shard, once}"
    )


class BackwardLine(Cause):
    """Backward runs on a number that isn't the loss.

    A loss scale that nothing takes out, losses of micro-batches that nothing divides, or the rank's term of a sum where
    the gradients are averaged. The step returns the right loss, and all gradients have one factor.

    Attributes:
        place: The line, as `train.py:36`.
        times: The number by which what it runs on is too large, in the mean over ranks.
        count: How many backward passes the step runs.
    """

    place: str
    times: float
    count: int = 1
    kinds = ("wrong-scale",)
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
        return self.count > 1 and abs(self.times - self.count) < 1e-6 * self.count
