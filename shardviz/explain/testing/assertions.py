"""Causes of failed assertions: layouts, copies, ties, and values unlike a reference's."""

from __future__ import annotations

from typing import Literal

from shardviz.explain.cause import Cause

# Layouts


class CopiesNotClaimed(Cause, kind="wrong-placement"):
    """A tensor is split over an axis, or pending there, and the test expects equal copies.

    A split tensor has nothing along this axis that could be compared.
    """

    axis: str
    how = "replicate it along {axis}, or assert a different axis"


class CopiesDrifted(Cause, kind="unreplicated"):
    """Copies of a weight that a test compares are near each other and not equal.

    They began with equal values, and a step since then was each replica's own: nothing reduced its gradients, or the
    average of the weights left this one out. Seeds and files of one's own give values that have nothing in common.
    """

    axis: str
    why = (
        "The copies are near each other: they were equal once, and ranks along {axis} have drifted since, by "
        "gradients that nothing reduces over {axis}",
        "An average of the weights over {axis} did not run, or leaves this one out",
    )
    how = (
        "reduce the gradients over {axis} before each step",
        "average the weights of all ranks along {axis}, with or without a gradient",
    )


class UnexpectedDtype(Cause, kind="wrong-placement"):
    """A tensor has the layout that the test expects, and a different dtype.

    A mixed-precision policy, or a cast before or after the wrapper, decides in which dtype parameters are kept.

    Attributes:
        dtype: The dtype that is expected.
        held: The tensor's own dtype and layout.
    """

    dtype: str
    held: str
    how = "make it {dtype}, or expect {held}"


class UnexpectedShape(Cause, kind="wrong-placement"):
    """The layout that the test expects does not fit the shape of the tensor.

    The model has different sizes than the test expects, or the pattern of the rule also matches this tensor.

    Attributes:
        held: The tensor's own layout.
    """

    held: str
    expected: str
    shape: tuple[int, ...]
    how = "expect {held}: {expected} does not fit the shape {shape:list}"


class UnexpectedPlainTensor(Cause, kind="wrong-placement"):
    """A tensor is plain, and the test expects it to be sharded.

    The wrapper left it out, or the test looks at it while FSDP has it gathered.

    Attributes:
        held: The tensor's own shape.
        is_param: Whether it is a parameter, which FSDP gathers.
    """

    held: str
    is_param: bool
    how = (
        "shard it{is_param:? (FSDP2 gathers a root's weights for forward and keeps them until backward, or its "
        "reshard())}, or expect {held}"
    )


class UnexpectedPlacement(Cause, kind="wrong-placement"):
    """A tensor has different placements than the test expects.

    Axes in a different order, a different dim or a missing axis still make a valid layout, so sharding raises nothing.

    Attributes:
        placements: The code that makes the expected placements.
        held: The tensor's own layout.
        is_cut_again: Whether it has the expected axes in the order in which fully_shard cuts what is sharded already.
    """

    placements: str
    held: str
    is_cut_again: bool = False
    how = (
        "{is_cut_again:?expect {held}: fully_shard cuts the shards of tensor parallel again, so its axis comes last"
        "|place it by {placements}, or expect {held}}"
    )


class OddGradients(Cause, kind="unreduced-gradient"):
    """A few ranks hold a different gradient than all other copies, which agree.

    Most ranks were reduced together, so the reduction is there. Every rank's optimizer steps with its own gradient, and
    the weights stop being copies without an error.

    Attributes:
        odd: These ranks, in words.
    """

    odd: str
    why = (
        "Code after the reduction changes the gradient on {odd} alone: all other copies agree",
        "The reduction leaves out {odd}: its process group, or a branch of the code",
    )
    how = (
        "look for hooks, clipping, unscaling and writes to .grad that only {odd} runs",
        "call the reduction on every rank, over a group of all of them",
    )


# Shapes compared with a reference's


