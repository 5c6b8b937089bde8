"""Causes of an exception that only the sharded model raises."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class ShardedModelRaises(Cause, kind="raised"):
    """The sharded model raises in a step that the unsharded model runs.

    This is the one kind of error that does not need shardviz to be seen. It is reported because it keeps everything
    after it from being checked.
    """

    why = "Code that only the sharded step runs, or torch with this sharding, raises. So would training on this mesh"
    how = "read the exception and its line"


class MixedDtensor(ShardedModelRaises):
    """The sharded model raises because an operation gets a plain tensor together with a DTensor.

    Parameters became DTensors, while buffers, masks or positions that the model makes itself stayed plain. torch does
    not guess the placements of a plain tensor.
    """

    how = (
        "make the plain tensor a DTensor (distribute_tensor; Replicate() if all ranks have it), or compute on the "
        "local tensors of both"
    )


class BackwardOfLossParallel(ShardedModelRaises):
    """The backward of a loss raises because it runs outside of `loss_parallel()`.

    `loss_parallel()` computes the loss of logits that are split over the vocabulary, and replaces its backward while it
    is entered. After that torch's own gets the DTensors, with an index or a weight that is plain.
    """

    why = "The backward of the loss runs outside of loss_parallel(), where torch's own backward gets its DTensors"
    how = "call loss.backward() inside of loss_parallel() too; in a probe, write a step(model, batch, mesh) that does"


class UnsupportedSharding(ShardedModelRaises):
    """The sharded model raises because an operation has no rule for its inputs' placements.

    DTensor knows for each operation how its inputs may be split. An operation without such a rule cannot run on split
    inputs.
    """

    how = "redistribute the inputs to Replicate() before this operation, or compute on local tensors with local_map"


class CollectiveOfDtensor(ShardedModelRaises):
    """The sharded model raises because a collective of torch.distributed gets a DTensor.

    These collectives take a rank's plain tensor. Parameters that FSDP2 or a plan of tensor parallelism made DTensors
    have gradients that are DTensors, too.
    """

    why = "torch.distributed's collectives take plain tensors, and this is a DTensor, as are gradients under FSDP2"
    how = (
        "give it the rank's own part, tensor.to_local(), which it changes in place, or let tensor.redistribute(...) "
        "reduce a Partial placement"
    )


class UnevenShapes(ShardedModelRaises):
    """The sharded model raises because shapes do not fit once tensors are split.

    A size that the axis does not divide, or a view with the whole tensor's sizes, fails on local shards.
    """

    how = (
        "read the exception and its line: a view with the whole's number of heads needs the rank's own number, or -1; "
        "a size that an axis doesn't divide needs another axis"
    )


class UnequalParts(ShardedModelRaises):
    """The sharded model raises because an axis does not divide a dim, and its parts are unequal.

    torch gives the first ranks one element more, or the last ranks fewer. Code that computes the size of a part as the
    whole's divided by the number of ranks, or gathers parts of one size, is wrong on such a mesh.
    """

    size: int
    axis: str
    parts: str
    why = "{axis} doesn't divide a dim of {size}: its parts are {parts}, and code takes them for equal"
    how = "take a mesh whose {axis} divides {size}, or pad the dim; or read each part's own length from its tensor"


class CutHeads(ShardedModelRaises):
    """The sharded model raises because a rank has no whole number of heads.

    A view of attention's features as heads needs whole heads. With grouped queries there are fewer heads of k and v
    than of q, and tensor parallelism over more ranks than these cuts heads apart.

    Attributes:
        held: How many features the rank has.
        size: How many a head has.
    """

    held: int
    size: int
    why = "The rank has {held} features, and a head has {size}: the split cuts heads apart"
    how = (
        "split over a number of ranks that divides the number of heads, also that of k and v; or give ranks that share "
        "a head of k and v a copy of it"
    )


class ViewOfWhole(ShardedModelRaises):
    """The sharded model raises because code views a rank's part with the whole tensor's sizes.

    `x.view(b, t, heads, -1)` with the number of heads of the whole model: under tensor parallelism a rank has some.

    Attributes:
        held: How many elements the rank has.
        whole: How many elements the view's sizes make.
        ratio: How many times as many these are.
        axes: The axes of that size: `dp or tp`.
    """

    held: int
    whole: int
    ratio: int
    axes: str
    why = "The view has the whole tensor's sizes, {whole} elements; a rank has 1/{ratio} of them, {held}, over {axes}"
    how = "write -1 for the size that is split, such as the number of heads, or divide it by the size of {axes}"


class UnlikeSizes(ShardedModelRaises):
    """The sharded model raises because it combines two tensors of which an axis splits only one.

    One is the rank's own part and the other the whole, or one is split along a dim and the other along a different
    one. If the axis splits the whole once for the first and twice for the second, sizes have the same ratio.

    Attributes:
        less: The smaller size that the exception speaks of.
        more: The larger one.
        axes: The axes of that size: `dp or tp`.
    """

    less: int
    more: int
    ratio: int
    axes: str
    why = (
        "One tensor has {less} where another has {more}, {ratio} times as many, and {axes} has {ratio} ranks: most "
        "likely {axes} splits that dim of one and not of the other, or once more"
    )
    how = (
        "print both shapes before the line that raises: take the rank's part of the larger there, or gather the "
        "smaller over {axes} along that dim"
    )


class UnlikeSplits(ShardedModelRaises):
    """The sharded model raises because a module's input is not split as its weight needs it.

    In a tensor-parallel plan, what a ColwiseParallel module returns is split over its last dim, and only a
    RowwiseParallel module takes that. A wrong style, or a missing entry of the plan, shows in the next matrix product.
    """

    why = "The module's input and its weight are not split alike, so their shapes don't fit each other"
    how = (
        "correct the plan: RowwiseParallel for the module if its input is split over the last dim, ColwiseParallel if "
        "its input is whole"
    )
