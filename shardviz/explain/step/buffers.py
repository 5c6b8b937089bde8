"""Causes of buffers that are wrong after a step."""

from __future__ import annotations

from typing import Literal

from shardviz.explain.cause import Cause


class RepeatedCount(Cause):
    """A buffer that a forward adds to has everything several times.

    Activations that are recomputed in backward run the forward once more, with all that it writes. A sum over ranks
    that counted the same has the same effect.
    """

    times: int
    why = (
        (
            "The forward that writes the buffer runs {times} times in a step: torch.utils.checkpoint runs it again in "
            "backward"
        ),
        "The code sums the buffer over ranks that counted the same rows",
    )
    how = (
        "write the buffer outside the module that torch.utils.checkpoint recomputes",
        "sum the buffer over the axes that split what it counts, and over no others",
    )

    @property
    def is_twice(self) -> bool:
        """Whether a recomputation may be the cause."""
        return self.times == 2


class BufferOfParts(Cause, kind="unreplicated"):
    """Copies of a buffer differ along an axis whose ranks see the same rows of the batch.

    Its module sees a part of the features, or a term of a sum that is still pending, and updates the buffer from it.
    Nothing synchronizes buffers, so each rank keeps its own.

    Attributes:
        along: The axes, in words.
    """

    along: str
    why = (
        "The module updates the buffer from activations that differ along {along}: parts of the features, or terms of "
        "a sum"
    )
    how = "all_reduce those activations or their statistics over {along} before the update"


class UnreducedStatistics(Cause, kind="unreplicated"):
    """Each rank's buffer has the statistics of its own part of the batch only.

    Running statistics, such as a maximum, are updated from local rows. Without a reduction every rank normalizes or
    scales by its own numbers.

    Attributes:
        along: The axes that split the batch, in words.
        op: The reduction that gives the unsharded model's value; empty if that may be chance.
    """

    along: str
    op: str
    why = (
        "The module updates the buffer from each rank's own part of the batch, which {along} splits. Nothing reduces "
        "the statistics"
    )
    how = "all_reduce the statistics over {along}{op:? with ReduceOp.{op:upper}|} before the update"


class OwnBufferRead(Cause, kind="unreplicated"):
    """Ranks update a buffer from their own rows, and their forward reads it.

    Statistics that only evaluation reads may differ between ranks. A bias that balances experts, a codebook or a scale
    that the training forward reads makes each rank's model a different one, and no gradient shows it.

    Attributes:
        along: The axes that split the batch, in words.
        is_sent: Whether DistributedDataParallel sends rank 0's to all ranks before the next forward.
    """

    along: str
    is_sent: bool = False
    why = (
        "The forward reads this buffer, and each rank updates it from its own part of the batch, which {along} splits. "
        "{is_sent:?DistributedDataParallel sends rank 0's to all ranks, and the rows of the others don't count|Each "
        "rank trains a different model}"
    )
    how = "all_reduce the counts or sums behind the update over {along}, before the update"


class FunctionBeforeReduction(Cause, kind="wrong-value"):
    """Ranks reduce what they make of their own rows' statistics, instead of the statistics.

    A bias that balances experts moves by the sign of how far each count is from the mean. The mean of the ranks' signs
    isn't the sign of all ranks' counts. The same holds for a norm, a maximum of sums, or a mean of unequal numbers of
    rows. The copies are equal, so nothing shows it but the numbers.

    Attributes:
        along: The axes that split the batch, in words.
    """

    along: str
    why = (
        "Ranks have the same values, so the step reduces them over {along}. What it reduces is a function of each "
        "rank's own counts or sums, such as their sign or norm, and not the counts or sums",
        "One rank's values are sent to all ranks along {along}, and the rows of the others don't count",
    )
    how = (
        "all_reduce the counts or sums themselves over {along} first, then take the function of them",
        "all_reduce the values over {along} instead of sending one rank's",
    )


