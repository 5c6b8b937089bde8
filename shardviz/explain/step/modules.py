"""Causes in the first wrong module of a step, in its forward or its backward."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class UnsummedModule(Cause):
    """A module returns one term of a sum on each rank, and the next reads it as the whole.

    Terms have the shape of the sum, so nothing raises where the sum is left out.

    Attributes:
        module: The module that returns the terms; empty if no module does.
        reader: The module that reads them.
        is_within: Whether the module is within the one that reads it.
    """

    module: str
    reader: str
    axis: str
    is_within: bool = False
    kinds = ("unreduced-output", "wrong-value")
    why = (
        "{is_within:?Nothing in {reader:called} sums the output of {module:called} over {axis}|{module:?The output of "
        "{module:called}|The input of {reader:called}} is not summed over {axis}: {reader:called} reads one rank's "
        "term as if it were the whole}"
    )
    how = (
        "all_reduce {module:?the output of {module:called}|the input of {reader:called}} over {axis} {is_within:?in "
        "{reader:called}|before {reader:called} reads it}, with a backward that returns the gradient unchanged "
        "(RowwiseParallel)"
    )


class RoundedInput(Cause):
    """A module is given inputs that are rounded to a narrower dtype, and needs them exactly.

    Timesteps, positions and angles are given as floats, and mixed precision casts all inputs that are floats. A sine of
    276 is not near that of 275. Results stay in range, so nothing raises.

    Attributes:
        dtype: What they are rounded to.
        is_fsdp: Whether FSDP wraps modules, and may cast inputs.
    """

    dtype: str
    is_fsdp: bool = False
    kinds = ("wrong-value",)
    why = (
        "{is_fsdp:?FSDP's mixed precision casts the inputs of this module, or of one around it, to {dtype}|The job "
        "casts these inputs to {dtype}}, which is too coarse for them"
    )
    how = (
        "{is_fsdp:?set cast_forward_inputs=False in the MixedPrecisionPolicy of the modules that they pass through and "
        "cast the other inputs there, or give them as integers, which aren't cast|cast what the module makes of them "
        "instead}"
    )


class UnusedWeight(Cause):
    """No rank has a gradient of a weight of the first wrong module, and the unsharded model has.

    A forward that is written again for sharding leaves out a scale, a bias or a gate, or reads it in a way that
    autograd does not see. Nothing raises, and an optimizer skips what has no gradient.
    """

    module: str
    weight: str
    why = (
        "{module:called} never uses {weight} when it is sharded",
        "{module:called} reads {weight} by .data, detach() or under no_grad(), and changes something else, too",
    )
    how = (
        "use {weight} on each rank as the unsharded forward does",
        "read {weight} itself, or its to_local(), so that a gradient comes back to it",
    )


class UngatheredInput(Cause):
    """A module computes with a rank's own part alone, and its result needs the other parts.

    The axis splits a dim over which the module works, such as the sequence in attention. The local computation runs
    without an error. A module that exchanges parts, as ring attention does, may combine them wrongly.

    Attributes:
        exchange: The collective by which ranks exchange numbers in the module; empty if they don't.
        place: The lines that run once for each rank whose part is joined, as `model.py:48`; empty if that isn't known.
        may_exchange: Whether no collectives of the step were recorded, so that ranks may exchange parts in the module.
    """

    module: str
    axis: str
    dim: int
    exchange: str = ""
    place: str = ""
    may_exchange: bool = False
    why = (
        "{exchange:?{module:called} gets other ranks' numbers along {axis} by {exchange}, and still returns a wrong "
        "result for its own part of dim {dim}. Most likely it combines the parts in a wrong order or scale, counts "
        "positions from the rank's own first one, or needs something that it doesn't exchange|{module:called} "
        "{may_exchange:?is given each rank's own part of dim {dim} along {axis}, and its result is wrong. It needs the "
        "other parts and doesn't get them, joins them in another order than the ranks', or counts positions from its "
        "own first one|computes with each rank's own part of dim {dim} along {axis}, but needs the other parts too: "
        "keys and values, statistics, a halo, or positions in the whole}}"
    )
    how = (
        "in {module:called}, {exchange:?compare what {exchange} brings with what the unsharded model reads "
        "there{place:?, and check in {place} how the parts are joined}|gather over {axis} what the result needs, in "
        "the order of the ranks' coordinates, and count positions in the whole sequence}"
    )


class UnexplainedModule(Cause):
    """A module goes wrong although its inputs are right, and no rule explains how.

    Its weights and inputs are the unsharded model's, so what differs is its own code or a collective in it.

    Attributes:
        summed: A module in it whose output is the terms of a sum; empty if there is none.
    """

    module: str
    summed: str = ""
    axis: str = ""
    why = "{module:called} goes wrong although its inputs are right. No rule explains how"
    how = (
        "look at {module:called} first: {summed:?check that it sums the output of {summed:called} over {axis} before "
        "it uses the output|at its collectives, and at code that differs from the unsharded model's}"
    )


class UnexplainedInput(Cause):
    """A module is given something else than in the unsharded model, and no rule explains how.

    Everything before it is right or was not compared, so what differs is the code that calls it: rows in a different
    order, other micro-batches, or a stage that gets another stage's output.

    Attributes:
        argument: The only input that is wrong, as `input 1`, counted from 0; empty if that isn't known.
    """

    module: str
    argument: str = ""
    why = (
        "{module:called} is given {argument:?a different {argument} (counted from 0)|another input} than in the "
        "unsharded model{argument:?|. No rule explains how}"
    )
    how = (
        "look at the code that calls {module:called}: at {argument:?what chooses its {argument}, such as the number of "
        "a layer, which a stage of a pipeline may count from 0 again|the order of rows, micro-batches and stages}"
    )


class WrongArgument(Cause):
    """Ranks give a module a different argument: a mask, positions or ids of documents.

    Tensors of floating point are the unsharded model's, or its parts. What the code computes beside them, of a rank's
    own part of the batch, often counts from that part's beginning.

    Attributes:
        module: The outermost module that is given the argument.
        argument: How its forward calls it.
        maker: The module that calls it; empty for the model itself.
        differs: Where it differs from the unsharded model's.
        is_shifted: Whether each row is the unsharded model's but for one number.
    """

    module: str
    argument: str
    maker: str
    differs: str
    is_shifted: bool
    why = (
        "The `{argument}` that {module:called} is given differs from the unsharded model's ({differs}){is_shifted:?. "
        "Every row is off by one number: it is counted from the beginning of the rank's own part|}"
    )
    how = (
        "in {maker:?{maker:called}|the model itself}, {is_shifted:?add to {argument} what the ranks before have "
        "counted|compute {argument} from the whole model and batch, not from the rank's own part of them}"
    )


class SkippedModule(Cause):
    """No rank calls a module that the unsharded model calls.

    A number of layers is divided by the stages and rounded down, two stages' ranges leave a gap, or a loop ends too
    early. What comes next is given the skipped module's input. Residual layers keep the shape, so nothing raises.

    Attributes:
        reader: The module that is given its input; empty if none is.
    """

    module: str
    reader: str = ""
    why = "No rank calls {module:called}{reader:?, so {reader:called} is given the input of {module:called}}"
    how = (
        "call {module:called} on one rank, and the next module on its output; if stages share the layers, give "
        "{module:called} to a stage: torch.arange(layers).tensor_split(stages) leaves none out"
    )


class LayerOnTwoStages(Cause):
    """Two stages of a pipeline both run a layer.

    The ranges of layers that the stages keep overlap by one: an end that is meant to be left out is kept. The layer's
    weights are right on both stages, and shapes agree. The later stage runs it once more, on its own output.

    Attributes:
        module: The layer.
        first: A rank that runs it on the right input.
        second: A rank of another stage, which runs it again.
    """

    module: str
    first: int
    second: int
    why = "Two stages run {module:called}: rank {first} on the right input, and rank {second} once more behind it"
    how = (
        "keep {module:called} on one stage: where layers are dealt out, end each range before the first layer of the "
        "next stage"
    )


class UnexplainedBetweenModules(Cause):
    """A gradient goes wrong on its way between two modules, and no rule explains how.

    Both modules' own backward is right. What the model does between them has a backward that does not fit: a
    collective, or the transfer between two stages.

    Attributes:
        module: The module that gets the wrong gradient.
        after: What reads its output and sends back a right gradient.
        readers: The modules that do, if it is several.
    """

    module: str
    after: str
    readers: tuple[str, ...] = ()
    why = (
        (
            "In backward, the gradient goes wrong between {module:called} and {after:called}{readers:? "
            "({readers:3})}, in a collective without a backward or with a wrong one"
        ),
        "A transfer between stages scales or cuts the gradient",
        (
            "A term of the loss also uses the output of {module:called}, and is scaled differently than in the "
            "unsharded model"
        ),
    )
    how = (
        (
            "look at the code that takes the output of {module:called} to {after:called}, and at the backward of its "
            "collectives and transfers"
        ),
        (
            "scale the term of the loss that uses the output of {module:called} like the other terms: divide by the "
            "number of ranks either all or none"
        ),
    )


class UnexplainedModuleBackward(Cause):
    """A module gets the right gradient and sends back a wrong one, and no rule explains how.

    Its forward is right. The usual reasons are a collective whose backward does something else than the forward needs,
    and a sum in backward that is missing.

    Attributes:
        collectives: `none` if none of those that were recorded runs in the module.
    """

    module: str
    collectives: str = ""
    why = (
        "{module:called} gets the right gradient and sends back a wrong one{collectives:none?, and no recorded "
        "collective runs in it: something it saved for backward was changed, an autograd.Function in it has a wrong "
        "backward, or code outside of it reads its inner tensors, too|: a collective lacks a backward or has one "
        "that doesn't match its forward; or nothing sums a gradient of which each rank has its own part; or a factor "
        "comes from a rank's own rows}"
    )
    how = (
        "{collectives:none?look in {module:called} for tensors that are written to after they were read, for "
        "autograd.Functions, and for tensors that are kept for other modules|look in {module:called} "
        "at the collectives (those of torch.distributed have no backward; those of torch.distributed.nn.functional sum "
        "over all ranks in backward), at what ranks read for their own part, and at what they compute of their own "
        "rows}"
    )


class OverwrittenInput(Cause):
    """The input of a module is overwritten between its forward and its backward.

    Autograd keeps the tensor, not a copy. A receive into the same buffer, a write through `.data` or a write from
    another stream gives it no new version, so that backward raises nothing and computes with the new values. A
    hand-written pipeline that receives every micro-batch into one buffer is the usual reason: only the last one is
    right.

    Attributes:
        module: The module that reads the tensor.
    """

    module: str
    why = (
        "The input of {module:called} is overwritten after its forward, so backward computes with the new values. "
        "Autograd raises nothing, because a receive or a write through .data gives the tensor no new version"
    )
    how = (
        "give each micro-batch a tensor of its own: receive into a new one, or pass {module:called} a clone() of the "
        "buffer"
    )


class ScaledByMicroBatches(Cause, kind="wrong-scale"):
    """Stages scale what they send each other by the number of micro-batches, like the loss.

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
    why = (
        "The code {is_divided:?divides|multiplies} {direction:forward?activations|gradients} at {module:called} by "
        "{parts}, the number of micro-batches. Only the loss should be divided"
    )
    how = "divide only the loss by {parts}, and not what stages send to each other"


