"""Causes in one line that reduces over the wrong ranks, too often or with another op, or that lacks its reduction."""

from __future__ import annotations

from shardviz.explain.cause import AtLine
from shardviz.explain.step.lines import WRONG


class UnaveragedLine(AtLine):
    """A line takes the mean of each rank's own part, and nothing averages the means.

    A batch norm that takes its statistics from the rank's own rows does this, and so does any mean over a dim that an
    axis splits. The mean of a part has the shape and about the size of the whole mean, so nothing raises.

    Attributes:
        axes: The axes over which the ranks' results have the right mean.
    """

    axes: str
    kinds = WRONG
    why = "{function} in {place} gives each rank the mean of its own part. Nothing averages the means over {axes}"
    how = (
        "all_reduce the result of {function} in {place} with ReduceOp.AVG over {axes}, with a backward that averages, "
        "too{is_batch_norm:?; or use SyncBatchNorm}"
    )

    @property
    def is_batch_norm(self) -> bool:
        """Whether torch has a module for it."""
        return self.function == "batch_norm"


class ExtremeOfPart(AtLine):
    """A line takes the maximum of each rank's own part, and nothing reduces the ranks' maxima.

    A softmax over a vocabulary in shards is taken relative to the largest logit of all shards, and a scale for rounding
    is made of the largest element of all. The maximum of a part has the right shape, and is right on some rank. The
    same holds for a minimum and for a logsumexp.

    Attributes:
        axis: The axis over which the ranks' results have the right one.
        op: What the right one is of theirs: `max`, `min` or `logsumexp`.
    """

    axis: str
    op: str
    kinds = WRONG
    why = (
        "{function} in {place} gives each rank the {op} of its own part. Nothing takes the {op} of the ranks' results "
        "over {axis}"
    )
    how = (
        "{is_of_powers:?gather the results of {function} in {place} over {axis} and take their logsumexp: their "
        "maximum by ReduceOp.MAX, and the sum of their exponentials relative to it by ReduceOp.SUM|all_reduce the "
        "result of {function} in {place} over {axis} with op=ReduceOp.{op:upper} before anything uses it}"
    )

    @property
    def is_of_powers(self) -> bool:
        """Whether it is the logarithm of a sum of exponentials, for which there is no reduction."""
        return self.op == "logsumexp"


class WrongReductionLine(AtLine):
    """A collective in a line runs over the wrong ranks, or with the wrong operation, or twice.

    A reduction returns the same shape whatever it runs over, so nothing raises.

    Attributes:
        ranks: The ranks of its group that the first rank is in.
        axis: The axis over which its input is one term of a sum; empty if that is not known.
        op: The reduction that its input needs, if that is no sum: `max` or `min`.
    """

    ranks: tuple[int, ...]
    axis: str = ""
    op: str = ""
    kinds = WRONG
    why = "{function} in {place} over {ranks:ranks} doesn't give the whole of its inputs: the group or the op is wrong"
    how = (
        "in {place}, reduce the terms once, with ReduceOp.{op:?{op:upper}|SUM}, over the group of {axis:?{axis}|what "
        "splits them}"
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
    kinds = WRONG
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
