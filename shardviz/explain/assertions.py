"""What a test asserts and does not hold: layouts, copies, ties, and values that differ from a reference's."""

from __future__ import annotations

from shardviz.explain.cause import Cause

# Layouts


class CopiesNotClaimed(Cause):
    """A tensor is split over an axis, or pending there, and the test expects equal copies.

    A split tensor has nothing along this axis that could be compared.

    Attributes:
        axis: The axis.
    """

    axis: str
    kinds = ("wrong-placement",)
    how = "replicate it along {axis}, or assert another axis"


class UnexpectedDtype(Cause):
    """A tensor has the layout that the test expects, and another dtype.

    A mixed-precision policy, or a cast before or after the wrapper, decides in which dtype parameters are kept.

    Attributes:
        dtype: The dtype that is expected.
        held: The tensor's own dtype and layout.
    """

    dtype: str
    held: str
    kinds = ("wrong-placement",)
    how = "make it {dtype}, or expect {held}"


class UnexpectedShape(Cause):
    """The layout that the test expects does not fit the shape of the tensor.

    The model has other sizes than the test was written for, or the pattern of the rule also matches this tensor.

    Attributes:
        held: The tensor's own layout.
        expected: The layout that is expected.
        shape: The tensor's shape.
    """

    held: str
    expected: str
    shape: tuple[int, ...]
    kinds = ("wrong-placement",)
    how = "expect {held}: {expected} does not fit the shape {shape:list}"


class UnexpectedPlainTensor(Cause):
    """A tensor is plain, and the test expects it to be sharded.

    The wrapper left it out, or it is looked at while FSDP has it gathered.

    Attributes:
        held: The tensor's own shape.
        is_param: Whether it is a parameter, which FSDP gathers.
    """

    held: str
    is_param: bool
    kinds = ("wrong-placement",)
    how = (
        "shard it{is_param:? (FSDP2 gathers a root's weights for forward and keeps them until backward, or its "
        "reshard())}, or expect {held}"
    )


class UnexpectedPlacement(Cause):
    """A tensor has other placements than the test expects.

    Axes in another order, another dim or a missing axis still make a valid layout, so sharding raises nothing.

    Attributes:
        placements: What makes the placements that are expected.
        held: The tensor's own layout.
    """

    placements: str
    held: str
    kinds = ("wrong-placement",)
    how = "place it by {placements}, or expect {held}"


# Copies and ties


# Shapes beside a reference's


class WrongLocalShape(Cause):
    """A local tensor does not have the shape that its placements give the rank.

    DTensor.from_local takes any local tensor, and by default infers the whole shape from it.
    """

    kinds = ("wrong-shape",)
    why = "The sharded side is wrong: a local tensor does not have the shape that its placements give this rank"
    how = "give DTensor.from_local the shape and stride of the whole, and local tensors cut as torch.chunk cuts them"


class UnrelatedShapes(Cause):
    """A tensor and its reference have shapes of which neither is a part of the other.

    They are found under one name, and may be different tensors.
    """

    kinds = ("wrong-shape",)
    why = "Neither is a part of the other: they are not the same tensor, or one was reshaped or transposed"
    how = "compare tensors that mean the same, in the same order of dims"


class PartWithoutPlacements(Cause):
    """A tensor is smaller than its reference in one dim, like one rank's part of it.

    A local tensor without placements counts as the whole.

    Attributes:
        dim: The dim.
        size: The tensor's size there.
        wanted: The reference's.
        is_plain: Whether the tensor has no placements.
    """

    dim: int
    size: int
    wanted: int
    is_plain: bool
    kinds = ("wrong-shape",)
    why = (
        "The sharded side{is_plain:?|'s whole} is smaller: dim {dim} has {size} of the reference's {wanted}, as one "
        "rank's part has"
    )
    how = "attach placements to the local tensor with DTensor.from_local, so that its part is known"


