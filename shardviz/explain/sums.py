"""Causes of sums over ranks that are missing, reach the wrong ranks, or have a term too often or not at all."""

from __future__ import annotations

from fractions import Fraction

from shardviz.explain.cause import Cause


class GradientNotReduced(Cause):
    """Each rank keeps its own part of a gradient, because nothing reduces it over an axis.

    The parameter is outside the wrapper that reduces, or the reduction runs over a group of one rank. Every rank's
    optimizer steps with its own gradient, and the weights stop being copies without an error.

    Attributes:
        axes: The axes over which a reduction is missing.
        op: The reduction, as torch calls it; empty if it is not known.
        is_captured: Whether the step was captured, maybe before the reduction.
        other_axis: An axis along which copies may be equal, if the parameter may be split by hand; else empty.
        ratio: What the reduced gradient is of the right one.
        rest: Why it is still wrong after the reduction.
    """

    axes: tuple[str, ...]
    op: str = ""
    is_captured: bool = False
    other_axis: str = ""
    ratio: Fraction = Fraction(1)
    rest: Cause | None = None
    kinds = ("unreduced-gradient",)
    why = (
        "Nothing reduced this gradient{axes:? over {axes}}: the parameter is outside what FSDP, DDP or a "
        "tensor-parallel style manages there, {may_be_off:?the reduction was off in the last backward "
        "(set_requires_gradient_sync(False); of DDP, no_sync() around its forward), }{is_captured:?the capture was "
        "made before the reduction, }or the reduction ran over a group of one{rest:?. Even then it is {ratio:times} "
        "what is due: {rest.cause:continued}}"
    )
    how = (
        "after backward, {axes:?{axes:each and|all_reduce(grad, op=ReduceOp.{op:?{op}|SUM}, "
        "group=mesh.get_group({each!r}))}|all_reduce it}{op:?|, with ReduceOp.AVG for a mean}, of a DTensor on "
        "grad.to_local(); or give the parameter to the wrapper whose mesh has {axes:?{axes}|these ranks}{other_axis:?; "
        "for a parameter split over {axes} by hand, compare axis={other_axis!r} alone}{rest:?; and {rest.fix}}"
    )
    references = ("pytorch#154888", "Megatron-LM#1446")

    @property
    def may_be_off(self) -> bool:
        """Whether a switch of FSDP or DDP may be the cause: theirs are means."""
        return self.op != "SUM"


class NarrowSum(Cause):
    """The terms of a gradient are rounded before ranks sum them, against a policy of the model.

    One unit of FSDP has a MixedPrecisionPolicy without reduce_dtype, which then is its param_dtype, or a hook casts
    what it reduces. Rounding errors add up with every rank, and no single step shows them.

    Attributes:
        dtype: The narrow dtype.
        of_all: Whether all gradients have numbers of that dtype.
    """

    dtype: str
    of_all: bool
    kinds = ("wrong-value",)
    why = (
        "{of_all:?|The unit's own MixedPrecisionPolicy has param_dtype {dtype} and no reduce_dtype, while that of "
        "another unit sums in a wider dtype}",
        "Code casts the gradient to {dtype} before it reduces it",
    )
    how = (
        "{of_all:?|give every fully_shard the same policy, with reduce_dtype}",
        "reduce the gradient in its own dtype, and cast after that",
    )


class UnreducedSharedPart(Cause):
    """Ranks that share a part of a weight keep different gradients of it.

    With fewer key and value heads than ranks, several ranks hold the same heads. They are no axis of the mesh, so no
    wrapper reduces over them.

    Attributes:
        num_parts: How many parts the weight has.
        num_ranks: How many ranks have a gradient of it.
        op: The reduction, as torch calls it.
        groups: The ranks of each part.
    """

    num_parts: int
    num_ranks: int
    op: str
    groups: tuple[tuple[int, ...], ...]
    kinds = ("unreduced-gradient",)
    why = (
        "There are {num_parts} parts on {num_ranks} ranks, as of key and value heads that are fewer than ranks, and "
        "nothing reduced the gradient of a part over the ranks that hold it"
    )
    how = (
        "after backward, all_reduce(grad, op=ReduceOp.{op}, group=group), with group, _ = "
        "torch.distributed.new_subgroups_by_enumeration([{groups:4}])"
    )
    references = ("transformers#47811",)


class OutputNotReduced(Cause):
    """Each rank returns its own term of an output, and nothing adds the terms.

    A row-parallel layer needs a sum over its axis. Without it the output has the right shape on every rank, so what
    follows computes with a part of the value.
    """

    axes: tuple[str, ...]
    op: str
    kinds = ("unreduced-output",)
    why = (
        "Each rank multiplied its own part of the features and nothing added the products over {axes}, as "
        "RowwiseParallel does; or they were labeled as copies"
    )
    how = (
        "use RowwiseParallel; or call {axes:each and|all_reduce(output, op=ReduceOp.{op}, "
        "group=mesh.get_group({each!r}))} in the forward of a torch.autograd.Function whose backward returns the "
        "gradient as it is, before anything else reads the output; label terms that are still to be added by Partial()"
    )


