"""Causes of a rank's part that is another rank's, or begins or is counted at a wrong place."""

from __future__ import annotations

from typing import Literal

from shardviz.explain.cause import AtLine, AtPlace, Cause
from shardviz.explain.step.lines import ELEMENTWISE


class MisplacedOperand(AtLine, kind="wrong-value"):
    """A line takes another rank's part, and a later one combines it with the rank's own.

    A head of keys, or a slope or a position, that is chosen by the wrong arithmetic with the rank's number has the
    right shape. Its numbers are the unsharded model's, for other heads or tokens.

    Attributes:
        place: The line that takes the part, as `moe.py:83`.
        reader: The line that combines it with the rank's own part.
        ranks: The ranks that have another rank's part.
    """

    reader: str
    ranks: tuple[int, ...]
    why = (
        "{function} in {place} takes the part of a different rank on {ranks:ranks}: the arithmetic with the rank's "
        "number is wrong"
    )
    how = (
        "compute the part's number in {place} from the rank's coordinate; ranks that share a part are neighbors: "
        "use coordinate // (ranks per part), not the remainder"
    )


class DealtToOthers(AtLine, kind="wrong-value"):
    """Slices are copied or ordered so that an exchange gives ranks those of other ranks.

    With fewer key-value heads than ranks, each is repeated before an all-to-all deals them out. The ranks that share a
    head are neighbors, so copies of it must lie side by side: `repeat_interleave`, not `repeat`. Shapes are alike. The
    exchange itself is right, as another tensor shows that goes through the same lines.

    Attributes:
        place: The line that copies or orders them, as `attention.py:40`.
        exchange: The line that gives ranks their slices.
        reader: The line that combines them with the rank's own part.
        ranks: The ranks that have another rank's part.
    """

    exchange: str
    reader: str
    ranks: tuple[int, ...]
    why = (
        "{function} in {place} orders slices so that the exchange in {exchange} gives {ranks:ranks} those of other "
        "ranks. The exchange itself is right: another tensor comes out of it as it should"
    )
    how = (
        "order the slices in {place} by the ranks that need them: copies of one slice side by side if neighbors share "
        "it (repeat_interleave), and not one whole after another (repeat)"
    )


class CutByOtherSegments(AtLine, kind="wrong-value"):
    """A fused weight is cut by other segments than those into which its result is taken apart.

    Queries of all heads stand before the keys and values of fewer. Cut into three equal segments, and each of these
    over the ranks, the weight has the right number of rows on each rank and every row once. The code splits its result
    into the rank's number of queries, keys and values, which are other rows.

    Attributes:
        weight: The weight; empty if it isn't known.
        sizes: The segments into which the unsharded model takes the dim apart.
        number: How many equal segments ranks have parts of.
        dim: The weight's dim.
    """

    weight: str
    sizes: tuple[int, ...]
    number: int
    dim: int
    why = (
        "{function} in {place} takes apart what the unsharded model does into segments of {sizes:sum}, and "
        "{weight:?{weight}|what it is given} is cut into {number} equal segments, each over the ranks"
    )
    how = (
        "cut each of the segments that {place} reads over the n ranks: torch.cat([segment.chunk(n, {dim})[rank] for "
        "segment in {weight:?{weight}|weight}.split({sizes:list}, {dim})], {dim})"
    )


class CutAsOneWeight(AtPlace, kind="wrong-value"):
    """Several weights are put into one, and that is cut as a whole instead of one by one.

    The queries, keys and values of all heads, cut in two, leave the first rank with all queries and half of the keys.
    The shape is that of the right parts, and the code takes a third of the rows for each.

    Attributes:
        place: The line that reads it, as `attention.py:54`.
        weight: The weight that has them.
        few: What the first rank has of them.
        all_of_them: All that it is made of.
    """

    weight: str
    few: tuple[str, ...]
    all_of_them: tuple[str, ...]
    why = (
        "{weight} is made of {all_of_them:4} and cut as a whole: the first rank has elements of {few:4} alone, and "
        "{place} reads its part of each"
    )
    how = "cut {all_of_them:4} one by one, and put each rank's parts into {weight}"


class MisplacedWeight(Cause):
    """Some ranks hold a different rank's part of a weight, which a line combines with their own.

    If there are fewer key-value heads than ranks, neighbors share a head. A head that is chosen by the remainder has
    the right shape, and the queries of other heads attend to its keys.

    Attributes:
        reader: The line that combines it with the rank's own part.
        ranks: The ranks that have another rank's part.
    """

    weight: str
    reader: str
    ranks: tuple[int, ...]
    why = (
        "The code that cuts {weight} gives {ranks:ranks} a different rank's part: {reader} combines it with the rank's "
        "own part of other weights"
    )
    how = (
        "cut {weight} by the rank's coordinate along the axis; ranks that share a part are neighbors: take the part "
        "with number coordinate // (ranks per part), not the remainder"
    )


