"""Causes of a wrong loss, or of another logged value, although the outputs are right."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.explain.cause import Cause
from shardviz.explain.step import UNEXPLAINED

if TYPE_CHECKING:
    from fractions import Fraction


class UnexplainedLoss(Cause):
    """The loss is wrong although the outputs are right, and no rule explains it.

    Between outputs and loss there are only labels, masks and means. Ranks that count different numbers of tokens, and
    labels that were shifted after the cut, are the usual reasons.

    Attributes:
        reordered: A module whose tokens have an order of their own; the labels may lack it.
        or_else: A second cause that fits.
    """

    reordered: str = ""
    or_else: Cause | None = None
    kinds = ("wrong-value",)
    why = (
        f"{UNEXPLAINED}, although the outputs are right: a mean of means where ranks or micro-batches count unequal "
        "numbers of tokens or rows, or labels or masks that were shifted or padded after they were cut"
        "{reordered:?; or labels in another order than the tokens, which {reordered} has in an order of their own}"
    )
    how = (
        "{reordered:?cut and order the labels with the same positions as the tokens; }divide each sum by the number of "
        "tokens of all ranks, all_reduced, or of all micro-batches; shift labels before they are cut"
    )

    @property
    def rivals(self) -> tuple[Cause, ...]:
        """The second cause, if there is one."""
        return (self.or_else,) if self.or_else else ()


class MiscountedTerm(Cause):
    """One term of a loss counts more or less often than the others.

    A balance or auxiliary term is summed over ranks and then again with the loss, is not divided by the number of
    micro-batches, or is added for one of them only. The main term is right, so the curve looks as always.

    Attributes:
        term: Which term it is, counted from 1 in the order of the loss's additions.
        count: How many terms there are.
        times: How often it counts.
    """

    term: int
    count: int
    times: Fraction
    kinds = ("wrong-scale",)
    why = (
        "{times:?Term {term} of the {count} terms that the loss adds up, such as a balance or auxiliary term, counts "
        "{times:times} what it should beside the others: it is summed over ranks or micro-batches and the others are "
        "averaged, or the other way round|Term {term} of the {count} terms that the loss adds up does not reach the "
        "gradients: it is left out of the loss that backward runs on, or detached}"
    )
    how = (
        "{times:?reduce every term of the loss alike: divide each by the same number of ranks and micro-batches|add it "
        "to the loss before backward, in every micro-batch}"
    )


class TermOfPart(Cause):
    """One term of a loss is another number than the unsharded model's, and the others are right.

    A balance or auxiliary term multiplies or squares statistics of all tokens. Each rank has those of its own tokens,
    and the mean of such products is not the product of the means.

    Attributes:
        term: Which term it is, counted from 1 in the order of the loss's additions.
        count: How many terms there are.
    """

    term: int
    count: int
    kinds = ("wrong-value",)
    why = (
        "Term {term} of the {count} terms that the loss adds up is not what the unsharded model has, and the others "
        "are right: it is computed from statistics of each rank's own rows, such as the share of its own tokens that "
        "go to each expert in a balance term"
    )
    how = (
        "all_reduce the counts and means that the term is made of over all ranks before they are multiplied, or divide "
        "by the number of all ranks' rows"
    )


class UnexplainedValue(Cause):
    """A logged value is wrong although the outputs are right, and no rule explains it.

    The value is put together from the ranks' parts. A part that counts twice or not at all changes the number only.

    Attributes:
        or_else: A second cause that fits.
    """

    or_else: Cause | None = None
    kinds = ("wrong-value",)
    why = UNEXPLAINED + ", although the outputs are right"
    how = "look at the parts it is computed from: each counts once, over the axes that split it and no others"

    @property
    def rivals(self) -> tuple[Cause, ...]:
        """The second cause, if there is one."""
        return (self.or_else,) if self.or_else else ()


class MiscountedExponentials(Cause):
    """A cross entropy over a split vocabulary repeats or averages its exponentials.

    Each rank has the exponentials of its own words, and they are added once. A sum over ranks that have all words, a
    second sum or an average makes the loss wrong by a constant, which training curves do not show.

    Attributes:
        size: How many ranks were summed or averaged over.
        axes: The axes of this size.
        is_repeated: Whether each part counts several times; else the sum was averaged.
    """

    size: int
    axes: str
    is_repeated: bool
    kinds = ("wrong-value",)
    why = (
        "The loss is too {is_repeated:?large|small} by log({size}) = {log:.5g}, and {size} is the size of {axes}: the "
        "sum of exponentials of the softmax {is_repeated:?counts every part of the vocabulary {size} times|is divided "
        "by {size}: averaged over ranks, not summed}"
    )
    how = (
        "all_reduce the sum of exponentials over {axes} with ReduceOp.SUM, once, where each rank has its own words; "
        "leave the sum out where each rank has all of them"
    )

    @property
    def log(self) -> float:
        """How far off the loss is."""
        return math.log(self.size)


class PaddingRead(Cause):
    """What pads an output's dim is read as if it were a part of the result.

    A vocabulary is padded so that it divides by the number of ranks. The rows of the weight beyond the last word give
    logits, too, which a softmax counts and which labels never choose.

    Attributes:
        dim: The dim.
        size: How long it is in the unsharded model.
        padded: How long all parts of it are together.
        is_returned: Whether the padding is returned with the output, rather than in the parts that a loss reads.
    """

    dim: int
    size: int
    padded: int
    is_returned: bool = False
    kinds = ("wrong-shape", "wrong-value")
    why = (
        "Dim {dim} of the output is padded from {size} to {padded}{is_returned:?, and nothing cuts the padding off|, "
        "and the loss counts the padding: the outputs are right without it, and the loss is not}"
    )
    how = (
        "{is_returned:?cut the output to the first {size} along dim {dim}|cut the padding off, or set its logits to "
        "-inf, before the maximum and the sum of exponentials}"
    )


class PartialVocabularyLoss(Cause):
    """The loss is computed from one shard of the outputs, such as a part of the vocabulary.

    Labels, maxima and sums refer to the whole vocabulary, and each rank has only its own words. A label outside the
    shard picks some other word instead of raising.
    """

    axes: str
    kinds = ("wrong-value",)
    why = (
        "Ranks along {axes} have the same batch, and what they may split is the vocabulary or another dim of the "
        "outputs: labels that were not moved to a shard's own words, words of other shards that are not masked, or a "
        "maximum, a sum or a mean over a rank's own part only"
    )
    how = (
        "subtract the first word of the rank's shard from the labels and mask those outside it; all_reduce the "
        "maximum, the sum of exponentials and the chosen logit; or use loss_parallel()"
    )


class FunctionBeforeMean(Cause):
    """A function of the loss, such as its exponential, is averaged instead of the loss.

    Perplexity is the exponential of the mean loss. The mean of the ranks' perplexities is another number, close enough
    to go unnoticed.
    """

    function: str
    axes: str
    kinds = ("wrong-value",)
    why = "{function} was taken before the losses were averaged: the mean of {function} is not {function} of the mean"
    how = "average the losses over {axes} first, then take {function}"


class MeanOfMeans(Cause):
    """The loss is the mean of the ranks' means, which is not the mean over the whole batch.

    Ranks whose parts have fewer counted labels weigh each of them more, in the loss and in the averaged gradients.
    Every number is finite and nearly right.
    """

    kinds = ("wrong-value", "wrong-scale")
    why = (
        "The loss is a mean of means: each rank divides by what it counts in its own part of the batch (labels that "
        "are not ignored, tokens, weights), and these counts are unequal"
    )
    how = (
        "divide each rank's sum by the count of all ranks, all_reduced, and multiply by the number of ranks over which "
        "gradients are averaged"
    )


class ScalarNotReduced(Cause):
    """Ranks log their own part of a value, and a reduction over an axis is missing.

    `.item()` of a DTensor with a Partial placement reads the local term and asks nobody. Rank 0's log then shows one
    rank's contribution, which looks plausible.

    Attributes:
        axes: The axes over which a reduction is missing.
        op: The reduction, as torch calls it; empty if it is not known.
    """

    axes: str
    op: str = ""
    kinds = ("unreduced-scalar",)
    why = (
        ".item() or float() of a DTensor with a Partial placement, or of a local tensor, reads its own part "
        "only{op:?|; or the number is each rank's own by nature}"
    )
    how = (
        "all_reduce the value over {axes}{op:? with ReduceOp.{op}} before it is logged; of a DTensor, log "
        "full_tensor().item(){op:?|; leave out of the step's log what is meant to differ}"
    )
    references = ("pytorch#144054",)


class ScalarOfPart(Cause):
    """A logged value is computed from one shard, and no reduction makes up for that.

    An argmax, a maximum, a count or an accuracy over a shard is not that of the whole. Each rank gets a plausible
    number.

    Attributes:
        axes: The axes that split, or may split, what it is computed from.
        is_same_batch: Whether ranks along them have the same batch, so that parts may also be copies.
    """

    axes: str
    is_same_batch: bool = False
    kinds = ("unreduced-scalar", "wrong-value")
    why = (
        "{is_same_batch:?Ranks along {axes} have the same batch, and what they may split is the vocabulary or another "
        "dim of the outputs: the value is of a rank's own part only, as an argmax, a maximum or a count over a shard "
        "is, or counts parts that are copies more than once|Each rank computes it from its own part, and no sum or "
        "mean makes up for that: a softmax or an accuracy over a shard; or .item() of a DTensor that is not whole}"
    )
    how = (
        "compute it of the whole: gather the shards over {axes} first, or {is_same_batch:?reduce what is computed of "
        "each part|use loss_parallel() and full_tensor()}"
    )
    references = ("pytorch#144054",)


class NormOfPart(Cause):
    """A logged norm is that of a rank's part, or a sum or mean of such norms.

    Each rank takes the root of its own squares. Norms do not add up, only squares do. A rank's own norm is a plausible
    number, only smaller; if the roots are reduced, all ranks log the same wrong one.

    Attributes:
        axes: The axes that split what the norm is of.
        is_reduced: Whether the roots were reduced over them.
    """

    axes: str
    is_reduced: bool = False
    kinds = ("unreduced-scalar", "wrong-scale")
    why = (
        "{is_reduced:?Each rank took the root of the squares of its own parts, and the roots were reduced over "
        "{axes}|A norm was taken of what each rank holds only}"
    )
    how = (
        "all_reduce the sum of squares over {axes} with ReduceOp.SUM, and take the root once, after it; "
        "torch.nn.utils.get_total_norm does so for DTensors"
    )
    references = ("pytorch#144054", "RLinf#1558")
