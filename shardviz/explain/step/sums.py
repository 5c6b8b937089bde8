"""Causes of sums over ranks that are missing, misdirected, or count a term wrongly."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from shardviz.explain.cause import AtLine, Cause

if TYPE_CHECKING:
    from collections.abc import Mapping

WRAPPER_OFF: Mapping[str, tuple[str, str]] = {
    "ddp": (
        "DDP has this parameter and did not reduce it: the step called model.module(...) instead of the DDP module, "
        "torch.autograd.grad made the gradient, which runs no hook of DDP, or a parameter was replaced after DDP was "
        "made",
        "call the DDP module itself and backward() on the loss, and replace parameters before it is made",
    ),
    "unused": (
        "DDP has this parameter, and others of its parameters got no gradient in this step. DDP waits for these, and "
        "finishes no reduction",
        "make DDP with find_unused_parameters=True, or let every parameter take part in the loss",
    ),
    "no_sync": (
        "The last forward of DDP ran under no_sync(), or with require_backward_grad_sync set to False, so the backward "
        "after it did not reduce this gradient",
        "run the forward and the backward of the last micro-batch outside no_sync(), or set the flag to True before "
        "that forward",
    ),
    "bypassed": (
        "DDP has this parameter, and the step never called the DDP module: it called the module inside of it "
        "(model.module, or what unwrap_model returns), so DDP's forward didn't arm its reduction",
        "call the module that DDP, or accelerator.prepare, returned",
    ),
    "unfrozen": (
        "DDP reduces only what required a gradient when it was made, and this parameter did not: it was unfrozen later",
        "call requires_grad_(True) on all that is ever trained before DDP is made, or make DDP anew after unfreezing",
    ),
    "fsdp": (
        "FSDP has this parameter, and its reduction was off in the last backward: set_requires_gradient_sync(False), "
        "set_requires_all_reduce(False) or no_sync()",
        "call set_requires_gradient_sync(True) and set_requires_all_reduce(True) before the last backward",
    ),
    "zero": (
        "DeepSpeed's engine has this parameter, and its reduction did not run: the last backward ran under "
        "engine.no_sync(), or it was loss.backward() and not engine.backward(loss)",
        "run the last micro-batch's backward by engine.backward(loss), outside engine.no_sync()",
    ),
    "own_code": (
        "Nothing in this model wraps the parameter, so your own code must reduce .grad, and no reduced value is in it",
        "pass .grad itself to all_reduce, or copy the result back: grad.copy_(result), since a flat bucket from "
        "torch.cat is a copy; if DDP wraps the model, pass the DDP model to the assertion",
    ),
}
"""Why a wrapper does not reduce what it was given, and what lets it."""


class GradientNotReduced(Cause, kind="unreduced-gradient"):
    """Each rank keeps its own part of a gradient, because nothing reduces it over an axis.

    The parameter is outside the wrapper that reduces, or the reduction runs over a group of one rank. Every rank's
    optimizer steps with its own gradient, and the weights stop being copies without an error.

    Attributes:
        op: The reduction, as torch calls it; empty if it is not known.
        is_captured: Whether the step was captured, maybe before the reduction.
        other_axis: An axis along which copies may be equal, if the parameter may be split by hand; else empty.
        ratio: The reduced gradient, divided by the right one.
        rest: Why the gradient is still wrong after the reduction.
        wrapper: What should reduce it over these axes by itself; empty if that is not known; `alone` if its wrapper
            has a group of one rank; `own_code` if nothing in the model that was looked at wraps it.
        style: The entry of a plan that lets its module be parallelized; `none` if nothing that wraps it reduces over
            axes whose ranks have the same batch; empty if DDP or FSDP can.
        part: How a rank's own part of the gradient is had, if it is a DTensor, which torch.distributed doesn't take.
        reduced: Which gradients the job's own code reduces over these axes, as `16 other gradients`; empty if unknown.
        place: `last` if those that it doesn't reduce come last in backward.
    """

    axes: tuple[str, ...]
    op: str = ""
    is_captured: bool = False
    other_axis: str = ""
    ratio: Fraction = Fraction(1)
    rest: Cause | None = None
    wrapper: Literal[
        "", "ddp", "no_sync", "fsdp", "zero", "bypassed", "unused", "unfrozen", "none", "alone", "own_code"
    ] = ""
    style: str = ""
    part: Literal["", ".to_local()"] = ""
    reduced: str = ""
    place: Literal["", "last"] = ""
    why = (
        (
            "{is_by_wrapper:?{wrapper_off}|{is_alone:?The group of this parameter's wrapper has one rank|{is_left_out:?"
            "The code reduces {reduced} over {axes}, and leaves this one out{place:?. It comes last in backward: a "
            "last bucket that is not full may never be sent|}|No FSDP, DDP or tensor-parallel style wraps this "
            "parameter{axes:? over {axes}}}}{rest:?. Once reduced, its gradient would still be {ratio:times} the right "
            "one: {rest.likeliest[0]:continued}}}"
        ),
        "{may_be_off:?set_requires_gradient_sync(False) or no_sync() was on in the last backward}",
        (
            "{is_settled:?|{is_captured:?The capture was made before the reduction|{other_axis:?The code splits the "
            "parameter over {axes} by hand|The wrapper's group has one rank}}}"
        ),
    )
    how = (
        (
            "{is_by_wrapper:?{wrapper_on}|{is_alone:?give the wrapper the ranks of {axes}|{is_left_out:?"
            "{place:?send what is left in the last bucket after backward, or reduce|reduce} it with the others, "
            "before the optimizer's step|{wrapping}call "
            "{axes:?{axes:each and|all_reduce(grad{part}, op=ReduceOp.{op:?{op}|SUM}, "
            "group=mesh.get_group({each!r}))}|all_reduce(grad)} after backward{op:?| (ReduceOp.AVG for a mean)}"
            "{rest:?; and {rest.likeliest[1]}}}}}"
        ),
        "{may_be_off:?switch the reduction on before the last micro-batch}",
        (
            "{is_captured:?capture the gradient after the reduction|{other_axis:?compare axis={other_axis!r} "
            "alone|give it all ranks}}"
        ),
    )
    references = ("pytorch#154888", "Megatron-LM#1446")

    @property
    def is_left_out(self) -> bool:
        """Whether the job's own code reduces other gradients and nothing else is wrong."""
        return bool(self.reduced) and self.rest is None and not self.is_captured

    @property
    def may_be_off(self) -> bool:
        """Whether a switch of FSDP or DDP may be the cause: they average, and nothing else is wrong."""
        return self.op != "SUM" and self.rest is None and not self.wrapper

    @property
    def is_by_wrapper(self) -> bool:
        """Whether a wrapper should have reduced this gradient and its reduction did not run."""
        return self.wrapper in WRAPPER_OFF and self.rest is None and not self.is_captured

    @property
    def is_settled(self) -> bool:
        """Whether the reduction cannot run over a group of one rank, or is known to."""
        may_be_split = self.wrapper == "own_code" and bool(self.other_axis)
        is_known = (self.is_by_wrapper and not may_be_split) or self.wrapper in ("none", "alone")
        return self.rest is not None or is_known

    @property
    def is_alone(self) -> bool:
        """Whether its wrapper has a group of one rank, and nothing else is wrong."""
        return self.wrapper == "alone" and self.rest is None

    @property
    def wrapping(self) -> str:
        """What makes something else reduce the gradient; empty if nothing does."""
        if self.style:
            return f"put {self.style} into the plan of parallelize_module, or " if self.style != "none" else ""
        if self.op == "SUM":  # DDP and fully_shard average
            return ""
        return f"wrap the parameter with DDP or fully_shard over {' and '.join(self.axes) or 'these ranks'}, or "

    @property
    def wrapper_off(self) -> str:
        """Why the wrapper's reduction did not run."""
        return WRAPPER_OFF[self.wrapper][0]

    @property
    def wrapper_on(self) -> str:
        """What lets it run."""
        return WRAPPER_OFF[self.wrapper][1]