class ShiftedPart(AtLine, kind="wrong-value"):
    """A line takes a stretch of a dim at another offset than the rank's part.

    Labels, positions and slices of a rank's part begin at the rank's coordinate times the part's size. If the offset
    is the coordinate alone, or that of another group, shapes are right, and a later line combines the stretch with the
    rank's own part.

    Attributes:
        place: The line that takes the stretch, as `loss.py:68`.
        reader: The line that combines it with the rank's own part.
        rank: A rank that has another stretch than its part's.
        first: The first index of the stretch.
        due: The first index of the rank's part.
        length: How many indices both have.
    """

    reader: str
    rank: int
    dim: int
    first: int
    due: int
    length: int
    why = (
        "{function} in {place} gives rank {rank} elements {first} to {last} of dim {dim}, and {reader} combines them "
        "with the rank's own part, elements {due} to {last_due}: the offset is wrong"
    )
    how = (
        "begin at the rank's own offset in {place}: its coordinate along the axis that splits the dim times {length}, "
        "the size of its part"
    )

    @property
    def last(self) -> int:
        """The last index of the stretch."""
        return self.first + self.length - 1

    @property
    def last_due(self) -> int:
        """The last index of the rank's part."""
        return self.due + self.length - 1


class OffsetOfUnequalParts(AtPlace, kind="wrong-value"):
    """A line begins a rank's part at its coordinate times one length, and the parts are unequal.

    `start = rank * weight.shape[0]` is right as long as the axis divides the dim. If it doesn't, the last ranks have
    shorter parts, and the parts before theirs are longer than their own; `rank * (size // ranks)` is wrong from the
    second rank on.

    Attributes:
        length: The length that it takes all parts to have, in words.
    """

    axis: str
    size: int
    parts: str
    length: str
    why = (
        "{place} begins a rank's part at its coordinate along {axis} times {length}. {axis} doesn't divide {size}: the "
        "parts are {parts}"
    )
    how = (
        "begin at the sum of the lengths of the parts before the rank's own in {place}: its coordinate times the "
        "length of the first part, at most {size}; or pad the dim to a multiple of {axis}"
    )


class IndexOfOwnPart(AtLine, kind="wrong-value"):
    """The index of the best in a rank's own part is read as an index into the whole.

    `max`, `argmin` or `topk` over a dim that an axis splits count from the part's first element. Ranks exchange the
    values and the indices, and the value that wins is right. Its index names an element of the first rank's part.

    Attributes:
        taker: The line that has the indices of all ranks' best, as `book.py:41`.
        size: How many elements there are.
        begin: Where a rank's part of them begins.
        added: What was added to indices into that part.
    """

    taker: str
    size: int
    begin: int
    added: int
    why = (
        "{function} in {place} returns indices within the rank's own part, and {taker} passes them on as indices into "
        "all {size}{added:?, after {added} was added where the part begins at {begin}|}"
    )
    how = (
        "add to the indices of {function} the number of elements before the rank's part, such as {begin}, before ranks "
        "exchange them{added:?, instead of {added}|}"
    )


class IndexOfWhole(AtLine, kind="wrong-value"):
    """A rank's part, as of a vocabulary, is read at indices into the whole, such as labels.

    Each rank must take the place where its part begins from the indices, and leave out those that then lie outside of
    the part. Indices that are only moved into bounds read numbers of other words on every rank but the first.

    Attributes:
        axis: The axis that splits the dim.
        size: How long each part is.
    """

    axis: str
    size: int
    why = (
        "{function} in {place} reads the rank's part at indices into the whole: the place where the part begins is not "
        "taken from them"
    )
    how = (
        "before {place}, subtract where the rank's part begins, its coordinate along {axis} times {size}, and mask "
        "what is then below 0 or at least {size}"
    )


class SameSlices(AtLine, kind="wrong-value"):
    """Every rank takes the same slices of a tensor, although each has its own part of another.

    With fewer key heads than ranks, a rank has all key heads and chooses those of its query heads. A choice by
    `arange(local_heads)` counts the rank's query heads from 0, so every rank chooses alike. Shapes are right.

    Attributes:
        place: The line that counts or chooses, as `attention.py:40`.
        reader: The line that combines the slices with the rank's own part.
    """

    reader: str
    why = (
        "{function} in {place} gives every rank the same, so all ranks take the same slices of what {reader} combines "
        "with each rank's own part: heads or rows are counted from the rank's first, and not from the whole's"
    )
    how = (
        "count in {place} from the first of the whole: add the rank's first number, its coordinate times the size of "
        "its part, and choose the slices for {reader} with the sizes of the whole"
    )


