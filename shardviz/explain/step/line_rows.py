"""Causes in one line that takes a rank's own rows for the first of the whole, or exchanges or reorders rows."""

from __future__ import annotations

from typing import Literal

from shardviz.explain.cause import AtLine, AtPlace, Cause


class CausalMaskOfPart(AtLine, kind="wrong-value"):
    """A causal mask counts a rank's queries from 0, although they stand later in the sequence.

    Under context parallelism a rank has a part of the queries and all keys. `is_causal=True` aligns query 0 with key 0:
    it takes the first query that the rank has for the first of the sequence. Rank 0 is right, and every other rank
    hides keys that its queries must see.
    """

    why = (
        "is_causal=True of {function} in {place} takes the first query that a rank has for the first of the sequence. "
        "The rank's queries are a part of the sequence and the keys are all of it"
    )
    how = (
        "pass attn_mask in {place} instead of is_causal=True: keys[None, :] <= queries[:, None], with the positions in "
        "the whole sequence of the keys and of the rank's own queries"
    )


class MisplacedMask(AtPlace, kind="wrong-value"):
    """A mask or bias is made for other queries or keys than those that it is applied to.

    Under context parallelism a rank has some of the queries, often from the front and the back of the sequence, and
    gathers keys in the order of the ranks. A mask that counts them from 0 has the right shape. It hides keys that
    queries must see, and shows others that come later. In a ring, the block that arrives after a turn is that of the
    rank before, if ranks send to the next one.

    Attributes:
        place: The line that makes the positions, as `attention.py:40`.
        reader: The line that applies the mask.
        of: Whose positions are wrong: `keys` or `queries`.
        in_ring: Whether keys come block by block.
        updated: The line that changes it in each round of a ring; empty if none does.
    """

    reader: str
    of: str
    in_ring: bool = False
    updated: str = ""
    why = (
        "The mask or bias that {reader} applies is made in {place}{updated:? and changed in {updated}} with positions "
        "that the {of} don't have: {is_of_block:?the block of keys that has come is another rank's|a rank's {of} don't "
        "come in the order of the sequence, or don't begin with its first}"
    )
    how = (
        "make it with the positions that the {of} have in the whole sequence: {is_of_block:?if ranks send to the "
        "next one, the block of rank - turn has come after each turn; or pass the positions on with the "
        "keys|{is_of_keys:?gather each rank's positions in the same way as the keys|pass the positions of the rank's "
        "part to {place}}}"
    )

    @property
    def is_of_keys(self) -> bool:
        """Whether the positions of keys are wrong."""
        return self.of == "keys"

    @property
    def is_of_block(self) -> bool:
        """Whether the positions of a block of a ring are wrong."""
        return self.in_ring and self.is_of_keys


class BlockNotPassedOn(AtPlace):
    """A rank uses the same block in every round of a ring.

    Each round is to send the block to the next rank and to go on with the one that came. Code that keeps the block, or
    doesn't assign what came to what the next round reads, meets its own keys again, as often as there are ranks.

    Attributes:
        place: The line that multiplies by the block in each round, as `attention.py:40`.
        rounds: How many there are.
    """

    rounds: int
    why = (
        "A rank has the same block in each of the {rounds} rounds of {place}: no round passes it on to the next rank, "
        "or what comes isn't read"
    )
    how = "send the block to the next rank in each round, and read in the next round what has come"


class UnweightedJoin(AtPlace):
    """Ranks' softmax-weighted sums are joined without the sums that they were divided by.

    A rank with some of the keys, words or experts takes a softmax of its own scores. Its result is relative to its own
    sum of exponentials. Neither the mean nor the sum of ranks' results is that of all scores.

    Attributes:
        place: The line that joins them, as `attention.py:40`.
        softmax: The line of the softmax.
        axis: The axis that splits the scores.
    """

    softmax: str
    axis: str
    why = (
        "{place} joins the ranks' results over {axis} without their weights: {softmax} divides each by the sum of "
        "exponentials of the rank's own scores"
    )
    how = (
        "weight each rank's result by exp(logsumexp of its scores - logsumexp of all scores) before {place} sums it, "
        "with the maximum of all ranks' scores taken off"
    )


