"""Causes of elements out of order: a dim, shard, slice or sequence was reordered."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from shardviz.explain.cause import Cause
from shardviz.text import as_clause

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


def usual_first(*first: Kind) -> tuple[Kind, ...]:
    """Return the kinds of a disorder with the usual ones first."""
    return (*first, *(kind for kind in OF_PLACES if kind not in first))


class Disorder(Cause, listed=False):
    """Why the elements of a tensor are not where they are claimed to be.

    Attributes:
        or_if: What the ranks may hold as well, in words, and the cause that this would have.
    """

    or_if: tuple[str, Disorder] | None = field(default=None, kw_only=True)
    kinds = OF_PLACES

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """The cause with its fix, and the likeliest of the other explanation with its own."""
        if self.or_if is None:
            return super().ways
        held, other = self.or_if
        cause, fix = other.likeliest
        return (*super().ways, (f"If instead {held}: {as_clause(cause)}", fix))


class ReversedDim(Disorder):
    """The indices of a dim run backwards.

    A flip, a sort in descending order or a negative step reached the whole tensor before it was split. Every shard has
    the right shape and the right number of elements, so nothing raises.
    """

    dim: int
    why = "A flip, or a sort in descending order, reversed the dim before it was split"
    how = "remove it, or restore the order with full_tensor().flip({dim})"


class RotatedDim(Disorder):
    """The indices of a dim are rolled: those that leave at one end come in at the other.

    torch.roll, or a concatenation of two stretches in the wrong order, does this to the whole tensor before it is
    split. Shapes stay as they are, so nothing raises.
    """

    undo: int
    dim: int
    why = "torch.roll, or a concatenation in the wrong order, rolled the dim before it was split"
    how = "remove it, or restore the order with full_tensor().roll({undo}, {dim})"


class Interleaved(Disorder):
    """The rows of segments, or of shards, alternate instead of following each other.

    Some checkpoints store gate and up (or q, k and v) one after the other, others interleave their rows. A loader that
    expects the other convention reorders rows of equal length: every shape fits, and the model computes something else.
    """

    undo: str
    why = "The loader interleaves the rows of segments (gate/up or q/k/v), heads or shards"
    how = "restore the order on load: {undo}"
    references = SWIGLU


class Rotary(Disorder):
    """The rows of each head are in the wrong rotary order for this model.

    One convention rotates the two halves of a head, the other rotates neighboring pairs. Converters permute the
    rows of q and k between the two. A permutation that is missing, or that ran twice, changes no shape.
    """

    undo: str
    why = "The loader orders q and k for the wrong rotary convention (halves or interleaved pairs)"
    how = "restore the order on load: {undo}"
    references = ("torchtitan#1483",)


class Blocks(Disorder):
    """A few segments of a dim are in a different order than the model reads.

    Gate and up, or q, k and v, or experts were concatenated in the order of a different model. Segments of equal size
    can change places without any change of shape, so nothing raises.
    """

    why = "The loader joins the segments (gate/up, q/k/v or experts) in a different order than the model reads"
    how = "concatenate the segments in the model's order"


class AsText(Disorder):
    """Numbered parts are in the order of their numbers as text: 0, 1, 10, 11, 2.

    The order is right for fewer than ten parts, so a small test passes. With more, each part is complete and has the
    right shape, and only its place is wrong.
    """

    why = "The loader sorts names that end in numbers as text (sorted(names), glob or os.listdir), so 10 comes before 2"
    how = "sort by the number: sorted(names, key=lambda name: int(re.findall(r'\\d+', name)[-1]))"


class Grouped(Disorder):
    """Every group of indices of one size has the same wrong order inside.

    A permutation of the rows of one head or one expert was applied to all of them, or every rank reordered its shard in
    the same way. The groups keep their places and their shapes.
    """

    undo: str
    why = (
        "One index reordered the rows of every head, expert or block before the split",
        "Every rank reordered its own shard by the same index after the split",
    )
    how = "restore the order on load: {undo}"


class WithinShards(Disorder):
    """Shards are out of order inside: all by the same rule, or each in its own order.

    A flip, a sort or an index ran on local shards. Every rank still has its own elements, so shapes, counts and
    checksums over a shard are right.

    Attributes:
        is_alike: Whether all shards that are out of order follow one rule.
    """

    is_alike: bool
    kinds = usual_first("misordered-within-shard")
    why = (
        (
            "{is_alike:?An index, a flip or a sort reordered these local shards alike after the split|Each rank "
            "reordered its shard by a different index, which the rank drew, sorted or computed}"
        ),
        "{is_alike:?An index reordered these stretches of the dim before the split}",
    )
    how = (
        "remove the index, flip or sort that runs on the local shard",
        "remove the index that reorders the dim",
    )


class OneShard(Disorder):
    """One shard is out of order inside, and all others are in order.

    Only one rank, or the ranks of one shard, ran the code or read the file that reorders. The shard has the right shape
    and the right elements, so nothing raises.
    """

    kinds = usual_first("misordered-within-shard")
    why = (
        "Only these ranks run code that reorders the shard, or read a file in a different order",
        "A sort runs on every rank, and the other shards were already in order",
    )
    how = "remove the index, flip or sort of the local shard, or write the shard's file again"


class PermutedDim(Disorder):
    """The indices of a dim are in an order that no simple rule gives.

    An index or a gather reordered the whole dim before it was split. Each element is held once and all shapes are
    right, so nothing raises.
    """

    why = "An index or a gather reordered the dim before it was split. The order follows no simple rule"
    how = "remove the index or gather that reorders this dim where the weight is loaded"


class Transposed(Disorder):
    """The whole weight was transposed and then split.

    Frameworks store weights as [in, out] or as [out, in]. If both sizes are equal, or the weight was reshaped, a
    transposed weight has the expected shape and loads without an error.
    """

    first: int
    second: int
    kinds = usual_first("misordered", "foreign")
    why = "The weight was transposed before it was split: Conv1D stores [in, out], Linear stores [out, in]"
    how = "transpose it where it is loaded: weight.transpose({first}, {second})"


class TransposedShards(Disorder):
    """Every shard is the transpose of the right one.

    Each rank transposed its local tensor after the weight was split. Square shards keep their shape, and from_local
    doesn't check the shape of others.
    """

    kinds = usual_first("misordered-within-shard", "foreign")
    why = "Each rank transposed its local shard after the split"
    how = "remove the transpose, or transpose the local tensor back before DTensor.from_local"


class WithoutStrides(Disorder):
    """Elements lie in the order of a transposed tensor's memory, under the right shape.

    Code that copies raw memory (data_ptr, numpy buffers, a file) ignores strides. A transposed tensor then arrives with
    its shape and its elements, in a different order.
    """

    kinds = usual_first("misordered-within-shard", "foreign")
    why = "Code read or wrote the memory of a transposed tensor (data_ptr, numpy or a file) and ignored its strides"
    how = "call .contiguous() before the memory is read, or copy with Tensor.copy_, which follows strides"


class Padded(Disorder):
    """Zeros come first along a dim, and every element after them stands too far back.

    The padding that makes a dim divisible was put in front instead of at the end. The padded shape is the expected one,
    and elements that no longer fit are cut off.
    """

    kinds = usual_first("foreign")
    why = "The code puts the padding before the content, so every index moves up"
    how = "pad at the end of the dim, and cut the padding off before the tensor is labeled"


class Slices(Disorder):
    """Some slices of a stack are reordered inside, and the other slices are in order.

    The experts, heads or layers of a stack came from files of two conventions, or some of them went through code that
    the others do not reach. All slices have one shape, so they fit together.
    """

    undo: str
    kinds = usual_first("misordered", "foreign")
    why = (
        "These slices (experts, heads or layers) come from a file with a different convention than the rest",
        "Code that only these slices go through reordered them",
    )
    how = "load these slices as the others are loaded, or correct them alone: {undo}"


class OddCopies(Disorder):
    """Copies at some positions of an axis hold different elements than the copies elsewhere.

    The tensor is replicated along the axis, so the position on it should change nothing. A loader or a permutation that
    depends on the position changes the elements, and no collective compares copies.
    """

    axis: str
    right: int
    why = (
        "The code that loads or changes this tensor depends on the coordinate along {axis}, which doesn't split the "
        "tensor"
    )
    how = (
        "choose the shard only by the axes that split the tensor, or torch.distributed.broadcast it from {axis}={right}"
    )


class SequenceOrderDiffers(Disorder, kind="sequence-order"):
    """Two tensors of one sequence are split in different orders: tokens meet wrong labels.

    Context parallel reorders its buffers to balance causal attention. A tensor that was left out, or was cut by hand,
    has the same shape and different positions.
    """

    tensor: str
    other: str
    why = "Context parallel reorders its buffers (head and tail), and only one of {tensor} and {other} went through it"
    how = (
        "pass {tensor} and {other} to one context_parallel(mesh, buffers=[...], buffer_seq_dims=[...]), or index both "
        "by the same positions"
    )


class SequenceRestart(Disorder, kind="sequence-order"):
    """Every rank has the first positions of a sequence for its own part of the sequence.

    Position ids or rotary tables are computed from the local length. They have the right size on every rank, and only
    the first rank's are right.
    """

    tensor: str
    other: str
    why = (
        "Every rank counts its own part of the sequence from 0, for example with arange(local_length) or freqs[:length]"
    )
    how = "compute {tensor} from the global positions that {other} has on this rank, or pass both to context_parallel"


class SequenceShift(Disorder, kind="sequence-order"):
    """A tensor of a sequence is shifted against the others, by one number on every rank.

    Labels are the next tokens, so shardviz compares them at their declared offset. A shift by one more or one less
    keeps every shape, and the loss still falls.
    """

    tensor: str
    shift: int
    why = (
        "The code shifts {tensor} more or less often than the probe's sequence() says, for example both in the data "
        "loader and in the model"
    )
    how = (
        "shift {tensor} by {back:+d} positions where it is made; if the shift is meant, add {shift:+d} to its offset "
        "in sequence()"
    )

    @property
    def back(self) -> int:
        """The shift that takes it back."""
        return -self.shift


class OrderNotApplied(Disorder):
    """A tensor that is meant to be reordered is still in the unsharded model's order.

    The expected layout names an order of a dim, and the code that makes this order never ran for this tensor. The
    tensor has the right shape either way.
    """

    dim: int
    why = "Dim {dim} is still in the unsharded model's order: no code put it into the expected order"
    how = "reorder dim {dim} where the other tensors are reordered, or leave the order out of the expected layout"


class UnreadOrder(Disorder):
    """Ranks hold elements that they do not claim, and too few files were read to say why.

    Files of some ranks are missing from the dump. An order, or the rule by which ranks exchange shards, usually shows
    only if all files are there.
    """

    why = "No rule fits the files that were read: most orders show only with the files of all ranks"
    how = "check again with the files of all ranks, or find the code that wrote the elements named above"


class Scrambled(Disorder):
    """Ranks hold elements that they do not claim, by no rule that shardviz knows.

    Several bugs together, or an order that was drawn at random, leave no pattern. The number of elements and the shapes
    can still be right, so nothing raises.
    """

    why = "No known rule fits the ranks' shards or the elements in them"
    how = "find the code that wrote the elements named above"