class WrongLocalShape(Cause, kind="wrong-shape"):
    """A local tensor does not have the shape that its placements give the rank.

    DTensor.from_local takes any local tensor, and by default infers the whole shape from it.
    """

    why = "A local tensor on the sharded side doesn't have the shape that its placements give this rank"
    how = "pass the whole's shape and stride to DTensor.from_local, and cut the local tensors with torch.chunk"


class UnrelatedShapes(Cause, kind="wrong-shape"):
    """A tensor and its reference have shapes that don't fit: neither is a part of the other.

    The two have one name, and may be different tensors.
    """

    why = (
        "Neither is a part of the other: the two are different tensors under one name",
        "One of the two was reshaped or transposed",
    )
    how = "compare tensors that mean the same, with their dims in the same order"


class PartComparedWithWhole(Cause, kind="wrong-shape"):
    """A tensor and its reference have different sizes in one dim, as a part and its whole do.

    A local tensor without placements counts as the whole, and is smaller than the reference. A reference of one rank's
    rows, or of a part of the batch, never equals a whole tensor. On the sharded side, copies that are concatenated
    instead of added make a tensor too long.

    Attributes:
        size: The tensor's size there.
        wanted: The reference's.
        is_plain: Whether the tensor has no placements.
    """

    dim: int
    size: int
    wanted: int
    is_plain: bool
    why = (
        "{is_longer:?The reference is smaller: dim {dim} has {wanted} of the sharded side's {size}. It is one rank's "
        "part, or a part of the batch|Dim {dim} of the sharded side{is_plain:?|'s whole} has {size} of the reference's "
        "{wanted}: it is one rank's part}",
        "{is_longer:?The reference is whole, and the sharded side concatenates copies}",
    )
    how = (
        "{is_longer:?pass the whole tensor as the reference|attach placements to the local tensor with "
        "DTensor.from_local}",
        "{is_longer:?label equal copies Replicate(), or add them instead of concatenating}",
    )

    @property
    def is_longer(self) -> bool:
        """Whether the reference is the part."""
        return self.size > self.wanted


# Values that no rule explains


class FewElementsDiffer(Cause):
    """A few elements differ from the reference's, and the others match.

    The seed, the file and most of the batch are right. Of a result, one sample, position or row has other inputs. Of a
    weight, something wrote to a part: to a slice, to padding or to some rows of an embedding; or nothing wrote to one
    part of a tensor that was allocated with zeros.

    Attributes:
        part: What the elements are of: a `result`, a `weight`, or `zeros` in a weight.
    """

    part: Literal["result", "weight", "zeros"]
    why = (
        "{part:result?Only the inputs of these elements differ: most elements match the reference, on these ranks too|"
        "{part:zeros?Nothing wrote these elements: they are zero, and most others match the reference|Some code wrote "
        "or changed only these elements: most others match the reference}}"
    )
    how = (
        "{part:result?look for what they share: a sample, a position, a mask, a row of a weight or an index|{part:zeros"
        "?write the whole tensor on every rank|look for an assignment to a slice or an index, for padding, or for a "
        "step on some rows of an embedding}}"
    )


class UnexplainedDifference(Cause):
    """Most elements of a gradient or output differ from the reference's, and no rule says why.

    Other weights, a different batch or a different program all look like this. Compare the weights first, and then the
    modules one by one.
    """

    of_all: bool
    why = (
        "{of_all:?All|These} ranks computed it from different weights than the reference",
        "{of_all:?All|These} ranks computed it from a different batch, or in a different way",
    )
    how = (
        'assert_same(model, reference, of=("param", "buffer")) before the step',
        (
            "give both the same batch, and compare the outputs of modules, first to last: the first that differs is at "
            "fault"
        ),
    )


class OnlyZeros(Cause):
    """Ranks hold only zeros where the reference has values.

    Code allocated the weight (to_empty, zeros_like) and never wrote it. A write into `.data` of a temporary or into
    full_tensor() changes a copy.
    """

    of_all: bool
    why = (
        "{of_all:?All|These} ranks hold only zeros: nothing wrote to this memory",
        "The load writes into a copy: .data of a temporary, or full_tensor()",
    )
    how = (
        "read every rank's file",
        "write with param.to_local().copy_() under torch.no_grad()",
    )