class BufferReducedWrongly(Cause, kind="wrong-scale"):
    """What ranks write to a buffer together is too large or too small by a size of the mesh.

    A running center, mean or count of all rows is summed over the ranks and then divided by the rows of one rank, or
    averaged after each rank divided by the rows of all. The copies are equal, so nothing shows it but the numbers.

    Attributes:
        axes: The axes whose size it is, in words.
        is_too_large: Whether it is as many times too large.
    """

    axes: str
    is_too_large: bool
    why = (
        "{is_too_large:?The code sums over {axes} and divides by a rank's own number of rows|The code averages over "
        "{axes} what is a part of a sum, or divides twice}"
    )
    how = (
        "{is_too_large:?divide by the rows of all ranks: all_reduce with ReduceOp.AVG, or sum the counts too|"
        "all_reduce it with ReduceOp.SUM, and divide once, by the rows of all ranks}"
    )


class OtherBufferBefore(Cause, kind="wrong-value"):
    """A buffer that the forward reads differs from one process's before the step.

    A center, a running scale or a bias that forwards write goes into the loss. If an earlier step wrote other values
    into it, the step that is traced computes other gradients without an error of its own. Gradients that nothing else
    explains may be wrong for that.
    """

    why = (
        "An earlier step, or code between steps, wrote other values into this buffer. What depends on it is wrong for "
        "that"
    )
    how = "trace the first step (--trace-step 1), which shows what is written into it, and by which ranks"


class StatisticsOfOneRank(Cause, kind="unreplicated"):
    """Each rank adds its own rows' statistics to a buffer, and all ranks are sent rank 0's.

    DistributedDataParallel sends buffers before each forward. A center or a scale that the forward reads then comes of
    the rows of rank 0. The copies are equal in every forward, so nothing shows it but the outputs of later steps.

    Attributes:
        along: The axes that split the batch, in words.
        line: The line that writes the buffer; empty if it is not known.
        op: The reduction that gives one process's values: `AVG` or `SUM`.
    """

    along: str
    line: str
    op: Literal["AVG", "SUM"]
    why = (
        "{line:?{line}|The forward} updates the buffer from each rank's own rows. DistributedDataParallel then sends "
        "rank 0's copy to all ranks, and the other ranks' rows don't count"
    )
    how = "all_reduce what is added to the buffer over {along} with ReduceOp.{op}, before it is added"


class BufferOfOwnSizes(Cause, kind="wrong-value"):
    """A module reads a buffer whose part on a rank is no part of the unsharded model's.

    Slopes, frequencies or scales are computed from a number of heads or channels. Computed from a rank's own number of
    them, they have the shape of the rank's part and other values.
    """

    buffer: str
    why = (
        "{buffer} holds numbers on a rank that are no part of the unsharded model's. Most likely it's made from the "
        "rank's own sizes, such as its number of heads or channels"
    )
    how = "make {buffer} from the sizes of the whole model, and take the rank's part of it"


class RowsOfOneRank(Cause, kind="unreplicated"):
    """Each rank writes only what is of its own rows to a buffer that the next forward reads.

    A queue of keys, a memory bank or a state that is carried from step to step is filled from the batch. In one process
    that is the whole batch. DistributedDataParallel sends rank 0's buffers to all ranks before the next forward, so
    that what the other ranks wrote is lost, and a position that counts rows moves by too few.

    Attributes:
        along: The axes that split the batch, in words.
        line: The line that writes the buffer, as `moco.py:42`; empty if it is not known.
        is_same_place: Whether ranks write to the same places.
    """

    along: str
    line: str
    is_same_place: bool
    why = (
        "{line:?{line}|The forward} writes each rank's own part of the batch to the buffer. DistributedDataParallel "
        "then sends rank 0's copy to all ranks, and what the others wrote is lost"
    )
    how = (
        "all_gather what is written over {along} before {line:?{line}|it is written}{is_same_place:?, and write all "
        "ranks' rows one behind the other|}"
    )


