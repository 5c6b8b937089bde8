"""Causes in one line of the user's code, the first in a module at which ranks go wrong."""

from __future__ import annotations

from typing import Literal

from shardviz.explain.cause import WRONG, AtLine, AtPlace, Cause

INDEXING = ("getitem", "index_select", "gather", "take_along_dim", "index_copy", "index_add", "scatter", "scatter_add")
"""Functions that take or write slices at the places of an index."""


SELECTING = (*INDEXING[:4], "select", "narrow", "split", "chunk", "unbind", "embedding")
"""Functions that return some slices of what they are given."""

DRAWS = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")
"""Functions that draw random numbers."""

ELEMENTWISE = ("add", "sub", "mul", "div", "maximum", "minimum", "where")
"""Functions of two tensors, element by element."""


LACKS = ("itself", "factor", "term", "numbers")
"""What a tensor is for a line that lacks it: an operand, a factor of one, or a term of one; or numbers of a factor."""

Lack = Literal["itself", "factor", "term", "numbers"]


class WrongLine(AtLine):
    """A line goes wrong because each rank runs it on its own part.

    The inputs of the line match the unsharded model's, whole or as each rank's part. The function is wrong for a
    part: it takes statistics of the part alone, counts from the part's first element, uses the whole tensor's sizes
    for a shard, or takes the first part on every rank.

    Attributes:
        given: What each rank has of what it is given; empty if it is given no tensor.
        reads: The function that gets it, if the line makes several calls and `function` only reads what comes of it.
    """

    given: str = ""
    reads: str = ""
    why = (
        "{reads:?In {place}, {reads} gets {given:?{given}|a rank's own sizes and offsets}, and {function} makes of its "
        "result what doesn't match the unsharded model's|{function} in {place} gets {given:?{given}|a rank's own sizes "
        "and offsets}{has_groups:? and as many groups as the unsharded model, so each group has fewer channels|, and "
        "its result doesn't match the unsharded model's{is_drawn:?|, which comes from the whole}}}"
    )
    how = (
        "{is_drawn:?what all ranks have needs equal draws: seed the generator that {place} uses alike on all ranks, "
        "without the rank's coordinate, and draw from it as often as the unsharded model|{has_groups:?divide the "
        "groups of {function} in {place} by the number of ranks, as the channels|{reads:?check in {place} what {reads} "
        "runs over, and the sizes, offsets and order of what is made of its result up to {function}|{selects:?take in "
        "{place} the rank's own part: check the dim, the offset and the size of what {function} selects|gather or "
        "reduce the input of {function} before {place}, or use the whole tensor's sizes and the rank's own offset "
        "there}}}}"
    )

    @property
    def selects(self) -> bool:
        """Whether the function selects slices of what it is given."""
        return self.function in SELECTING

    @property
    def is_drawn(self) -> bool:
        """Whether the function draws as many random numbers as the unsharded model's, and others."""
        return self.function in DRAWS and bool(self.given)

    @property
    def has_groups(self) -> bool:
        """Whether the function normalizes groups of channels, and each rank has some of the channels."""
        return self.function == "group_norm" and "/" in self.given.partition(", ")[2].partition(", ")[0]


class SegmentsOfPart(AtLine):
    """A line takes a dim apart into segments, but a rank has one contiguous part of the dim.

    The gates of an LSTM, or queries, keys and values, stand one after the other along a dim. An axis splits the dim as
    one block, so a rank has all of some segments and nothing of others. It takes its part apart into as many
    segments as the whole has. Shapes are right.

    Attributes:
        given: What each rank has of what it is given.
        number: How many segments both sides take it apart into.
        weight: The weight whose rows make the dim; empty if none does.
        rows: Which of its slices along that dim are on which rank.
        weight_dim: The weight's dim.
    """

    given: str
    dim: int
    number: int
    weight: str = ""
    rows: str = ""
    weight_dim: int = 0
    why = (
        "{function} in {place} takes dim {dim} apart into {number} segments, as in the unsharded model, and gets "
        "{given}: a rank's {number} segments are not its parts of the whole's {number}{weight:?. {weight} is cut in "
        "one stretch: {rows}}"
    )
    how = (
        "{weight:?cut each of the {number} segments of {weight} over the n ranks, torch.cat([segment.chunk(n, "
        "{weight_dim})[rank] for segment in weight.chunk({number}, {weight_dim})], {weight_dim}), and its bias, too; "
        "or gather before {place}|give each rank its part of each of the {number} segments where the dim is split that "
        "{place} takes apart: the rows of a weight, or of a batch in which rows of different segments belong together}"
    )


