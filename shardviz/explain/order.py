"""Causes of elements that are out of order: a dim, a shard, a slice or a sequence was reordered."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from shardviz.explain.cause import Cause
from shardviz.text import continued

if TYPE_CHECKING:
    from shardviz.explain.finding import Kind

SWIGLU = ("Megatron-LM#2769", "ROCm/Megatron-LM#63")

OF_PLACES: tuple[Kind, ...] = (
    "misordered",
    "misordered-within-shard",
    "wrong-placement",
    "wrong-shape",
    "missing",
    "duplicated",
)
"""The kinds that any disorder can have: which one depends on the claim and on how often each element is held."""


def usually(*first: Kind) -> tuple[Kind, ...]:
    """Return the kinds of a disorder with the usual ones first."""
    return (*first, *(kind for kind in OF_PLACES if kind not in first))


class Disorder(Cause, abstract=True):
    """Why the elements of a tensor are not where they are claimed to be.

    Attributes:
        or_if: What the ranks may hold as well, in words, and the cause that this would have.
    """

    or_if: tuple[str, Disorder] | None = field(default=None, kw_only=True)
    kinds = OF_PLACES

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """The cause with its fix, and what both are if the other explanation is right."""
        if self.or_if is None:
            return super().ways
        held, other = self.or_if
        return (*super().ways, *((f"If they hold {held}: {continued(cause)}", fix) for cause, fix in other.ways))


class ReversedDim(Disorder):
    """The indices of a dim run backwards.

    A flip, a sort in falling order or a negative step reached the whole tensor before it was split. Every shard has
    the right shape and the right number of elements, so nothing raises.
    """

    dim: int
    why = "The dim was reversed before it was split"
    how = "undo it: full_tensor().flip({dim}) is the tensor in order"


class RotatedDim(Disorder):
    """The indices of a dim are rolled: those that leave at one end come in at the other.

    torch.roll, or two stretches that were concatenated in the wrong order, does this to the whole tensor before it is
    split. Shapes stay as they are, so nothing raises.
    """

    undo: int
    dim: int
    why = "The dim was rolled before it was split"
    how = "undo it: full_tensor().roll({undo}, {dim}) is the tensor in order"


class Interleaved(Disorder):
    """The rows of segments, or of shards, alternate instead of following each other.

    Checkpoints keep gate and up, or q, k and v, either one after the other or in turns. A loader that reads the other
    convention reorders rows of equal length: every shape fits, and the model computes something else.
    """

    undo: str
    why = "The segments of a fused weight (gate/up, q/k/v) or of shards were interleaved on load"
    how = "undo it where the weight is loaded: {undo}"
    references = SWIGLU


class Rotary(Disorder):
    """The rows of each head are in the rotary order that the model does not read.

    One convention rotates the two halves of a head, the other one neighboring pairs. Converters permute the rows of q
    and k between the two; a permutation that is missing, or was made twice, changes no shape.
    """

    undo: str
    why = (
        "The weight has the rotary order of the other convention: Hugging Face's halves where the model reads "
        "interleaved pairs, or the other way around: permuted on load"
    )
    how = "undo it where the weight is loaded: {undo}"
    references = ("torchtitan#1483",)


class Blocks(Disorder):
    """A few segments of a dim stand in another order than the model reads.

    Gate and up, or q, k and v, or experts were concatenated in the order of another model. Segments of equal size can
    be exchanged without any change of shape, so nothing raises.
    """

    why = "Segments of the dim (gate and up; q, k, v; experts) were put together in another order than the model reads"
    how = "put the segments together in the order that the model reads"


class AsText(Disorder):
    """Numbered parts are in the order of their numbers as text: 0, 1, 10, 11, 2.

    The order is right for fewer than ten parts, so a small test passes. With more, each part is complete and has the
    right shape, and only its place is wrong.
    """

    why = (
        "Names that end in numbers were sorted as text, where 10 comes before 2: sorted(names), glob and os.listdir "
        "put experts, layers and files of shards in that order"
    )
    how = "sort by the number: sorted(names, key=lambda name: int(re.findall(r'\\d+', name)[-1]))"


class Grouped(Disorder):
    """Every group of so many indices is in one and the same order that is not its own.

    A permutation of the rows of one head or one expert was applied to all of them, or every rank reordered its shard
    in the same way. The groups keep their places and their shapes.
    """

    undo: str
    why = (
        "All groups of this size were reordered by one and the same index: the rows of a head, of an expert or of a "
        "block where it was before the split, or those of every shard where it was after it"
    )
    how = "undo it where the weight is loaded: {undo}"


class WithinShards(Disorder):
    """Shards are out of order inside: all by the same rule, or each in an order of its own.

    A flip, a sort or an index ran on local shards. Every rank still has its own elements, so shapes, counts and
    checksums over a shard are right.

    Attributes:
        is_alike: Whether all that are out of order follow one rule.
    """

    is_alike: bool
    kinds = usually("misordered-within-shard")
    why = (
        "Shards were reordered after the split, {is_alike:?each one that is out of order by the same rule; or these "
        "stretches of the dim were before it|by an index that is not the same on all ranks: one that was drawn, sorted "
        "or computed on each rank by itself}"
    )
    how = "look for the index, flip or sort that runs on the local shard, and leave its elements in order"


class OneShard(Disorder):
    """One shard is out of order inside, and all others are in order.

    Only one rank, or the ranks of one shard, ran the code or read the file that reorders. The shard has the right
    shape and the right elements, so nothing raises.
    """

    kinds = usually("misordered-within-shard")
    why = (
        "One shard was reordered after the split: by what only its ranks run or read, or by a sort that finds others "
        "in order; or this stretch of the dim was before it"
    )
    how = (
        "look for the index, flip or sort that runs on this shard, or the file that it was read from, and leave its "
        "elements in order"
    )


class PermutedDim(Disorder):
    """The indices of a dim are in an order that no simple rule gives.

    An index or a gather reordered the whole dim before it was split. All elements are there once and all shapes are
    right, so nothing raises.
    """

    why = "The dim was reordered before it was split, and no simple rule fits the order"
    how = "look for the index or gather that reorders this dim where the weight is loaded"


class Transposed(Disorder):
    """The whole weight is transposed, and was split after that.

    Frameworks store weights as [in, out] or as [out, in]. If both sizes are equal, or the weight was reshaped, a
    transposed weight has the expected shape and loads without an error.
    """

    first: int
    second: int
    kinds = usually("misordered", "foreign")
    why = "The weight was transposed before it was split: Conv1D and Linear store theirs the other way around"
    how = "transpose it where it is loaded: weight.transpose({first}, {second})"


class TransposedShards(Disorder):
    """Every shard is the transpose of the right one.

    Each rank transposed its local tensor after the weight was split. Square shards keep their shape, and from_local
    does not check others.
    """

    kinds = usually("misordered-within-shard", "foreign")
    why = "Each local shard was transposed after the split"
    how = "give DTensor.from_local the local tensor transposed back"


class WithoutStrides(Disorder):
    """Elements lie in the order of a transposed tensor's memory, under the right shape.

    Code that copies raw memory (data_ptr, numpy buffers, a file) ignores strides. A transposed tensor then comes out
    with its shape and its elements, in another order.
    """

    kinds = usually("misordered-within-shard", "foreign")
    why = "The memory of a transposed tensor was read or written as if it were contiguous, without its strides"
    how = "call .contiguous() on the tensor before its memory is read, or copy it by Tensor.copy_, which heeds strides"


class Padded(Disorder):
    """Zeros come first along a dim, and every element after them stands too far back.

    The padding that makes a dim divisible was put in front instead of at the end. The padded shape is the expected
    one, and what no longer fits is cut off.
    """

    kinds = usually("foreign")
    why = "Padding was put before the content, so that every index moved up"
    how = "pad at the end of the dim, and cut the padding off before the tensor is labeled"


class Slices(Disorder):
    """Some slices of a stack are reordered inside, and the other slices are in order.

    The experts, heads or layers of a stack came from files of two conventions, or some of them went through code that
    the others do not reach. All slices have one shape, so they fit together.
    """

    undo: str
    kinds = usually("misordered", "foreign")
    why = (
        "Some slices of a stack (experts, heads, layers) were loaded in another way than the rest: from a file of "
        "another convention, or through code that only they go through"
    )
    how = "look for code that treats these slices differently where they are loaded; to undo it for them alone: {undo}"


class OddCopies(Disorder):
    """Copies at some positions of an axis hold other elements than the copies elsewhere.

    The tensor is replicated along the axis, so the position on it should change nothing. A loader or a permutation
    that depends on the position does, and no collective compares copies.
    """

    axis: str
    right: int
    why = (
        "Copies of one shard were not made by the same code: what loaded or changed these depends on the coordinate "
        "along an axis that does not split the tensor"
    )
    how = (
        "choose and load each shard by the axes that split the tensor alone, or torch.distributed.broadcast it along "
        "{axis} from {axis}={right}"
    )


class SequenceOrderDiffers(Disorder):
    """Two tensors of one sequence are split in different orders: tokens meet wrong labels.

    Context parallel reorders its buffers to balance causal attention. A tensor that was left out of it, or was cut by
    hand, has the same shape and other positions.
    """

    tensor: str
    other: str
    kinds = ("sequence-order",)
    why = (
        "Context parallel reorders what it is given to balance causal attention (head and tail): one of them went "
        "through it, the other was cut by itself"
    )
    how = (
        "give {tensor} and {other} to one context_parallel(mesh, buffers=[...], buffer_seq_dims=[...]), or index both "
        "by the same positions"
    )


class SequenceRestart(Disorder):
    """Every rank has the first positions of a sequence for its own part of it.

    Position ids or rotary tables are computed from the local length. They have the right size on every rank, and only
    the first rank's are right.
    """

    tensor: str
    other: str
    kinds = ("sequence-order",)
    why = "Every rank counts its own part of the sequence from the start, as by arange(local_length) or freqs[:length]"
    how = "take {tensor} at the global positions that {other} has on this rank, or give both to context_parallel"


class SequenceShift(Disorder):
    """A tensor of a sequence is shifted against the others, by one number on every rank.

    Labels are the next tokens, so they are compared with their declared offset. A shift by one more or one less keeps
    every shape, and the loss still falls.
    """

    tensor: str
    shift: int
    kinds = ("sequence-order",)
    why = (
        "Every rank has the right stretch of it, moved along the sequence: it was shifted more or less often than the "
        "probe's sequence() says, as when labels are shifted both by the data loader and by the model"
    )
    how = (
        "shift {tensor} by {back:+d} positions, where it is made; if it is meant so, add {shift:+d} to its offset in "
        "sequence()"
    )

    @property
    def back(self) -> int:
        """The shift that takes it back."""
        return -self.shift


class OrderNotApplied(Disorder):
    """A tensor that is meant to be reordered is still in the unsharded model's order.

    The layout that is expected for it names an order of a dim, and the code that makes this order never ran for this
    tensor. It has the right shape either way.
    """

    dim: int
    why = "It is in the unsharded model's own order: nothing put dim {dim} into the one that is expected"
    how = "reorder it where the others are, or leave the order out of what is expected of it"


class UnreadOrder(Disorder):
    """Ranks hold elements that they do not claim, and too few files were read to say why.

    Files of some ranks are missing from the dump. An order, or the rule by which ranks exchange shards, usually shows
    only if all of them are there.
    """

    why = "No rule shows in what was read: most orders are seen only with the files of all ranks"
    how = (
        "check again with the files of all ranks, or start from the first differences above: which code wrote these "
        "elements?"
    )


class Scrambled(Disorder):
    """Ranks hold elements that they do not claim, by no rule that shardviz knows.

    Several bugs together, or an order that was drawn at random, leave no pattern. The number of elements and the
    shapes can still be right, so nothing raises.
    """

    why = "Nothing that shardviz knows fits: shards were written by ranks or in an order that follow no simple rule"
    how = "start from the first differences above: which code wrote these elements?"