class PartAsReference(Cause):
    """A reference is smaller than the tensor in one dim.

    A reference of one rank's rows, or of a part of the batch, compares equal to nothing that is whole. On the sharded
    side, copies that are concatenated instead of added make a tensor too long.

    Attributes:
        dim: The dim.
        size: The tensor's size there.
        wanted: The reference's.
    """

    dim: int
    size: int
    wanted: int
    kinds = ("wrong-shape",)
    why = (
        "The reference is smaller: dim {dim} has {wanted} of the sharded side's {size}. Either the reference is one "
        "rank's part or of a part of the batch, or copies were put one after the other on the sharded side"
    )
    how = (
        "give the whole as reference; where it is, label equal copies Replicate() or add them instead of concatenating"
    )


# Values that no rule explains


class FewElementsDiffer(Cause):
    """A few elements of a computed tensor are not the reference's, and the others are.

    The seed, the weights and most of the batch are right, so one sample, position or row differs.
    """

    kinds = ("wrong-value",)
    why = (
        "Most elements are the reference's on these ranks, too: it is only what the others are computed from that "
        "differs"
    )
    how = "look at what they have in common: a sample, a position or a mask; a row of a weight or an index"


class FewElementsZero(Cause):
    """A few elements of a weight are zero, and the others are the reference's.

    The tensor was allocated with zeros and only a part of it was written.
    """

    kinds = ("wrong-value",)
    why = "Most elements are the reference's on these ranks, too, and the others are zero: nothing was written there"
    how = "write the whole tensor, on every rank"


class FewElementsChanged(Cause):
    """A few elements of a weight are not the reference's, and the others are.

    Something wrote to a part of the tensor: to a slice, to padding, to some rows of an embedding.
    """

    kinds = ("wrong-value",)
    why = "Most elements are the reference's on these ranks, too: the others were written or changed by themselves"
    how = "look at what writes a part of it: a slice or index that is assigned, padding, a step of an embedding's rows"


class UnexplainedDifference(Cause):
    """Most elements of a gradient or output differ from the reference's, and no rule says why.

    Other weights, another batch or another program all look like this. Comparing weights first, and then modules one by
    one, tells which.

    Attributes:
        of_all: Whether all ranks differ.
    """

    of_all: bool
    kinds = ("wrong-value",)
    why = (
        "On {of_all:?all|these} ranks it was computed from other weights, from another batch, or in another way than "
        "the reference"
    )
    how = (
        'assert_same(model, reference, of=("param", "buffer")) before the step, and give both the same batch; if that '
        "passes, compare the outputs of modules, first to last: the first that differs is at fault"
    )


class OnlyZeros(Cause):
    """Ranks hold only zeros where the reference has values.

    The weight was allocated (to_empty, zeros_like) and not written. A write into `.data` of a temporary or into
    full_tensor() changes a copy.

    Attributes:
        of_all: Whether all ranks do.
    """

    of_all: bool
    kinds = ("wrong-value",)
    why = "{of_all:?All|These} ranks hold only zeros: nothing was written there"
    how = (
        "read every rank's file, and write with param.to_local().copy_() under torch.no_grad(): .data of a temporary "
        "and full_tensor() are copies"
    )


class SomeRanksDiffer(Cause):
    """Some ranks' weights differ from the reference's, and the other ranks' do not.

    These ranks alone drew, loaded or changed them: with another seed, from another file, or without the broadcast.
    """

    kinds = ("wrong-value",)
    why = "The other ranks have the reference's values: these ranks drew, loaded or changed theirs by themselves"
    how = "look at what fills it on these ranks alone: their seed, their file, a broadcast that leaves them out"


class AllRanksDiffer(Cause):
    """No rank's weights are the reference's.

    The two sides do not start from the same weights, or one of them has taken a step.
    """

    kinds = ("wrong-value",)
    why = (
        "No rank has the reference's values: they were drawn from another seed, loaded from another file, or one side "
        "was stepped since"
    )
    how = "load both from one state dict, and compare them before either is trained"