class OtherArgument(AtLine):
    """A line gets the right tensors, and a flag or a number that is not the unsharded model's.

    A layer's number decides on its window, a flag on its mask, a mode on dropout. In a pipeline, a counter over a
    stage's own layers begins at 0 again. A number may be made of a size: `x.shape[0]` of a part is the part's. No
    tensor shows it.

    Attributes:
        given: What ranks give it.
        wanted: What the unsharded model gives it.
        is_of_axis: Whether it is a number that is larger or smaller by an axis's size, or its root.
        size: The only argument of its module that is a size of the rank's part; empty if there is none.
        differs: What ranks have of that, and the unsharded model, as `16 for 32`.
    """

    given: str
    wanted: str
    is_of_axis: bool = False
    size: str = ""
    differs: str = ""
    why = (
        "{function} in {place} gets the argument {given}, and in the unsharded model {wanted}{size:?. It may be made "
        "of `{size}`, which alone of its module's arguments differs ({differs})|{is_of_axis:?: most likely it is made "
        "of a size or a count of the rank's part|. Its tensors are right}}"
    )
    how = (
        "{size:?if {given} is made of it, pass the `{size}` of the whole to the module of {place}; else |}"
        "{is_of_axis:?make the number for {place} of the whole tensor's size: multiply by the number of parts, or "
        "all_reduce it|look at what chooses {given} for {place}: a flag, a setting of the module, or a layer's number}"
    )


class CountOfPart(AtLine):
    """A line computes with a count of the rank's own part, and gets what a smaller model has.

    Slopes, frequencies or schedules that are made for some heads or channels are not the first of those that are made
    for more: the count itself is in the formula. An offset alone would not make them right.

    Attributes:
        counts: Which functions are given which numbers, `arange gets 3 for 5 and div gets 2 for 4`.
    """

    counts: str
    why = (
        "From {place} on, ranks compute with counts of their own part instead of the whole's: {counts}. The result is "
        "that of a smaller model, and no part of the unsharded model's"
    )
    how = "compute it from {place} on with the whole's counts, and take the rank's own part of the result"


class OtherOperand(AtLine):
    """A line reads another tensor than the one that its result needs, which the rank has, too.

    What a scan carries from rank to rank decays by all steps from the rank's first on, and each token's own decay is
    a tensor of the same shape. A factor or a term that is left out leaves shapes as they are, too.

    Attributes:
        lack: What the other tensor is for the line: an operand itself, a factor of one, or a term of it; or the
            numbers of a factor, one for each slice of a dim, that no tensor of the rank has.
        source: Where the other tensor comes from, or the numbers.
    """

    lack: Lack
    source: str
    why = (
        "{lack:itself?{function} in {place} reads another tensor than its result needs, and the rank has that one, as "
        "{source}|What {function} in {place} reads lacks a {lack:numbers?factor|{lack}} that its result needs"
        "{lack:numbers?: {source}|, and the rank has it, as {source}}}"
    )
    how = "{lack:itself?read that tensor in {place}|{lack:term?add|multiply by} it in {place}}"


class UnwrittenMemory(AtLine, kind="wrong-value"):
    """A line reads room that was made for a result and that nothing wrote to.

    `torch.empty_like(x)` makes room for what a collective receives. If the collective does not run, or the code does
    not wait for it, the room has whatever its memory held. Shapes are right, and each run has other numbers.

    Attributes:
        place: The line that makes the room, as `moe.py:18`.
        function: The function that makes it.
        reader: The line that reads it.
    """

    reader: str
    why = "Nothing writes to what {function} in {place} makes before {reader} reads it: it has what its memory held"
    how = "call the collective that fills what {place} makes, on all ranks and before {reader}, and wait for it"