class NarrowSum(Cause):
    """The terms of a gradient are rounded before ranks sum them, unlike other gradients.

    One FSDP unit has a MixedPrecisionPolicy with a narrow reduce_dtype, or with none, and so reduces in its param_dtype
    (before torch 2.15); or a hook casts what it reduces. Rounding errors add up with every rank, and no single step
    shows them.

    Attributes:
        of_all: Whether all gradients have numbers of that dtype.
    """

    dtype: str
    of_all: bool
    why = (
        "{of_all:?|The unit's own MixedPrecisionPolicy sums in {dtype}, while a different unit sums in a wider dtype: "
        "{dtype} is its reduce_dtype, or its param_dtype if it has no reduce_dtype (before torch 2.15)}",
        "Code casts the gradient to {dtype} before it reduces it",
    )
    how = (
        "{of_all:?|give every fully_shard the same policy, with reduce_dtype}",
        "reduce the gradient in its own dtype, and cast after that",
    )


class UnreducedSharedPart(Cause, kind="unreduced-gradient"):
    """Ranks that share a part of a weight keep different gradients of it.

    With fewer key and value heads than ranks, several ranks hold the same heads. These ranks aren't an axis of the
    mesh, so no wrapper reduces over them.

    Attributes:
        num_ranks: How many ranks have a gradient of it.
        op: The reduction, as torch calls it.
        groups: The ranks of each part.
    """

    num_parts: int
    num_ranks: int
    op: str
    groups: tuple[tuple[int, ...], ...]
    why = (
        "{num_ranks} ranks share {num_parts} parts of the weight, such as key and value heads. Nothing reduces a "
        "part's gradient over the ranks that hold the part"
    )
    how = (
        "after backward, all_reduce(grad, op=ReduceOp.{op}, group=group), with group, _ = "
        "torch.distributed.new_subgroups_by_enumeration([{groups:4}])"
    )
    references = ("transformers#47811",)