class PartOfAnotherDim(AtLine):
    """A view gives a rank's part along one dim the shape of its part along another.

    Heads that a rank has for all tokens have as many numbers as all heads of its own tokens. A view takes one for the
    other without an error if the exchange between them is left out.

    Attributes:
        dim: The dim along which the rank has its part.
        other: The dim of the result along which it has the size of a part.
        axis: The axis that splits both.
    """

    dim: int
    other: int
    axis: str
    why = (
        "{function} in {place} gets the rank's part along dim {dim} and gives it the shape of a part along dim "
        "{other}: nothing exchanges the parts over {axis} before"
    )
    how = (
        "exchange the parts over {axis} before {place}: an all_to_all that cuts along the dim that is to be split and "
        "joins along the one that was"
    )


class RowsLeftOut(AtLine, kind="wrong-value"):
    """The losses of all ranks together are of fewer rows than the unsharded model's.

    `loss(logits[:, :-1], ids[:, 1:])` on a rank's part of the sequence drops the last position of every part, and not
    only that of the sequence: the label of that position is the first of the next rank. Shapes fit on every rank.

    Attributes:
        held: How many labels all ranks have together.
        wanted: How many the unsharded model has.
    """

    held: int
    wanted: int
    why = (
        "{function} in {place} gets {held} labels on all ranks together, and {wanted} in the unsharded model: rows are "
        "dropped or labels shifted after the batch or the sequence is cut"
    )
    how = "shift labels and drop rows of the whole batch, and cut it for the ranks afterwards"


class ValuesInOtherOrder(AtLine, kind="wrong-value"):
    """An attention gets its keys and its values in different orders.

    Ranks have blocks of the sequence that are no neighbors, as in a zigzag. What is gathered stands in the order of the
    ranks, and an index puts it back. Weights are of the keys' places, so values must stand in the same places; shapes
    are the same either way.

    Attributes:
        moved: What stands in another order: `values`, or `keys`.
        source: The line that makes these.
    """

    moved: str
    source: str
    why = (
        "{function} in {place} gets {moved:values?keys|values} in the sequence's order, and {moved} in another: "
        "{source} leaves them as they are gathered or cut"
    )
    how = "put {moved} into the order of the others in {source}, by the same index, before {place}"


class LabelsOfOtherRows(AtLine, kind="wrong-value"):
    """A loss gets the rows of a rank's part with the labels of other rows.

    Labels are shifted a second time, cut at another offset or in another order than the rows, or permuted with another
    seed. There are as many as there should be, so that nothing raises.

    Attributes:
        count: How many rows of a rank have another label.
        of: How many rows it has.
    """

    count: int
    of: int
    why = (
        "{function} in {place} gets {count} of a rank's {of} rows with another label than in the unsharded model: "
        "labels and rows are shifted, cut or ordered in different ways"
    )
    how = "shift labels once, and cut and order them exactly as the rows that they belong to"


class TargetsOfOtherMicroBatch(AtLine, kind="wrong-value"):
    """A loss compares the outputs of a micro-batch with the targets of another one.

    Stages of a pipeline keep the targets of all micro-batches until outputs arrive. A list that is read from its end,
    or a queue that is filled in another order than the schedule's, pairs them wrongly. Outputs are right, and shapes
    agree.

    Attributes:
        is_reversed: Whether the last micro-batch's targets meet the first one's outputs, and so on.
    """

    is_reversed: bool
    why = (
        "{function} in {place} compares the outputs of one micro-batch with the targets of another"
        "{is_reversed:?: the targets come in reversed order}"
    )
    how = (
        "take the targets in the order in which micro-batches run{is_reversed:?, such as by pop(0) in place of pop()}, "
        "or keep them by the micro-batch's number"
    )