class BufferCutApart(Cause):
    """A buffer is an average of a weight, and a rank's parts of the two don't match.

    An average of weights, or a copy of them, must be cut as they are. Cut along another dim, and viewed in the weight's
    shape, it has as many elements, so that nothing raises.
    """

    buffer: str
    weight: str
    why = "{buffer} is cut differently from {weight}, whose values are averaged into it: a rank's parts don't match"
    how = "cut {buffer} along the dim and with the order of {weight}, or make it from the weight after sharding"


class OtherAverage(Cause):
    """A buffer averages a weight over steps, and not as the unsharded model's does.

    It has another decay, takes the weights before the optimizer's step in place of those after it, is updated more than
    once in a step, or not at all on some ranks, or begins with weights that a rank drew before it was given all ranks'.
    Averages are read in evaluation only, so training shows nothing.

    Attributes:
        what: What differs: its `decay`, the `moment`, the `times` that it is updated, `none`: it is not updated,
            `part`: only some of its elements are, `dealt`: each rank updates others, or `start`: it is updated as it
            should, from other numbers.
        held: What ranks have: the share that is kept, `before` or `after` the step, how many times; `before` if it is
            not updated, or from the weights that it began with.
        wanted: What the unsharded model has.
    """

    what: Literal["decay", "moment", "times", "none", "part", "start", "dealt"]
    held: str = ""
    wanted: str = ""
    why = (
        "{what:decay?The average keeps {held} of what it was, and in the unsharded model {wanted}"
        "|{what:moment?The average takes the weight as it is {held} the optimizer's step, and in the "
        "unsharded model {wanted} it|{what:times?The average is updated {held} times in a step"
        "|{what:part?The average is of whole weights, and each rank updates only the elements that it has of them"
        "|{what:start?The average began with other numbers than the weights, which are equal: it was copied before "
        "DistributedDataParallel, a broadcast or a load replaced the weights that the rank had drawn"
        "|{what:dealt?Each rank updates the average of the weights that it steps itself, and not of those that "
        "other ranks step and send: it comes before they are gathered, or is meant for the rank's own alone"
        "|{held:?Nothing updates the average, or it takes the weights before the step, with which it began"
        "|Nothing updates the average}}}}}}}"
    )
    how = (
        "{what:decay?use one decay, that depends neither on the rank nor on how many there are"
        "|{what:moment?update the average {wanted} optimizer.step()|{what:times?update the average once in a step, not "
        "in each micro-batch or for each rank|{what:part?average shards with shards, or whole weights with "
        "full_tensor()|{what:start?copy the average after the model was wrapped or loaded, or seed all ranks alike"
        "|{what:dealt?update the average of all weights on every rank, after what gathers them behind optimizer.step()"
        "|update the average on every rank, from the rank's own part{held:?, after optimizer.step()|}}}}}}}"
    )


class OtherCopyBefore(Cause, kind="wrong-value"):
    """A copy of the model, such as a teacher, is another one on some ranks before the step.

    A teacher, a reference model or an average of the weights is copied from the model. Copied before
    DistributedDataParallel, a broadcast or a load gives all ranks the same weights, it keeps what each rank drew. The
    model's own weights and outputs are right then, and its loss is not: each rank learns from another teacher.
    """

    why = (
        "The ranks' copies of the model were never made equal: this one was copied before DistributedDataParallel, a "
        "broadcast or a load replaced the weights that each rank had drawn, or only some ranks loaded it. If the loss "
        "reads it, it sends back wrong gradients"
    )
    how = "copy the model after it was wrapped or loaded, or broadcast the copy from rank 0"


class UnexplainedBuffer(Cause):
    """A buffer differs from the unsharded model's after the step, by no known rule.

    A module updates it from activations, and on each rank these can be a part of the batch or of the features. No axis
    splits the batch here, so all ranks should have the same value. An average of weights depends on its decay, too.
    """

    why = "The step updates the buffer from other numbers than the unsharded model's: activations, weights, or shares"
    how = (
        "if it is made of activations, compute it from the whole batch and all features, or all_reduce it over the "
        "axes that split them; if of a weight, print the number by which it is multiplied"
    )