class VarianceOfPart(AtLine):
    """A line takes the variance of each rank's own part, around the part's own mean.

    The variance of the whole is the mean of the parts' variances and, added to it, the variance of their means. Code
    that averages variances over ranks leaves the second out, and each rank still gets a plausible number.

    Attributes:
        axis: The axis that splits what it is given.
        reduced: The collective that gets its result; empty if none does.
    """

    axis: str
    reduced: str = ""
    why = (
        "{function} in {place} takes the variance of each rank's part around the part's own mean{reduced:?, and "
        "{reduced} puts these together}. That leaves out how much the ranks' means differ along {axis}"
    )
    how = (
        "first average the mean over {axis}, and then the squares around it: (x - mean).square().mean(); or reduce the "
        "sums of x and x.square()"
    )


class MisplacedLine(AtLine):
    """A line returns the right numbers in the wrong order, or a different rank's part.

    It joins parts along the wrong dim or in a different order than their ranks, it takes a part without the rank's own
    offset, or its index isn't the inverse of the order in which rows were sent. Shapes are right.

    Attributes:
        is_of_rank: Whether it is another rank's part; else the order differs.
    """

    is_of_rank: bool
    why = (
        "{is_of_rank:?{function} in {place} takes a different rank's part, most likely the first on all "
        "ranks|{other:?{function} in {place} repeats slices in a different order than the unsharded model, which "
        "repeats {other:repeat?the whole block|each slice in turn}|{is_index:?{function} in {place} puts the right "
        "slices in the wrong order: its index isn't the order in which they come, or is that order and not its "
        "inverse|{function} in {place} puts the right slices in the wrong order: it joins parts along the wrong dim, "
        "or in a different order than their ranks}}}"
    )
    how = (
        "{is_of_rank:?take the part in {place} at the rank's own offset, in the sharded model only: its coordinate "
        "along the axis that splits the rows, times the part's size|{other:?use {other} in {place}|{is_index:?undo "
        "x[order] by y[order.argsort()] in {place}, with the order in which the rows were sent|join the parts in "
        "{place} in the order of their ranks, along the dim that was split, before dims are merged}}}"
    )

    @property
    def is_index(self) -> bool:
        """Whether the function takes or writes slices at the places of an index."""
        return self.function in INDEXING

    @property
    def other(self) -> str:
        """What repeats slices in the other order; empty if the function repeats none."""
        return {"repeat": "repeat_interleave", "repeat_interleave": "repeat"}.get(self.function, "")


class ReorderedPart(MisplacedLine):
    """A line flips, sorts or indexes a rank's part by itself, and the unsharded model the whole.

    In the whole, numbers go from one rank's part to another's. Parts that are reordered one by one and then joined have
    a different order than the whole reordered: `3 2 1 0 7 6 5 4`, and not `7 6 5 4 3 2 1 0`.
    """

    why = (
        "{function} in {place} reorders each rank's own part. In the unsharded model it reorders the whole, which "
        "takes numbers from one rank's part to another's"
    )
    how = "gather before {place}, and let {function} reorder the whole"


class RolledPart(ReorderedPart):
    """A line rolls a rank's part by itself: what crosses an end comes in at the other.

    Labels are often the tokens, rolled by one. The last label of a rank's part is then the part's first token, and not
    the first one of the next rank's.
    """

    why = (
        "{function} in {place} rolls the rank's own part: what crosses one end of it comes in at the other end, and "
        "not from the next rank's part"
    )
    how = "roll the whole tensor before it is cut, or send what crosses an end to the next rank"