class ScaledBetweenModules(Cause, kind="wrong-scale"):
    """An output is multiplied by a number on its way to the next module.

    Both modules are right. The code between them, for instance the transfer from one stage to the next, scales what it
    passes on.

    Attributes:
        after: The module that returns the right output.
        module: The module that receives a wrong one.
    """

    after: str
    module: str
    why = (
        "The code between {after:called} and {module:called}, such as a transfer between stages, multiplies the output "
        "of {after:called} by a number"
    )
    how = "look for code between {after:called} and {module:called} that sends, receives or divides"


class RepeatedForwardSum(Cause, kind="wrong-scale"):
    """A module sums over ranks a value that is already the whole.

    Its weights were never split, or another layer has summed before. The output is too large by the size of the axis.

    Attributes:
        module: The module; empty if it is not known.
        axes: The axes whose size is the factor; empty if no axis has that size.
        vector: A vector, usually a bias, that is added afterwards and is right.
    """

    module: str
    axes: str
    vector: str = ""
    why = (
        (
            "{vector:?The code sums over {axes} a tensor that is already the whole, and then adds {vector}|The code of "
            "{module:called} sums{axes:? over {axes}} a value that is already the whole}"
        ),
        (
            "{vector:?|The code of {module:called} multiplies by a number that changes with sharding, such as a local "
            "size}"
        ),
    )
    how = (
        "sum{axes:? over {axes}} once, and only terms that differ between ranks{vector:?; then add {vector}}",
        "{vector:?|multiply by the whole model's number in {module:called}}",
    )


