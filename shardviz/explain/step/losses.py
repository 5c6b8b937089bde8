"""Causes of a wrong loss, or of a different logged value or statistic, although the outputs are right."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.explain.cause import AtLine, AtPlace, Cause

if TYPE_CHECKING:
    from fractions import Fraction


class UnexplainedLoss(Cause):
    """The loss is wrong although the outputs are right, and no rule explains it.

    Between outputs and loss there are only labels, masks and means. Usually ranks count different numbers of tokens, or
    the labels were shifted after the cut.

    Attributes:
        reordered: A module whose tokens have an order of their own; the labels may lack this order.
        counted_over: The axes over which the step sums whole numbers before backward, as a count of tokens.
        or_else: A second cause that fits.
    """

    reordered: str = ""
    counted_over: str = ""
    or_else: Cause | None = None
    why = (
        "{reordered:?At {reordered} the tokens are in a different order than the labels}",
        (
            "{counted_over:?The step sums its counts over {counted_over}, and the code shifts or pads labels or masks "
            "after it cuts them|Ranks or micro-batches count unequal numbers of tokens, and the loss is the mean of "
            "their means}"
        ),
        (
            "{counted_over:?The step sums the counts, and doesn't divide the loss by the sum|The code shifts or pads "
            "labels or masks after it cuts them}"
        ),
    )
    how = (
        "cut and order the labels with the same positions as the tokens",
        "{counted_over:?shift and pad labels before you cut them|divide each sum by the all_reduced number of tokens}",
        "{counted_over:?divide each rank's sum by the summed count|shift and pad labels before you cut them}",
    )


class TargetsOfOtherRows(Cause):
    """The loss is wrong and the outputs are right, in micro-batches that aren't runs of rows.

    One stage cuts the inputs with a stride, x[i::n], and another one cuts the targets into runs of rows. Shapes agree,
    so every output is compared with another row's target.

    Attributes:
        first: The batch's rows of the first micro-batch.
        second: Those of the second.
    """

    first: str
    second: str
    why = (
        "The first micro-batch has rows {first} of the batch, the second {second}, and the loss compares them with the "
        "targets of other rows",
        "Micro-batches count unequal numbers of targets, and the loss is the mean of their means",
    )
    how = (
        "cut the targets with the same rows as the inputs, in the same order",
        "divide the sum over all micro-batches by the number of all targets",
    )


class MiscountedTerm(Cause, kind="wrong-scale"):
    """One term of a loss counts more or less often than the others.

    A balance or auxiliary term is summed over ranks and then again with the loss, is not divided by the number of
    micro-batches, or is added for one of them only. The main term is right, so the curve looks normal.

    Attributes:
        term: Which term it is, counted from 1 in the order of the loss's additions.
    """

    term: int
    count: int
    times: Fraction
    why = (
        "{times:?Term {term} of the loss's {count} terms counts {times:times} its right weight: the code sums it over "
        "ranks or micro-batches and averages the others, or the reverse|Term {term} of the loss's {count} terms "
        "doesn't reach the gradients: the loss that backward runs on leaves it out, or the code detaches it}"
    )
    how = (
        "{times:?divide every term of the loss by the same number of ranks and micro-batches|add the term to the loss "
        "before backward, in every micro-batch}"
    )


class TermOfPart(Cause):
    """One term of a loss differs from the unsharded model's, and the others are right.

    A balance or auxiliary term multiplies or squares statistics of all tokens. Each rank has the statistics of its own
    tokens, and the mean of products is not the product of means.

    Attributes:
        term: Which term it is, counted from 1 in the order of the loss's additions.
    """

    term: int
    count: int
    why = (
        "Each rank computes term {term} of the loss's {count} terms from statistics of its own rows, such as its share "
        "of tokens per expert in a balance term"
    )
    how = (
        "all_reduce the counts and means behind the term before they are multiplied, or divide by the number of all "
        "ranks' rows"
    )


class UnexplainedValue(Cause):
    """A logged value is wrong although the outputs are right, and no rule explains it.

    The value is put together from the ranks' parts. A part that counts twice or never changes only the number.

    Attributes:
        or_else: A second cause that fits.
    """

    or_else: Cause | None = None
    why = "The outputs are right, so the step puts the value together wrongly from the ranks' parts"
    how = "all_reduce each part once, over the axes that split it and no other axis"


class MiscountedExponentials(Cause):
    """A cross entropy over a split vocabulary repeats or averages its exponentials.

    Each rank has the exponentials of its own words, and one sum adds them. A sum over ranks that have all words, a
    second sum or an average makes the loss wrong by a constant, which training curves don't show.

    Attributes:
        size: How many ranks the sum or the average runs over.
        is_repeated: Whether each part counts several times; if not, the sum was averaged.
    """

    size: int
    axes: str
    is_repeated: bool
    why = (
        "The softmax {is_repeated:?counts every part of the vocabulary {size} times|averages its exponentials over "
        "{size} ranks instead of summing them}. The loss is too {is_repeated:?large|small} by log({size}) = {log:.5g}, "
        "and {size} is the size of {axes}"
    )
    how = (
        "all_reduce the sum of exponentials over {axes} with ReduceOp.SUM, once, and give each rank its own words: "
        "don't gather the logits before; ranks that have all words need neither the sum nor an offset of their labels"
    )

    @property
    def log(self) -> float:
        """How far off the loss is."""
        return math.log(self.size)


class PaddingSummed(AtLine, kind="wrong-value"):
    """A line sums over padding that the unsharded model cuts off first, or lacks.

    A vocabulary is padded so that ranks divide it. One process has no padding, or cuts it off the logits; a rank that
    has a part of them keeps it, and the padding's logits add to the denominator of the softmax.

    Attributes:
        cut: The line in which the unsharded model cuts the padding off; empty if it has none.
        size: How long it is without padding.
        padded: How long it is with it.
    """

    cut: str
    dim: int
    size: int
    padded: int
    why = (
        "{function} in {place} counts the padding: the unsharded model {cut:?keeps {size} of {padded} elements of dim "
        "{dim} in {cut}, and the ranks keep all|has {size} elements where the ranks have {padded} together}"
    )
    how = (
        "set the elements from {size} on, counted in the whole dim, to a number that adds nothing (float('-inf') for "
        "logits) before {place}"
    )


class PaddingRead(Cause):
    """The padding of an output's dim is read as if it were part of the result.

    A vocabulary is padded so that ranks divide it. Rows of the weight beyond the last word give logits, too.

    Attributes:
        size: How long it is in the unsharded model.
        padded: How long all parts of it are together.
        is_returned: Whether the output is returned with it, rather than as parts that a loss reads.
        weight: A weight whose padding has a gradient, if that shows it; else empty.
    """

    dim: int
    size: int
    padded: int
    is_returned: bool = False
    weight: str = ""
    kinds = ("wrong-shape", "wrong-value")
    why = (
        "{weight:?Dim {dim} of {weight}|Dim {dim} of the output} is padded from {size} to {padded}{is_returned:?, and "
        "nothing cuts the padding off|, and the loss counts the padding: {weight:?its slices get a gradient|the "
        "outputs are right without it, and the loss is not}}"
    )
    how = (
        "{is_returned:?cut the output to the first {size} along dim {dim}|cut the padding off, or set its logits to "
        "-inf, before the maximum and the sum; count words from the whole's first, not the shard's}"
    )


class PartialVocabularyLoss(Cause):
    """The loss is computed from one shard of the outputs, such as a part of the vocabulary.

    Labels, maxima and sums refer to the whole vocabulary, and each rank has only its own words. A label outside the
    shard picks some other word instead of raising.

    Attributes:
        axes: The axes that may split the vocabulary.
        reduced_over: The axes over which the step reduces three numbers of every row, or more, before backward.
    """

    axes: str
    reduced_over: str = ""
    why = (
        "{reduced_over:?|If {axes} splits the vocabulary, the loss takes its maximum or sum over one shard}",
        "Labels outside a rank's words aren't masked, or nothing subtracts the rank's first word",
        "{reduced_over:?A mask, bias or weight of the words counts from the shard's first word|}",
    )
    how = (
        "{reduced_over:?|use loss_parallel(), or all_reduce maximum, sum of exponentials and chosen logit over {axes}}",
        "subtract the shard's first word from the labels, and mask labels outside the shard",
        "{reduced_over:?add the shard's first word to the positions that it is compared with|}",
    )


class LossNotReturned(Cause):
    """The step returns 0 for its loss, and the gradients come of another number.

    A loop over micro-batches runs backward on each loss, and adds none of them to the total that it returns and logs.
    """

    why = "The step returns 0 on every rank, and backward runs on something else: gradients are right"
    how = "add each loss that backward runs on, detached, to what the step returns"


class FunctionBeforeMean(Cause):
    """A function of the loss, such as its exponential, is averaged instead of the loss.

    Perplexity is the exponential of the mean loss. The ranks' mean is near that, and is not it.
    """

    function: str
    axes: str
    why = "The step takes {function} before it averages the losses. The mean of {function} isn't {function} of the mean"
    how = "average the losses over {axes} first, then take {function}"


class MeanOfMeans(Cause):
    """The loss is the mean of the ranks' means, which is not the mean over the whole batch.

    A rank with fewer counted labels gives each of them more weight, in the loss and in the averaged gradients. Every
    number is finite and nearly right.

    Attributes:
        axes: The axes that split the batch; empty if they are not known.
        size: How many ranks there are along them.
        place: The line that divides, as `train.py:30`, if it was found.
        micro_batches: How many parts a rank divides by their own counts, if there are several.
    """

    axes: str = ""
    size: int = 0
    place: str = ""
    micro_batches: int = 0
    kinds = ("wrong-value", "wrong-scale")
    why = (
        "The loss is a mean of means. {place:?{place} divides by the sum or count of each "
        "{micro_batches:?micro-batch's|rank's} own rows|Each {micro_batches:?micro-batch|rank} divides by the labels, "
        "tokens or weights that it counts in its own part}, and the counts differ"
    )
    how = (
        "divide each rank's sum{place:? in {place}} by the count {micro_batches:?of all micro-batches }all_reduced "
        "over {axes:?{axes} and no other axis, and multiply by {size}, the number of ranks along {axes}|the ranks that "
        "split the batch, and multiply by their number}: gradients are averaged over them"
    )


class TermsAveraged(AtPlace, kind="wrong-scale"):
    """Each rank's loss is a term of a sum over ranks that average their gradients.

    A rank that divides its own sum by the count of all ranks has a term: the terms add up to the loss. FSDP and DDP
    average gradients, so loss and gradients are too small by the number of ranks.

    Attributes:
        place: The line that makes the term, as `train.py:30`.
        size: How many ranks there are along them.
    """

    axes: str
    size: int
    why = (
        "{place} gives each rank its term of the loss's sum over {axes}, such as its own sum divided by the count of "
        "all ranks, and gradients are averaged over {axes}"
    )
    how = "multiply the loss in {place} by {size}, the number of ranks along {axes}"


class ScalarNotReduced(Cause, kind="unreduced-scalar"):
    """Ranks log their own part of a value, and a reduction over an axis is missing.

    `.item()` of a DTensor with a Partial placement reads the local term and asks no other rank. Rank 0's log then shows
    one rank's contribution, which looks plausible.

    Attributes:
        op: The reduction's name in torch; empty if it is not known.
        holders: The ranks that have the value if all others log zero, as those of a pipeline's last stage.
    """

    axes: str
    op: str = ""
    holders: str = ""
    why = (
        "{holders:?The value is computed on {holders} alone, and nothing sends it over {axes} to the ranks that log 0|"
        "The step logs .item() or float() of a Partial DTensor or of a local tensor, which reads this rank's part "
        "only}",
        "{op:?|The value is meant to differ between ranks}",
    )
    how = (
        "{holders:?broadcast the value from {holders} over {axes}, or log it there alone|"
        "log full_tensor().item() of a DTensor, or all_reduce the value over {axes}{op:? with ReduceOp.{op}}}",
        "{op:?|leave the value out of the step's log}",
    )
    references = ("pytorch#144054",)


class ScalarOfPart(Cause):
    """A logged value is computed from one shard, and no reduction makes up for that.

    An argmax, a maximum, a count or an accuracy over a shard is not that of the whole. Each rank gets a number.

    Attributes:
        axes: The axes that split, or may split, the tensor behind the value.
        is_same_batch: Whether ranks along them have the same batch, so that parts may also be copies.
    """

    axes: str
    is_same_batch: bool = False
    kinds = ("unreduced-scalar", "wrong-value")
    why = (
        (
            "{is_same_batch:?Ranks along {axes} see the same batch, and the value comes from one shard of the outputs, "
            "such as an argmax over part of the vocabulary|Each rank computes the value from its own part, such as a "
            "softmax or an accuracy over a shard, and no sum or mean of these is right}"
        ),
        (
            "{is_same_batch:?The value counts equal copies more than once|.item() reads only the local part "
            "of a DTensor}"
        ),
    )
    how = (
        "gather the shards over {axes} before you compute the value{is_same_batch:?|, or use loss_parallel()}",
        "{is_same_batch:?count each part on one rank only|log full_tensor().item()}",
    )
    references = ("pytorch#144054",)


class OwnCountOfScalar(Cause):
    """A logged mean divides what is summed over ranks by the number of a rank's own elements.

    A DTensor's `to_local().numel()` counts the rank's shard, `numel()` counts the whole. Each rank logs a mean that is
    too large, by about the number of ranks, or by its root in a root mean square.

    Attributes:
        axes: The axes over which the ranks' elements add up to the whole.
        is_root: Whether the value is the root of a mean.
    """

    axes: str
    is_root: bool
    kinds = ("unreduced-scalar", "wrong-value")
    why = (
        "What is summed over {axes} is divided by the number of the rank's own elements{is_root:?, before its root is "
        "taken}"
    )
    how = "divide by the number of the whole's elements: numel() of the DTensor, or counts that are summed over {axes}"


class NormOfPart(Cause):
    """A logged norm is that of a rank's part, or a sum or mean of such norms.

    Each rank takes the root of its own squares. Norms do not add up, only squares do. A rank's own norm is a plausible
    number, only smaller. If the roots are reduced, all ranks log the same wrong number.

    Attributes:
        axes: The axes that split the tensors of the norm.
        is_reduced: Whether the roots were reduced over them.
    """

    axes: str
    is_reduced: bool = False
    kinds = ("unreduced-scalar", "wrong-scale")
    why = (
        "{is_reduced:?Each rank takes the square root of its own squares, and the roots are reduced over {axes}|Each "
        "rank logs the norm of its own shard. Nothing sums the squares over {axes}}"
    )
    how = (
        "all_reduce the squares over {axes} with ReduceOp.SUM before the square root, or call "
        "torch.nn.utils.get_total_norm on the DTensors"
    )
    references = ("pytorch#144054", "RLinf#1558")


class SummedValue(Cause, kind="wrong-scale"):
    """A logged number is a sum over ranks or micro-batches, and should be their average.

    Each rank or micro-batch has the same number, for instance a mean. The sum multiplies it by the number of ranks or
    micro-batches, and the curve in the log keeps its shape.
    """

    axes: str
    why = (
        "Each rank logs a mean, and an all_reduce sums the means{axes:? over {axes}} instead of averaging them",
        "The values of the micro-batches are summed, and not divided by their number",
    )
    how = (
        "pass op=ReduceOp.AVG to the all_reduce{axes:? over {axes}}, and call it once",
        "divide the value by the number of micro-batches",
    )
    references = ("gpt-neox#1259",)


class DividedMean(Cause, kind="wrong-scale"):
    """A logged mean is divided by a number of ranks once more.

    The loss function returns a mean, and the reduction for the log averages it. Another division by the world size
    makes the logged number too small by a constant factor.
    """

    axes: str
    divisor: Fraction
    why = "The value is already a mean, and the code divides it by {axes:?the size of {axes}|{divisor}} once more"
    how = "remove that division: the reduction already takes the mean"
    references = ("gpt-neox#1259",)


class UnsummedValue(Cause, kind="wrong-scale"):
    """A logged number counts one rank's part only, and all parts happen to be equal.

    Each rank computes the number from its own rows or shards, and nothing adds the parts up. The parts are equal, so
    the ranks agree and no comparison between ranks finds the error.
    """

    axes: str
    why = (
        "Each rank logs the number of its own part. Nothing sums it over {axes:?{axes}|the ranks}",
        "The value is a mean that was averaged twice",
    )
    how = (
        "all_reduce the value with ReduceOp.SUM{axes:? over {axes}}",
        "take the mean once",
    )
    references = ("gpt-neox#1259",)


class StatisticOfParts(Cause):
    """A logged statistic is that of each rank's part, or a mean or sum of these.

    A norm, a deviation or a largest number of the whole is no mean of those of the parts. What is logged is near it, as
    parts are alike, and differs by the root of the number of ranks if squares are averaged instead of summed.

    Attributes:
        statistic: What it should be of the whole.
        way: What is logged.
        remedy: How it is made of the parts.
    """

    statistic: str
    way: str
    remedy: str
    why = "What is logged is {way}, and that isn't the {statistic} of the whole"
    how = "{remedy}"