class OutputNotReduced(Cause, kind="unreduced-output"):
    """Each rank returns its own term of an output, and nothing adds the terms.

    A row-parallel layer needs a sum over its axis. Without it the output has the right shape on every rank, so what
    follows computes with a part of the value.
    """

    axes: tuple[str, ...]
    op: str
    why = (
        "Each rank multiplies its own part of the features. Nothing adds the products over {axes}",
        "The code labels the terms of a sum as copies",
    )
    how = (
        (
            "use RowwiseParallel, or call {axes:each and|all_reduce(output, op=ReduceOp.{op}, "
            "group=mesh.get_group({each!r}))} in a torch.autograd.Function whose backward returns the gradient "
            "unchanged"
        ),
        "label the terms Partial()",
    )


class OutputCopiesDiffer(Cause, kind="unreduced-output"):
    """Ranks return different values although the output's placements call them copies.

    A label is not checked against the data. Code that trusts it reads one rank's value as everybody's.
    """

    axes: str
    why = "The placements call the outputs along {axes} copies, and nothing makes the copies equal"
    how = "reduce the output over {axes}, or label it Partial() or Shard() there"


class UnreducedBesideVector(Cause, kind="unreduced-output"):
    """A layer adds its bias to each rank's own term and leaves out the sum over ranks.

    The bias hides the missing sum: neither the sum nor the mean of the ranks' outputs is the right output, until the
    bias is set aside.

    Attributes:
        vector: The vector that is added, usually a bias.
        op: `sum` or `avg`.
    """

    vector: str
    axis: str
    op: str
    why = (
        "Each rank adds {vector} to its own {op:sum?term of a sum|part of a mean} over {axis}, and nothing "
        "{op:sum?sums the terms|averages the parts}"
    )
    how = (
        "all_reduce over {axis} the tensor that {vector} is added to, with a backward that returns the gradient "
        "unchanged (RowwiseParallel), and add {vector} afterwards; in backward, sum the gradient of the input that "
        "ranks share over {axis} (ColwiseParallel)"
    )


