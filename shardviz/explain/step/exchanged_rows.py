"""Causes in one line that exchanges, reorders or reads rows."""

from __future__ import annotations

from shardviz.explain.cause import AtLine, Cause
from shardviz.explain.step.lines import WRONG


class StrangeRows(AtLine):
    """A line turns exchanged rows into rows that the unsharded model doesn't have.

    Tokens went to a rank that does not hold their expert, or two operands have their rows in different orders. Each
    row then meets a wrong weight or factor. Shapes are right.

    Attributes:
        with_weight: Whether that multiplies rows with a weight.
        came: The line of the exchange, if the rows are only viewed in another shape since; else empty.
    """

    with_weight: bool
    came: str = ""
    kinds = WRONG
    why = (
        (
            "{came:?{came} brings rows in the order of the ranks that sent them, and on the way to {place} a view "
            "reads them in the order of the weights without a transpose}"
        ),
        "{with_weight:?In {place}, rows meet a different weight than in the unsharded model: the code sends or sorts "
        "them by a different numbering of experts than the one that splits the weights|In {place}, the operands of "
        "{function} hold their rows in different orders: one is in the order of arrival, the other isn't}",
    )
    how = (
        "{came:?view what {came} brings as [ranks, own experts, ...], and transpose before you merge dims}",
        "{with_weight:?choose each row's rank, and its place there, by the split of the weights: block by block or in "
        "turns|index both operands of {function} in {place} with the same order}",
    )


class RowsNotRestored(Cause):
    """Rows are sent back in a different order than they arrived in.

    Each rank sorts the rows that it is sent, by expert. Sorting again instead of undoing the sort gives the right rows
    to the wrong tokens.

    Attributes:
        place: The line that leaves them so, as `moe.py:83`.
        came: The line of the exchange that brings them.
        back: The line of the exchange that sends them back.
    """

    place: str
    came: str
    back: str
    kinds = WRONG
    why = "{place} doesn't restore the order in which {came} brought the rows, so {back} returns them to other tokens"
    how = "undo the sort in {place} by y[order.argsort()] or index_copy(0, order, y); y[order] sorts again"


class ExchangeNotReversed(AtLine):
    """A user's autograd.Function doesn't reverse in backward what its forward exchanges.

    An autograd.Function around a collective needs the reverse collective in backward. A gradient that is passed on
    unchanged, or that is sent from a buffer in a different order, has the right shape.

    Attributes:
        place: The line that applies the function, as `moe.py:83`.
        function: The collective in its forward.
        inner: The line of that.
    """

    inner: str
    kinds = WRONG
    why = (
        "{place} applies a function that exchanges numbers in forward ({function} in {inner}). Its backward doesn't "
        "send the gradients back to where the numbers came from"
    )
    how = (
        "in its backward, call {function} on the contiguous gradient, into a contiguous buffer, with the sizes of "
        "input and output exchanged"
    )


class ForeignNumbersSummed(AtLine):
    """Ranks add up values that they read at indices of other ranks' parts.

    If a vocabulary is split, each rank moves the indices that it does not have into its own part, so reading does
    not raise. It then reads some other row, whose value must be zero before the sum over ranks.

    Attributes:
        place: The line that reads, as `loss.py:40`.
        summed: The line of the sum.
    """

    summed: str
    kinds = WRONG
    why = (
        "{function} in {place} {writes:?puts a number of its own where the rank doesn't have the index|reads a wrong "
        "number for each index that the rank doesn't have}, and {summed} adds it to the number from the rank that has "
        "the index"
    )
    how = (
        "set what {function} {writes:?is given for indices of other ranks to 0 in {place}|reads for indices of other "
        "ranks to 0 before {summed}}: masked_fill(~inside, 0)"
    )

    @property
    def writes(self) -> bool:
        """Whether the function writes at the indices."""
        return self.function.startswith(("scatter", "index_add", "index_copy", "index_put", "setitem"))