class RowsWithOtherLabels(Cause, kind="wrong-value"):
    """The loss compares rows with other labels than the unsharded run does.

    A cross entropy's gradient is negative at each row's label. Labels are cut, ordered, popped or shifted otherwise
    than the rows: there are as many, so nothing raises. Labels that are shifted after they were cut lack the next
    part's first one. Labels that the data shifted are shifted again by a loss that does so, too.

    Attributes:
        what: What a rank's labels are: those of the `next` or the `previous` row, the right ones but at the `ends` of
            its part, those of other `micro-batches`, the right ones but of rows that one side has `ignored`, the same
            ones `moved` to other rows, or `other` ones.
    """

    what: Literal["next", "previous", "ends", "micro-batches", "ignored", "moved", "other"]
    why = (
        "{what:next?Each row is compared with the next row's label: labels are shifted twice"
        "|{what:previous?Each row is compared with the previous row's label: labels are not shifted"
        "|{what:ends?The last row of each part has no label, or a wrong one: labels are shifted after they were cut"
        "|{what:micro-batches?Each micro-batch is compared with the labels of another one: a list is read from its "
        "end, or filled in another order|{what:ignored?The loss ignores other rows: an ignore_index, a mask or padding "
        "covers rows that it should count, or leaves some to count that it should not|{what:moved?Labels and rows are "
        "cut or ordered in different ways|Each rank makes its labels from its own rows, or takes those of other "
        "rows}}}}}}"
    )
    how = (
        "{what:next?shift labels once, in the data or in the loss|{what:previous?shift labels once, in the data or in "
        "the loss|{what:ends?shift labels before you cut them|{what:micro-batches?take the targets in the order in "
        "which the micro-batches were put in|{what:ignored?make the mask of the whole batch, and cut it as the "
        "labels|cut and order labels exactly as the rows that they belong to}}}}}"
    )


class OtherLabels(AtLine):
    """A loss gets the right rows, with labels that mean something else on each rank.

    Each rank numbers the classes, letters or words of its own rows, or maps them by a table, an order or a seed of its
    own. The model's outputs are right, and nothing raises.
    """

    why = (
        "{function} in {place} gets the right rows with wrong labels. Most likely each rank numbers the classes by "
        "itself, from its own rows, an order or a seed"
    )
    how = "make the labels from what all ranks share: number the classes of all data, in one order"


class LoopFromZero(AtLine, kind="wrong-value"):
    """A loop over a rank's own slices uses its counter as if it counted the slices of the whole.

    A rank has experts 4 to 7 and loops over these 4. The counter is the number of an expert's weights on the rank. The
    mask of the tokens for an expert needs the expert's number in the whole. Shapes are right, and so is rank 0.

    Attributes:
        place: The line that uses the counter for the whole, as `moe.py:51`.
        reader: The line that reads the rank's own slices.
        count: How many slices a rank has.
    """

    reader: str
    count: int
    why = (
        "{function} in {place} counts from 0 on every rank, as in the unsharded model's first {count} rounds of the "
        "loop. {reader} reads the rank's own {count} slices, which are later ones on every rank but the first"
    )
    how = "add the rank's first number to the counter in {place}: its coordinate times {count}"


class StrangeRows(AtLine):
    """A line turns exchanged rows into rows that the unsharded model doesn't have.

    Tokens went to a rank that does not hold their expert, or two operands have their rows in different orders. Each
    row then meets a wrong weight or factor. Or the line mixes rows, of which a rank has others. Shapes are right.

    Attributes:
        with_weight: Whether that multiplies rows with a weight.
    """

    with_weight: bool
    why = (
        "{with_weight:?In {place}, rows meet a different weight than in the unsharded model: the code sends or sorts "
        "them by a different numbering of experts than the one that splits the weights|In {place}, {function} makes "
        "other rows than in the unsharded model of rows that it has}"
    )
    how = (
        "{with_weight:?choose each row's rank, and its place there, by the split of the weights: block by block or in "
        "turns|check what {function} gets in {place} beside the rows: a factor, an index or a second tensor, which "
        "must be in the order of the rows, or a sum over rows}"
    )


class DimsMerged(AtLine):
    """A line merges dims in a wrong order, so right numbers stand in the wrong places.

    An all-to-all or an all-gather puts ranks' parts along a dim of their own. That dim must stand just before the dim
    that was split when the two are merged. Anywhere else, parts of different rows, heads or tables are mixed. Shapes
    are right.

    Attributes:
        order: The order of dims that makes the result right on all ranks.
    """

    order: str
    why = (
        "{function} in {place} merges dims in a wrong order: the dim of the ranks doesn't stand next to the dim that "
        "they split"
    )
    how = "call permute{order} on what {function} in {place} gets: its result is then right on all ranks"