class OutputCopiesDiffer(Cause):
    """Ranks return different values although the output's placements call them copies.

    A label is not checked against the data. Code that trusts it reads one rank's value as everybody's.
    """

    axes: str
    kinds = ("unreduced-output",)
    why = "Its placements say that ranks along {axes} hold the same, and nothing made them agree"
    how = "reduce it over {axes}, or label it as pending (Partial) or split (Shard) there"


class UnreducedBesideVector(Cause):
    """A layer adds its bias to each rank's own term and leaves out the sum over ranks.

    The bias hides the missing sum: neither the sum nor the mean of the ranks' outputs is the right output, until the
    bias is set aside.

    Attributes:
        vector: The vector that is added, usually a bias.
        axis: The axis over which a reduction is missing.
        op: `sum` or `avg`.
    """

    vector: str
    axis: str
    op: str
    kinds = ("unreduced-output",)
    why = (
        "Each rank adds {vector} to its own {op:sum?term of a sum over {axis}, and not to the sum|part of a mean over "
        "{axis}}"
    )
    how = (
        "all_reduce over {axis} the tensor that {vector} is added to, in a function whose backward hands the gradient "
        "on as it is (RowwiseParallel does), and add {vector} afterwards"
    )


class ConcatenatedTerms(Cause):
    """Terms of a sum are gathered side by side instead of being added.

    An all_gather is used instead of an all_reduce. The result is larger than it should be along one dim, and code
    that does not check its shape goes on with it.

    Attributes:
        axis: The axis along which the terms are.
        dim: The dim along which they were joined.
        vector: A bias that is added after the sum; empty if there is none.
    """

    axis: str
    dim: int
    vector: str = ""
    kinds = ("wrong-shape",)
    why = (
        "The ranks' parts along {axis} are terms of a sum, and were put beside one another along dim {dim}: "
        "concatenated where they are summed"
    )
    how = "sum the parts over {axis} in place of concatenating them{vector:?, and add {vector} after the sum}"


class RepeatedTerm(Cause):
    """A term, such as a bias or a residual, is in an output several times.

    A row-parallel layer must add it once, after the sum over ranks. If every rank adds it before the sum, the sum has
    it several times, and no shape shows it.

    Attributes:
        tensor: The term: `layers.0.down.bias`, `the input of layers.0`.
        axes: The axes whose size is the number of times; empty if no axis has that size.
        module: The module whose output has it; empty if it is not known.
    """

    tensor: str
    axes: str
    module: str = ""
    kinds = ("wrong-scale",)
    why = (
        "{axes:?Every rank of {axes} adds the whole of {tensor} before the sum over ranks|{tensor} is added in several "
        "places: before and after a sum over ranks, or on several of its ranks}{module:?, in {module}}"
    )
    how = "add {tensor} after the sum over {axes:?{axes}|ranks}, as RowwiseParallel does, or on one rank only"
    references = ("TGI#1036",)


class TermLeftOut(Cause):
    """A term, such as a bias or a residual, is missing from an output.

    The sharded module does not add it, or adds it on a rank whose term does not count in the sum. The output keeps its
    shape.

    Attributes:
        tensor: The term: `layers.0.down.bias`, `the input of layers.0`.
        module: The module whose output lacks it; empty if it is not known.
    """

    tensor: str
    module: str = ""
    kinds = ("wrong-scale", "wrong-value")
    why = "{tensor} is left out{module:? of {module}}, or is not added on the ranks that count"
    how = "add {tensor} once: after the sum over ranks, as RowwiseParallel does, or before it on one rank only"
    references = ("TGI#1036",)


class MixedShards(Cause):
    """A reduction runs over ranks that hold different parts of a tensor, and mixes the parts.

    Shards have equal shapes, so a collective over the wrong group adds them without an error. Afterwards every rank
    has the same numbers, which belong to no part.
    """

    axis: str
    kinds = ("wrong-value",)
    why = (
        "It was reduced over all ranks of {axis}, which splits it: only copies of one part are reduced, shards are not"
    )
    how = (
        "reduce it over the axes that do not split it; leave {axis} out of the group, or reduce over those of its "
        "ranks only that hold the same part"
    )


class MixedLayers(Cause):
    """Gradients are reduced over an axis whose ranks have different layers.

    Stages of a pipeline have tensors of equal shapes under other names. A reduction over all ranks gives one gradient
    to different weights, and nothing compares the names.

    Attributes:
        axis: The axis along which layers differ.
        others: The other axes with more than one rank.
    """

    axis: str
    others: tuple[str, ...]
    kinds = ("wrong-value",)
    why = "Gradients were reduced over {axis}, whose ranks have different weights: different layers were mixed"
    how = (
        "take {axis} out of the group that gradients are reduced over; reduce over {others:?{others}, whichever splits "
        "the batch, instead|no group at all}"
    )


class WrongCollective(Cause):
    """A collective returns other numbers than its definition gives for its inputs.

    The call names another group, root or reduction than is meant, or its result is read before it arrived. Buffers
    have the right shape all along, so nothing raises.
    """

    kinds = ("collective-mismatch",)
    why = (
        "It was called with the wrong group, root, order or reduction, its result was read before it arrived, or the "
        "backend is wrong"
    )
    how = "compare the call's group, src or dst, op and list order with what is meant, and wait() for async_op=True"