class AveragedForward(Cause, kind="wrong-scale"):
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
    why = (
        (
            "{vector:?The code averages the ranks' terms over {axes} instead of summing them, and then adds "
            "{vector}|The code of {module:called} averages{axes:? over {axes}} the terms of a sum}"
        ),
        "{vector:?|The code of {module:called} divides by a number that changes with sharding, such as a local size}",
    )
    how = (
        "sum{axes:? over {axes}} with ReduceOp.SUM, and don't divide{vector:?; then add {vector}}",
        "{vector:?|divide by the whole model's number in {module:called}}",
    )


class UnlikeLayers(Cause, kind="misordered-within-shard"):
    """One layer's weight is in a different order than the same weight of the other layers.

    A permuted weight is right if the tensors that it meets are permuted too. If a single layer differs, its shapes
    still fit and its result is wrong.

    Attributes:
        dim: The dim whose parts are in a different order.
    """

    tensor: str
    dim: int
    why = (
        "The parts of dim {dim} of {tensor} are in a different order than those of the tensor that it is multiplied "
        "with"
    )
    how = (
        "cut {tensor} like the same weight of the other layers, or put the tensor that it is multiplied with in the "
        "same order"
    )


class StatisticsOfPart(Cause):
    """Ranks normalize by the mean or variance of their own part.

    A norm over rows or channels that an axis splits sees local values only. Each rank's result looks normalized, with
    a factor and an offset of its own. The batch norms of torch do this on ranks that have different rows.

    Attributes:
        batch_norm: The class of the module if it is one of torch's batch norms; else empty.
    """

    axes: str
    batch_norm: str = ""
    why = (
        "{batch_norm:?{batch_norm} takes mean and variance of each rank's own rows, and {axes} splits the rows|Each "
        "rank normalizes by the mean or variance of its own part, split over {axes}}"
    )
    how = (
        "{batch_norm:?call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before you wrap the model (Lightning: "
        "Trainer(sync_batchnorm=True)); it needs GPUs|sum counts, values and squares over {axes} before the division, "
        "with a backward that sums too, or gather the features first; for BatchNorm, use SyncBatchNorm}"
    )