class SomeRanksDiffer(Cause):
    """Some ranks' weights differ from the reference's, and the other ranks' do not.

    These ranks alone drew or loaded them: with a different seed or file, or without the broadcast. Or all ranks
    changed them, and these ranks wrongly.
    """

    why = (
        "These ranks drew the weight from a different seed, loaded a different file, or were left out of a broadcast",
        "Code that changes the weight on all ranks gives these ranks the wrong part of what it adds or writes",
    )
    how = (
        "look at the seed and the file of these ranks, and for a broadcast that leaves them out",
        "compare the weight before and after each change of it, and the index by which a rank chooses its part",
    )


class ExchangedCoordinate(Cause):
    """A split weight was changed by the part of a different axis's coordinate.

    A merged adapter, a scale or a mask is cut for the ranks, and the wrong coordinate has the same number of values, so
    shapes fit. Ranks whose two coordinates are equal get the right part.

    Attributes:
        instead: The axis whose coordinate is used.
    """

    axis: str
    instead: str
    why = (
        "Code that writes or changes this weight chooses a rank's part by the coordinate along {instead}, not {axis}: "
        "the wrong ranks are exactly those whose two coordinates differ"
    )
    how = "choose the part by mesh.get_local_rank({axis!r})"


class OtherOrderThanReference(Cause, kind="misordered"):
    """A weight has the reference's values, with the elements in another order.

    A conversion reorders one side: heads are grouped, a fused weight is cut, a dim is viewed and transposed. Shapes are
    equal, so both sides load.
    """

    why = "One side went through a conversion that reorders this weight, and the other did not"
    how = "convert both sides, or neither, before they are compared"


class WeightTimesNumber(Cause, kind="wrong-scale"):
    """A weight is the reference's times a number, the same on every rank.

    Whatever changes weights changed this one by a different factor on one of the two sides: a decay, an average with
    earlier weights, a merged adapter, or the same change once more.
    """

    why = "Code that changes this weight multiplies it by a different number on one of the two sides, or once more"
    how = "compare the weight before and after each change of it, on both sides"


class TiedWeightChangedTwice(Cause):
    """Only a tied weight is wrong, and it is listed once for each of its names.

    A module's state_dict() has a tied weight under all of its names, and parameters() has it once. A loop over the
    state_dict that changes weights in place, such as an average of weights, changes a tied weight more than once.

    Attributes:
        times: How many names it has.
        is_scaled: Whether it is the reference's times a number, as no wrong gradient makes it.
    """

    times: int
    is_scaled: bool
    kinds = ("wrong-scale", "wrong-value")
    why = (
        "Code that goes through the names of state_dict() changes this one {times} times: once for each of its names",
        "{is_scaled:?|Its gradient lacks that of one of its uses}",
    )
    how = (
        "change each tensor once: go through parameters(), or skip one that was changed under a different name",
        "{is_scaled:?|keep the tie when the model is sharded, and sum the gradients of all its uses}",
    )


class AllRanksDiffer(Cause):
    """No rank's weights match the reference's.

    The two sides do not start from the same weights, or one of them has taken a step. If other weights that no
    constant fills are equal, what copies weights left these out: a filter by name, identity or address is true of too
    many, or names that do not match are passed over.

    Attributes:
        num_equal: How many other weights are equal on both sides.
    """

    num_equal: int = 0
    why = (
        "{num_equal:?What copies weights from one side to the other leaves these out: {num_equal} others are equal|The "
        "two sides drew from different seeds or loaded different files}",
        "One side has taken a step{num_equal:? that changes these alone|}",
    )
    how = (
        "{num_equal:?look at what decides which weights are copied: a name, an id or an address that several weights "
        "share, or a name that the other side doesn't have|load both from one state dict}",
        "compare them before either takes a step",
    )