class UnlikeOperands(AtLine):
    """A line combines tensors of which a rank has different slices along one dim.

    Two are split over the same axis, one in a single stretch and one segment by segment. A rank's query heads meet the
    key heads of others, as when key heads are repeated on each rank instead of in the whole, or all of them. Or a rank
    has tokens from the front and the back, and the positions of a single stretch. Shapes agree.

    Attributes:
        given: What each rank has of them.
    """

    given: str
    dim: int
    why = (
        "{function} in {place} combines {given}: along dim {dim} a rank's slices of these are not the same ones of "
        "the whole"
    )
    how = (
        "{has_bias:?cut the bias by the same slices as the weight|split all along dim {dim} in the same way before "
        "{place}: {is_elementwise:?take the rows of a table, as of positions, that belong to the rank's own tokens|a "
        "rank needs the key and value heads of its own query heads (ColwiseParallel for all three), and "
        "repeat_interleave keeps a head beside its own, repeat does not}}"
    )

    @property
    def is_elementwise(self) -> bool:
        """Whether each element meets the one at its own place."""
        return self.function in ELEMENTWISE

    @property
    def has_bias(self) -> bool:
        """Whether they are a layer's weight and its bias."""
        return self.function == "linear"


class CutByAnotherAxis(Cause):
    """Weights are cut by a rank's coordinate along another axis of the mesh.

    `rank % tp_size` is the coordinate along tp only if tp is the innermost axis. Otherwise ranks of a tensor-parallel
    group have the same part of a weight, or lack some parts, and ranks that are given different rows of the batch have
    different parts. All parts are there, and shapes are right.

    Attributes:
        axis: The axis that has as many ranks as there are parts, and along which ranks lack some.
        rows: The axis along which the parts differ, which splits the batch.
        number: How many parts ranks along the axis have together.
    """

    weight: str
    axis: str
    rows: str
    number: int
    count: int
    why = (
        "{weight} is cut over {rows}, which splits the batch, instead of by the coordinate along {axis}: ranks along "
        "{axis} together have {number} of its {count} parts, and ranks along {rows} have different ones"
    )
    how = "take part mesh.get_local_rank({axis!r}) of mesh[{axis!r}].size(), and don't count by the rank in the world"


class PermutedWeights(Cause, kind="misordered-within-shard"):
    """A rank's parts of some weights have the right rows in another order.

    A loader that turns a checkpoint's rotary halves into pairs, or splits heads, permutes rows. After the cut, or with
    the whole's number of heads, it permutes others than in the whole.
    """

    weights: str
    why = "Each rank has the right numbers of {weights}, in another order than the unsharded model"
    how = "in what loads or cuts these weights, permute them before the cut, or by the rank's own number of heads"


class TermOfPartOfClasses(Cause):
    """A term of the loss counts or averages a rank's own part of the classes.

    The classes are split over ranks, as a vocabulary under tensor parallelism. Label smoothing takes the mean of the
    logits over all classes, so that every class of a row gets the same gradient. The mean over a rank's own classes
    divides by too few. The softmax and the target's logit are right, and the loss hardly changes.

    Attributes:
        axes: The axes that split the classes, in words.
    """

    axes: str
    why = (
        "The gradient of a row's logits is off by the same number for all classes: a term that takes every class "
        "alike, such as label smoothing or a mean of the logits, counts a rank's own part of the classes, which {axes} "
        "splits"
    )
    how = (
        "all_reduce the sum of the logits over {axes} and divide it by the number of all classes, in the loss and in "
        "its backward"
    )


class SoftmaxOfPart(Cause):
    """The softmax of a loss takes a maximum or a sum of each rank's own classes alone.

    The classes are split over ranks, as a vocabulary under tensor parallelism. A softmax is taken relative to one
    number for each row, the largest logit of all classes, and divides by the sum of all exponentials. With numbers of
    its own each rank's exponentials count too much or too little against the others'. The loss still falls.

    Attributes:
        axes: The axes that split the classes, in words.
        op: What is taken of a rank's own classes: the `max` or the `sum`.
    """

    axes: str
    op: Literal["max", "sum"]
    why = (
        "The outputs are right, and each rank's softmax {op:max?is taken relative to the largest logit of its own "
        "classes|is divided by the sum of its own classes' exponentials}: {axes} splits the classes, and nothing "
        "reduces the {op:max?maxima|sums} over it"
    )
    how = (
        "all_reduce {op:max?each row's largest logit over {axes} with ReduceOp.MAX before the exponentials are taken"
        "|each row's sum of exponentials over {axes} before it divides them}, in the loss and in its backward"
    )


class LabelOutsidePart(Cause):
    """A loss takes a class of each rank for the label of a row whose label another rank has.

    The classes are split over ranks. A label outside a rank's classes must be masked: it is set to some class that the
    rank has, such as the first one, so that it can be looked up. Without the mask that class gets the label's gradient.
    If only the backward lacks it, the loss is right.

    Attributes:
        axes: The axes that split the classes, in words.
    """

    axes: str
    why = (
        "In rows whose label another rank has, the rank's gradient also takes one of its own classes for the label: "
        "{axes} splits the classes, and the loss, or its backward alone, does not mask labels outside of the rank's own"
    )
    how = (
        "mask labels outside of the rank's own classes in the loss and in its backward, where only the rank that has "
        "the label subtracts it from the softmax"
    )