class RowsOfOtherExperts(AtPlace):
    """Rows are on the rank of their expert, and each meets another of the rank's experts.

    Rows come rank by rank, and from each rank sorted by expert. To give each expert its rows they are sorted again, by
    the number of the expert of each row as it came. Labels that are made as if the rows were sorted already, or a
    split without a sort, give rows to another expert of the same rank. Shapes and counts are right.

    Attributes:
        place: The line that makes the numbers, or that gives rows to an expert, as `moe.py:65`.
        reader: The line at which rows meet weights.
        are_labels: Whether it is the line that makes the numbers.
    """

    reader: str
    are_labels: bool
    why = (
        "{are_labels:?{place} gives received rows the numbers of other experts than they were sent to, so in {reader} "
        "they meet another of the rank's experts. Rows come rank by rank, and from each rank sorted by expert|In "
        "{place}, rows meet another of the rank's experts than in the unsharded model. They are on the right rank, and "
        "come rank by rank, not sorted by expert}"
    )
    how = (
        "{are_labels:?in {place}, number the rows in the order in which they come: repeat the rank's experts once for "
        "each rank, as often as that rank sent rows to each|sort the received rows by expert before {place}}"
    )


class RowsNotRestored(AtPlace):
    """Rows are sent back in a different order than they arrived in.

    Each rank sorts the rows that it is sent, by expert. Sorting again instead of undoing the sort gives the right rows
    to the wrong tokens.

    Attributes:
        place: The line that leaves them so, as `moe.py:83`.
        came: The line of the exchange that brings them.
        back: The line of the exchange that sends them back.
    """

    came: str
    back: str
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
    why = (
        "{place} applies a function that exchanges numbers in forward ({function} in {inner}). Its backward doesn't "
        "send the gradients back to where the numbers came from"
    )
    how = (
        "in its backward, {is_of_two:?send the gradient to the rank from which forward receives, and receive that of "
        "the rank to which it sends|call {function} on the contiguous gradient, into a contiguous buffer, with the "
        "sizes of input and output exchanged}"
    )

    @property
    def is_of_two(self) -> bool:
        """Whether one rank sends to another."""
        return self.function in ("recv", "irecv")


class ForeignNumbersSummed(AtLine):
    """Ranks add up values that they read at indices of other ranks' parts.

    If a vocabulary is split, each rank moves the indices that it does not have into its own part, so reading does
    not raise. It then reads some other row, whose value must be zero before the sum over ranks.

    Attributes:
        place: The line that reads, as `loss.py:40`.
        summed: The line of the sum.
    """

    summed: str
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


class NeighborLeftOut(AtLine):
    """A line needs slices of a neighbor's part at the border of each part, and doesn't get them.

    A shift by one token, a causal convolution or a difference looks back, or ahead, along a dim that is split. At the
    start of its part a rank needs the last slices of the previous rank. Only the first rank has none: there the
    unsharded model has zeros, too. Shapes are right, and so are all other slices.

    Attributes:
        axis: The axis that splits the dim.
        first: How many slices are wrong at the start of each part that has a previous one.
        last: How many are wrong at the end of each part that has a next one.
    """

    axis: str
    first: int
    last: int
    why = (
        "{function} in {place} works on each rank's own part along {axis}. {first:?Its first {first:1?slice needs|"
        "{first} slices need} the end of the previous part{last:?, and its last {last:1?slice needs|{last} slices "
        "need} the start of the next part}|Its last {last:1?slice needs|{last} slices need} the start of the next "
        "part}. No rank gets it"
    )
    how = (
        "before {place}, fetch {first:?the end of the previous rank's part}{last:?{first:? and |}the start of the next "
        "rank's part} along {axis}, in an autograd.Function whose backward sends the gradient back; pad with zeros "
        "only at the ends of the whole"
    )

    @property
    def lacks(self) -> str:
        """What is wrong, in words."""
        counts = {"first": self.first, "last": self.last}
        sides = [f"its {side} {f'{count} slices' if count > 1 else 'slice'}" for side, count in counts.items() if count]
        return f"each part is right but for {' and '.join(sides)} along {self.axis}, if it has a neighbor there"
