"""Causes that lie in the first wrong module of a step: what it does to its inputs, or how it passes gradients back."""

from __future__ import annotations

from shardviz.explain.cause import Cause
from shardviz.explain.step import UNEXPLAINED


class UnsummedModule(Cause):
    """A module returns one term of a sum on each rank, and the next reads it as the whole.

    In other layers the terms are summed, so here the sum was left out. Terms have the shape of the sum.

    Attributes:
        module: The module that returns the terms.
        reader: The module that reads them.
        axis: The axis along which they are.
    """

    module: str
    reader: str
    axis: str
    kinds = ("unreduced-output", "wrong-value")
    why = (
        "The output of {module} was not summed over {axis}: each rank multiplied its own part of the features, and "
        "{reader} reads one rank's terms as if they were the whole"
    )
    how = (
        "all_reduce the output of {module} over {axis} before {reader} reads it, in a function whose backward hands "
        "the gradient on as it is (RowwiseParallel does)"
    )


class UngatheredInput(Cause):
    """A module computes with a rank's own part alone, and its result needs the other parts.

    The axis splits a dim over which the module works, such as the sequence in attention. The local computation runs
    without an error.

    Attributes:
        module: The module.
        axis: The axis that splits its input.
        dim: The dim that is split.
    """

    module: str
    axis: str
    dim: int
    kinds = ("wrong-value",)
    why = (
        "Each rank along {axis} has its own part of dim {dim} of the input of {module}, and its result needs the "
        "others' parts: keys and values that are not gathered over {axis} or in another order than their positions, a "
        "mask or positions counted within the part, statistics of the part alone, or a halo that was not exchanged"
    )
    how = (
        "look at {module}: gather over {axis} what it needs of the other ranks, in the order of their coordinates, and "
        "count positions from the rank's first in the whole"
    )


class UnexplainedModule(Cause):
    """A module goes wrong although its inputs are right, and no rule explains how.

    Its weights and inputs are the unsharded model's, so what differs is its own code or a collective in it.

    Attributes:
        module: The module.
        summed: A module in it whose output is the terms of a sum; empty if there is none.
        axis: The axis along which the terms are.
    """

    module: str
    summed: str = ""
    axis: str = ""
    kinds = ("wrong-value",)
    why = UNEXPLAINED + " in {module}, although its inputs are right"
    how = (
        "look at {module} first: {summed:?check that it sums the output of {summed} over {axis} before it uses it, and "
        "then how it uses the sum|where it differs from the unsharded model, and the collectives in it}"
    )


class UnexplainedBetweenModules(Cause):
    """A gradient goes wrong on its way between two modules, and no rule explains how.

    Both modules' own backward is right. What the model does between them has a backward that does not fit: a
    collective, or the transfer between two stages.

    Attributes:
        module: The module that is given the wrong gradient.
        after: The module, or what, reads its output and gives back a right one.
    """

    module: str
    after: str
    kinds = ("wrong-value",)
    why = (
        UNEXPLAINED + " in backward, between {after} and {module}: a collective without a backward, or with one that "
        "does not match its forward, or a gradient that is scaled or cut as it is sent between stages"
    )
    how = "look at what is done with the output of {module} before {after}, and at what comes back for it"


class UnexplainedModuleBackward(Cause):
    """A module is given the right gradient and gives back a wrong one, and no rule explains how.

    Its forward is right. The usual reason is a collective whose backward does something else than the forward needs.
    """

    module: str
    kinds = ("wrong-value",)
    why = (
        UNEXPLAINED + " in the backward of {module}: a collective without a backward, or with one that does not match "
        "its forward (a sum of copies needs none, a gather sums, a copy that each rank uses its own way sums)"
    )
    how = (
        "look at the collectives in {module}: torch.distributed's have no backward, those of "
        "torch.distributed.nn.functional sum in backward over all ranks"
    )