class ResultNotRead(AtLine):
    """A collective sums over ranks, and the code drops the sum.

    `torch.distributed.all_reduce` writes into its argument. `_functional_collectives.all_reduce` leaves it as it is and
    returns the sum in a new tensor. Code that calls the second like the first runs, communicates, and changes nothing.
    So does code that gives the first a copy: `param.grad.clone()`, or `.contiguous()` of a strided gradient.

    Attributes:
        place: The line that calls it, as `train.py:57`.
        function: The collective.
        is_copy: Whether it wrote the sum into a copy of what should be summed.
    """

    axes: tuple[str, ...]
    is_copy: bool = False
    kinds = ("unreduced-gradient", "unreduced-output")
    why = (
        "{is_copy:?{function} in {place} sums a copy over {axes}, and nothing reads the copy|{function} in {place} "
        "returns the sum over {axes} in a new tensor, and nothing reads that tensor}"
    )
    how = (
        "{is_copy:?after {place}, write the sum back: x.copy_(copy), or give {function} the tensor itself|in {place}, "
        "use what {function} returns: x = {function}(x, ...), or x.copy_({function}(x, ...)) for a "
        "gradient; torch.distributed.{function} works in place}"
    )


class RepeatedTerm(Cause, kind="wrong-scale"):
    """A term, such as a bias or a residual, is in an output several times.

    A row-parallel layer must add it once, after the sum over ranks. If every rank adds it before the sum, the sum has
    it several times, and no shape shows it.

    Attributes:
        tensor: The term: `layers.0.down.bias`, `the input of layers.0`.
        axes: The axes whose size is the number of times; empty if no axis has that size.
        module: The module whose output has it; empty if it is not known.
        weight: The matrix that makes it, if every rank has all of that; else empty.
    """

    tensor: str
    axes: str
    module: str = ""
    weight: str = ""
    why = (
        "{axes:?Every rank along {axes} adds all of {tensor} before the sum over ranks|The code adds {tensor} before "
        "and after a sum over ranks, or on several of its ranks}{module:?, in {module:called}}"
    )
    how = (
        "{weight:?cut {weight} along its input features, so that each rank has a term of the sum, or }add {tensor} "
        "after the sum over {axes:?{axes}|ranks} (RowwiseParallel does), or on one rank only"
    )
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
    why = (
        "{module:?{module:called}|The sharded code} leaves out {tensor}, or adds it only on a rank that doesn't count "
        "in the sum"
    )
    how = "add {tensor} once: after the sum over ranks (RowwiseParallel does), or before the sum on one rank only"
    references = ("TGI#1036",)


class TermOfSomeRanks(Cause):
    """Only some ranks add a term, such as a bias or a residual, to what all of them return.

    Before a sum over ranks one of them must add it, and afterwards all must. A branch by rank behind the sum lets the
    others go on without the term, or one of them with it.

    Attributes:
        tensor: The term: `layers.0.down.bias`, `the input of layers.0`.
        ranks: The ranks that are wrong.
        module: The module that returns it; empty if it is not known.
        is_extra: Whether they add the term once more than the others; else they lack it.
    """

    tensor: str
    ranks: tuple[int, ...]
    module: str = ""
    is_extra: bool = False
    kinds = ("wrong-value", "wrong-scale")
    why = (
        "{is_extra:?The code{module:? of {module:called}} adds {tensor} on {ranks:ranks} once more than on the others|"
        "The code{module:? of {module:called}} adds {tensor} on some ranks only: {ranks:ranks} "
        "{ranks:1?lacks|lack} it, and no sum over ranks comes after that}"
    )
    how = (
        "{is_extra:?add {tensor} equally often on every rank|add {tensor} on every rank, or on one rank before the sum "
        "over ranks}"
    )


