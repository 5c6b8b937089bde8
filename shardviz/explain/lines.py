"""Causes that lie in one line of the user's code: the first of a module at which ranks go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.explain.cause import Cause

if TYPE_CHECKING:
    from shardviz.explain.finding import Kind

WRONG: tuple[Kind, ...] = ("wrong-value", "wrong-scale", "unreduced-output", "unreduced-gradient")


class WrongLine(Cause):
    """A line computes a different result from a rank's part than from the whole.

    The line's inputs are right: the unsharded model's, or each rank's part of them. The function takes statistics of
    the part alone, counts from the part's first element, mixes up the sizes of the whole and of a shard, or takes the
    first part on every rank.

    Attributes:
        place: The line, as `moe.py:83`.
        function: What it calls.
        given: What each rank passes to it, such as a part or a term; empty if that is no tensor.
    """

    place: str
    function: str
    given: str = ""
    kinds = WRONG
    why = (
        "{function} in {place} gets {given:?{given}|a rank's own sizes and offsets}, and its result doesn't fit the "
        "unsharded model's, which comes from the whole"
    )
    how = (
        "gather or reduce the input of {function} before {place}, or use the whole tensor's sizes and the rank's own "
        "offset there"
    )


class WrongLines(Cause):
    """One of several lines computes a different result from a rank's part than from the whole.

    Between the two lines ranks compute with numbers that the unsharded model doesn't have, such as offsets of their
    part. The first line's inputs are right, and the last line's result is wrong.

    Attributes:
        first: The first of the lines, as `moe.py:83`.
        last: The last of them.
    """

    first: str
    last: str
    kinds = WRONG
    why = "Every rank gives {first} the right input, whole or its own part, and {last} returns a wrong result"
    how = (
        "check {first} to {last}: first the group and op of each collective, then the sizes and offsets of the rank's "
        "part"
    )


class UnsummedLine(Cause):
    """A line makes one term of a sum on each rank, and a later one uses it as the whole.

    A product over a split dim gives terms of a sum. Terms have the shape of the sum, so nothing raises: a bias is added
    on every rank, or a function that is not linear sees one term alone.

    Attributes:
        terms: The line that makes the terms, as `moe.py:83`.
        reader: The line that uses them; empty if the module returns them.
        axis: The axis of the sum.
    """

    terms: str
    reader: str
    axis: str
    kinds = WRONG
    why = "Nothing sums the result of {terms} over {axis} before {reader:?{reader} uses it|the module returns it}"
    how = (
        "all_reduce the result of {terms} over {axis} before {reader:?{reader}|the module returns it}; its backward "
        "must return the gradient unchanged if all ranks compute the same afterwards, and sum it if each uses its own "
        "part"
    )


class WrongReductionLine(Cause):
    """A collective in a line runs over the wrong ranks, or with the wrong operation, or twice.

    A reduction returns the same shape whatever it runs over, so nothing raises.

    Attributes:
        place: The line, as `moe.py:83`.
        function: The collective.
        ranks: The ranks of its group that the first rank is in.
    """

    place: str
    function: str
    ranks: tuple[int, ...]
    kinds = WRONG
    why = "{function} in {place} over {ranks:ranks} doesn't give the whole of its inputs: the group or the op is wrong"
    how = "in {place}, reduce the terms once, with ReduceOp.SUM, over the group of the axis that splits them"


class RepeatedReductionLine(Cause):
    """A collective in a line sums a value that is already the whole sum.

    Two layers of code each sum the terms: a row-parallel layer and the block around it, or a module and a hook. Every
    rank adds equal numbers, so the result is as many times too large as there are ranks.

    Attributes:
        place: The line, as `moe.py:83`.
        function: The collective.
        times: By which factor the result is too large.
        ranks: The ranks of its group that the first rank is in.
    """

    place: str
    function: str
    times: int
    ranks: tuple[int, ...]
    kinds = ("wrong-scale",)
    why = (
        "{function} in {place} sums over {ranks:ranks} what is already the whole: the sum is taken twice, and the "
        "result is {times} times too large"
    )
    how = "remove {function} in {place}, or the sum before it"


class UnsummedLineBackward(Cause):
    """A line sends back each rank's part of a gradient, and nothing sums the parts.

    Another line uses the whole tensor, as a residual does, and sends back the whole gradient. The sum of both is
    neither whole nor a term, so no reduction of weights' gradients after backward repairs it.

    Attributes:
        place: The line, as `moe.py:83`.
        axis: The axis of the missing sum.
    """

    place: str
    axis: str
    kinds = ("unreduced-gradient",)
    why = (
        "{place} sends back each rank's own part of a gradient. Nothing sums the parts over {axis} before another line "
        "adds its whole gradient, as a residual does"
    )
    how = (
        "sum the gradient over {axis} at the input of {place}: a torch.autograd.Function that returns its input in "
        "forward and all_reduces in backward (ColwiseParallel)"
    )


class WrongLineBackward(Cause):
    """A line's forward is right, and its backward returns a wrong gradient.

    An operation in the line has a backward that does not fit its forward, or none. Parts and terms that ranks use
    differently need a sum in backward; terms of one sum need none.

    Attributes:
        place: The line, as `moe.py:83`.
        function: What it calls.
        axis: The axis of a sum that is missing in backward; empty if it is something else.
    """

    place: str
    function: str
    axis: str = ""
    kinds = WRONG
    why = (
        "{axis:?Each rank along {axis} uses the result of {place} differently, and nothing sums the result's gradient "
        "over {axis}|The backward of {function} in {place} doesn't match its forward}"
    )
    how = (
        "{axis:?all_reduce the gradient over {axis} in the backward of {place}|check {place}: a tensor that all ranks "
        "have and each uses for its own part needs a sum in backward; terms of a sum need none}"
    )