class ScaledLine(AtPlace):
    """A line returns the right result multiplied by a number.

    It multiplies or divides by a size or a count of the rank's own part: the rows of a shard, the tokens of a rank,
    the features of a split layer. Shapes do not depend on it, so nothing raises.

    Attributes:
        axis: The axis, or `dp or tp`, whose size that is, or whose size has it as root.
        is_root: Whether it is the root.
        adds: The function by which it adds to what is whole the same numbers; empty if it multiplies.
    """

    times: float
    axis: str = ""
    is_root: bool = False
    adds: str = ""
    why = (
        "{adds:?{adds} in {place} adds the same numbers to a tensor that is whole already: its result is {times:.5g} "
        "times the unsharded model's|{axis:?{place} {is_larger:?divides|multiplies} by {is_root:?the root of }this "
        "rank's size of what {axis} splits, instead of the whole's: its result is {times:.5g} times the unsharded "
        "model's|{place} multiplies or divides by a wrong number, most likely a size or count of the rank's own part: "
        "its result is {times:.5g} times the unsharded model's}}",
        "{is_size:?{place} {is_larger:?multiplies|divides} by the number of ranks along {axis}}",
    )
    how = (
        "{adds:?leave that addition out of {place}|take the number in {place} from the whole: the whole size, or "
        "counts summed over ranks}",
        "{is_size:?leave the number of ranks out of {place}}",
    )

    @property
    def is_larger(self) -> bool:
        """Whether the result is too large, as what was divided by a number that is too small."""
        return self.times > 1

    @property
    def is_size(self) -> bool:
        """Whether the number is the axis's size, or one over it."""
        return bool(self.axis) and not (self.is_root or self.adds)


class ScaledTermLine(AtPlace):
    """A line multiplies each rank's term of a mean by a number.

    Each rank computes the loss of its own rows, and DDP and FSDP average the gradients. The term needs no factor. A
    line that multiplies it by the number of ranks takes back an average that is still to come.

    Attributes:
        axis: The axes over which the terms have the mean.
        is_size: Whether it is the number of ranks along them.
    """

    times: float
    axis: str
    is_size: bool
    why = (
        "{place} multiplies each rank's mean by {times:.5g}{is_size:?, the number of ranks along {axis}}, although the "
        "mean over {axis} is still taken, of the losses or of their gradients"
    )
    how = "{is_size:?leave the number of ranks out of {place}|leave the factor {times:.5g} out of {place}}"


class WrongLines(Cause):
    """One of several lines goes wrong on a rank's own part.

    The first line gets the right input, and the last line returns a wrong result. In between, ranks compute with
    numbers of their own, such as offsets, that the unsharded model doesn't have.

    Attributes:
        first: The first of the lines, as `moe.py:83`.
        last: The last of them.
        is_own: Whether ranks compute with numbers of their own there, and no collective is called.
        buffers: The buffers that they read and that are no part of the unsharded model's, in words.
    """

    first: str
    last: str
    is_own: bool
    buffers: str = ""
    kinds = WRONG
    why = (
        "{buffers:?Ranks have other numbers in {buffers} than any part of the unsharded model's|The tensors that "
        "{first} gets are right, whole or each rank's own part}, and {last} returns a wrong result"
    )
    how = (
        "{buffers:?make {buffers} as the unsharded model does, and take each rank's part. If that is as it should be, "
        "|}check {first} to {last}: first the group and op of each collective, then the sizes, offsets and indices "
        "of the rank's part, which may be computed before {first}"
    )


class CarriedLine(AtPlace):
    """A variable that a loop carries from round to round is wrong after the last one.

    Ring attention takes the keys of one rank after the other, and adds to sums that are relative to the largest score
    until then. Every round must shrink the sums before it to the new maximum, and take the keys and values of the same
    rank. The unsharded model takes all keys in one round, in which there is nothing to shrink.

    Attributes:
        place: The line that makes the variable, as `ring.py:47`.
        count: How often ranks run it.
        right: The lines of the loop's other variables, if these are right after the last round.
    """

    count: int
    right: tuple[str, ...]
    why = (
        "{place} runs {count} times on each rank, and its result after the last time doesn't match the unsharded "
        "model's{right:?, although {right} {right:1?does|do}}"
    )
    how = (
        "check in {place} how a round goes on from the round before: an earlier sum must be multiplied by exp(old "
        "maximum - new maximum). Check also that all that a round reads, such as keys and values, comes from one rank"
    )