class ZerosOfSomeRanks(Cause):
    """Some ranks return zeros, and others the whole result.

    What only one rank must add to a sum is multiplied by a mask on the others. If no sum or broadcast comes after it,
    they go on with zeros.

    Attributes:
        module: The module that returns it.
        ranks: The ranks that have zeros.
    """

    module: str
    ranks: tuple[int, ...]
    kinds = ("wrong-value", "wrong-scale")
    why = "The code of {module:called} returns zeros on {ranks:ranks}, and the whole on the others"
    how = "sum or broadcast over ranks what only some of them return in {module:called}, or leave out the mask by rank"


class MixedShards(Cause):
    """A reduction runs over ranks that hold different parts of a tensor, and mixes the parts.

    Shards have equal shapes, so a collective over the wrong group raises nothing, and its sum belongs to no part.

    Attributes:
        lacking: The axes along which copies differ because nothing reduces them; empty if there are none.
        groups: The ranks that reduce together, if they are neither those of an axis nor those of one part.
        holders: The ranks that hold each part.
    """

    axis: str
    lacking: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    holders: tuple[tuple[int, ...], ...] = ()
    why = (
        "{groups:?The reduction runs in the groups {groups:4}, whose ranks hold different parts of this tensor, and "
        "mixes the parts. Those of {holders:4} hold equal ones|The reduction runs over all ranks of {axis}, which "
        "splits this tensor, and mixes the shards{lacking:?. Nothing reduces over {lacking}, along which copies "
        "differ}}"
    )
    how = (
        "{groups:?reduce in groups of torch.distributed.new_subgroups_by_enumeration([{holders:4}])|{lacking:?reduce "
        "over {lacking} instead of {axis}|leave {axis} out of the reduction's group}: reduce only over ranks that hold "
        "the same shard}"
    )


class MixedLayers(Cause):
    """Gradients are reduced over an axis whose ranks have different layers.

    Stages of a pipeline have tensors of equal shapes under different names. A reduction over all ranks gives different
    weights one gradient, and nothing compares the names.

    Attributes:
        axis: The axis along which layers differ.
        others: The other axes with more than one rank.
    """

    axis: str
    others: tuple[str, ...]
    why = "The gradient reduction runs over {axis}, whose ranks have different layers, and mixes the layers"
    how = (
        "take {axis} out of the group that reduces gradients; {others:?reduce over {others}, whichever splits the "
        "batch|reduce over no axis}"
    )


class SkippedInReduction(Cause):
    """Ranks skip different weights in the reduction of gradients, so that calls don't match.

    A rank that doesn't use a weight has no gradient of it. A loop that skips such weights makes fewer calls there, and
    the next call meets that of another weight on the other ranks. Nothing compares names, and equal shapes fit.

    Attributes:
        axis: The axis whose ranks have the same weights.
    """

    axis: str
    why = (
        "Ranks along {axis} reduce their gradients in different sequences, so one all_reduce gets the gradients of "
        "different weights. Most likely a loop skips weights whose .grad is None, and each rank skips different ones"
    )
    how = "reduce for every parameter, in the same order on all ranks, and pass zeros if .grad is None"


class WrongCollective(Cause, kind="collective-mismatch"):
    """A collective returns different numbers than its definition gives for its inputs.

    The call names the wrong group, root or reduction, or the code reads the result too early. Buffers have the right
    shape either way, so nothing raises.
    """

    why = (
        "The call has the wrong group, root, list order or ReduceOp",
        "The code reads the result before it arrives (async_op=True)",
    )
    how = (
        "compare the call's group, src or dst, op and list order with what you mean",
        "call wait() on the returned work before you read the result",
    )