class ScaledByMicroBatches(Cause):
    """What stages send each other is scaled by the number of micro-batches, as the loss is.

    Accumulation needs one division by the number of micro-batches, in the loss. A second one in the activations or
    gradients changes nothing but their size.

    Attributes:
        module: The module at which the factor appears.
        direction: `forward` or `backward`.
        parts: The number of micro-batches.
        is_divided: Whether it is divided by that number; else multiplied.
    """

    module: str
    direction: str
    parts: int
    is_divided: bool
    kinds = ("wrong-scale",)
    why = (
        "What goes through {module} in {direction} is {is_divided:?divided|multiplied} by {parts}, the number of "
        "micro-batches, once more than the loss is"
    )
    how = "divide the loss by {parts} and nothing else: not what is sent between stages"


class ScaledBetweenModules(Cause):
    """An output is multiplied by a number on its way to the next module.

    Both modules are right by themselves. The code between them, for instance that which sends from one stage to the
    next, scales what it passes on.

    Attributes:
        after: The module that returns the right output.
        module: The module that receives another.
    """

    after: str
    module: str
    kinds = ("wrong-scale",)
    why = (
        "The output of {after} is right, and {module} receives it multiplied by a number: it is scaled on the way, as "
        "where one stage of a pipeline sends to the next"
    )
    how = "look at the code between {after} and {module} that sends, receives or divides"


class RepeatedForwardSum(Cause):
    """A module sums over ranks what is the whole value already.

    Its weights were never split, or another layer has summed before. The output is too large by the size of the axis.

    Attributes:
        module: The module; empty if it is not known.
        axes: The axes whose size is the factor; empty if no axis has that size.
        vector: A vector, usually a bias, that is added afterwards and is right.
    """

    module: str
    axes: str
    vector: str = ""
    kinds = ("wrong-scale",)
    why = (
        "{vector:?The tensor that {vector} is added to was already the whole sum when it was summed over {axes} again, "
        "or every rank along {axes} has the whole of it and not its own terms|{module} sums{axes:? over {axes}} what "
        "is the whole sum already, or was never split, or scales by a number that changes when it is sharded}"
    )
    how = (
        "sum{axes:? over {axes}} once, of parts that differ from rank to rank{vector:?; add {vector} after the sum|; "
        "look at {module} for what else multiplies}"
    )


class AveragedForward(Cause):
    """A module averages the terms of a sum, or keeps one of several equal contributions.

    The reduction takes the mean, or a division by a local size is left in the module. The output is too small by
    a constant factor.

    Attributes:
        module: The module; empty if it is not known.
        axes: The axes whose size is the divisor; empty if no axis has that size.
        vector: A vector, usually a bias, that is added afterwards and is right.
    """

    module: str
    axes: str
    vector: str = ""
    kinds = ("wrong-scale",)
    why = (
        "{vector:?The ranks' terms were averaged over {axes} where they are summed, and {vector} was added "
        "afterwards|{module} averages{axes:? over {axes}} the terms of a sum, or has one of several equal "
        "contributions, or divides by a number that changes when it is sharded}"
    )
    how = (
        "sum{axes:? over {axes}} and do not divide{vector:?; add {vector} after the sum|; look at {module} for what "
        "else divides}"
    )


class UnlikeLayers(Cause):
    """One layer's weight is in another order than the same weight of the other layers.

    A permuted weight is right if the tensors that it meets are permuted too. If a single layer differs, its shapes
    still fit and its result is wrong.

    Attributes:
        tensor: The weight.
        dim: The dim whose parts are in another order.
    """

    tensor: str
    dim: int
    kinds = ("misordered-within-shard",)
    why = (
        "Parts of dim {dim} of {tensor} were put together, flipped or loaded in another order than those of the tensor "
        "it is multiplied with"
    )
    how = "cut {tensor} as the other layers' are cut; if the order is meant, put that tensor in the same order"


class StatisticsOfPart(Cause):
    """Ranks normalize by the mean or variance of their own part.

    A norm over rows or channels that an axis splits sees local values only. Each rank's result looks normalized, with
    a factor and an offset of its own.
    """

    axes: str
    kinds = ("wrong-value",)
    why = (
        "Ranks normalize by the statistics (mean, variance, mean square) of their own part, where {axes} cut what they "
        "are taken over"
    )
    how = (
        "sum counts, values and squares over {axes} before the division, in a function whose backward sums too, or "
        "gather the features of a norm whose features are split; for BatchNorm, SyncBatchNorm over all ranks that have "
        "a part of the batch"
    )