class KeptFromEarlierCall(AtLine):
    """A module reads in a later call what it made of an earlier call's inputs.

    A mask or an index that is kept by its shape, or made in the first call alone, belongs to the rows of that call.
    Micro-batches of one shape then all read the first one's, and nothing raises. A model that is given the whole batch
    at once makes it once, and is right.

    Attributes:
        maker: The line that made it.
    """

    maker: str
    why = (
        "{function} in {place} reads what {maker} made in an earlier call, of that call's inputs: the module keeps it "
        "from one micro-batch to the next"
    )
    how = "make it in every call, or keep it beside what it is made of, and make it anew where that differs"


class UnsummedLine(Cause):
    """A line makes one term of a sum on each rank, and a later one uses it as the whole.

    A product over a split dim gives terms of a sum. Terms have the shape of the sum, so nothing raises: a bias is added
    on every rank, or a function that is not linear sees one term alone.

    Attributes:
        terms: The line that makes the terms, as `moe.py:83`.
        reader: The line that uses them; empty if the module returns them.
        function: What uses them, if that is in the line that makes them.
        operand: What gives them to it.
        other: What it takes, too, and needs no sum; empty if there is nothing.
        mean: What the terms are of, `mean`, if that isn't a sum.
        beside: What the line computes of each rank's own part besides, such as `std`.
        divisor: The line that makes what the reader divides by, if that divides one term of a sum by one of another.
        is_own: Whether ranks along the axis have rows of their own, of which each computes a loss.
    """

    terms: str
    reader: str
    axis: str
    function: str = ""
    operand: str = ""
    other: str = ""
    mean: str = ""
    divisor: str = ""
    is_own: bool = False
    beside: str = ""
    kinds = WRONG
    why = (
        "{divisor:?{reader} divides each rank's own sum by its own sum or count. Nothing sums either over "
        "{axis}|{operand:?In {terms}, {function} takes the result of {operand}, which is one term of a "
        "{mean:?mean|sum} over {axis}{other:?{beside:?|, and {other}}}{beside:?. {beside} is of each rank's own part, "
        "too}|Nothing {mean:?averages|sums} the result of {terms} over {axis} before {reader:?{reader} uses it|the "
        "module returns it}}}"
    )
    how = (
        "{divisor:?all_reduce numerator and denominator over {axis} before {reader}|{operand:?in {terms}, all_reduce "
        "the result of {operand} over {axis}{mean:? with ReduceOp.AVG} before {function} takes it{other:?{beside:?|, "
        "and only that}}{beside:?, and compute {beside} of all ranks' numbers, too}|all_reduce the result "
        "of {terms} over {axis}{mean:? with ReduceOp.AVG} before {reader:?{reader}|the module returns it}}}; in "
        "backward, {is_own:?{mean:?average|sum} its gradient, too, if gradients are averaged over {axis} afterwards|"
        "return the gradient unchanged if all ranks compute the same afterwards, and sum it if each uses its own part}"
    )


class MislabeledPlacement(AtPlace):
    """`DTensor.from_local` is told that one term of a sum is the whole, or the reverse.

    `from_local` believes its placements. A redistribute of what is called Replicate() has nothing to sum, one of what
    is called Shard() puts terms side by side, and one of what is called Partial() sums copies.

    Attributes:
        place: The line that calls it, as `moe.py:83`.
        label: The placements that it is given.
        axis: The axis of the sum of which it gets terms; empty if it gets the whole.
    """

    label: str
    axis: str
    kinds = ("unreduced-output", "wrong-value", "wrong-scale")
    why = (
        "DTensor.from_local in {place} is given {label} for {axis:?what is one term of a sum over {axis}. Each rank's "
        "term then counts as the whole or as a part of it, and no redistribute sums the terms|what every rank has "
        "whole. A redistribute then sums the copies}"
    )
    how = (
        "{axis:?pass from_local Partial() for {axis} in {place}, and redistribute to the placements that are "
        "needed|pass from_local Replicate() in {place} instead of Partial()}"
    )
