"""Causes of wrong weights and buffers after an optimizer step: rates, decay, groups, skips."""

from __future__ import annotations

from typing import Literal

from shardviz.explain.cause import Cause


class RankDependentStep(Cause):
    """Ranks step a weight by different multiples of the unsharded model's step.

    The learning rate, or the factor by which gradients are clipped or divided, depends on the rank. Each rank's step
    points in the right direction, so the loss still falls.

    Attributes:
        state: The kind of the optimizer's state that has these multiples, if it isn't the weight: `exp_avg`.
    """

    state: str = ""
    kinds = ("wrong-value", "unreplicated")
    why = (
        "{state:?|Each rank has a learning rate of its own}",
        (
            "{state:?The gradients are right, and each rank's optimizer multiplies what it has by a number of its "
            "own, such as a norm or a mean of its own part|Each rank divides or clips the gradients by a number of its "
            "own before the step}"
        ),
    )
    how = (
        "{state:?|print param_groups on two ranks, and set the same learning rate on all}",
        (
            "{state:?compute the number from the whole: all_reduce sums and counts before a root or mean|clip with "
            "torch.nn.utils.clip_grad_norm_ on the DTensors, and divide by the same number on all ranks}"
        ),
    )


class RepeatedStep(Cause):
    """Every rank steps a weight by a whole multiple of the unsharded model's step.

    step() runs several times for one batch, for instance in a hook and in the training loop, or the learning rate was
    multiplied. Training only looks as if its learning rate were higher.

    Attributes:
        of_all: Whether no weight has the unsharded model's step; else it is the learning rate of this one's group.
    """

    times: int
    of_all: bool = True
    why = (
        "{of_all:?The optimizer stepped {times} times on the same gradient: a hook or a wrapper steps too|}",
        "The learning rate is {times} times as large after sharding, such as a rate that is divided by a local size",
    )
    how = (
        "{of_all:?call step() once per batch|}",
        "compare the learning rates in param_groups before and after sharding",
    )


class StepOfPart(Cause):
    """An optimizer that works on whole matrices runs on each rank's part of one.

    Muon makes the step orthogonal; others divide it by its norm (LARS, LAMB, NovoGrad) or, like Adafactor, by the means
    of its rows and columns. All of these are defined for a part too, and shapes fit, so nothing raises. But the steps
    of the parts do not make up the step of the whole matrix.

    Attributes:
        norm: The norm of each rank's part that scales the part, if it was found: `the gradient's norm`.
    """

    norm: str = ""
    why = (
        "{norm:?The optimizer scales each rank's part by {norm} of that part, not of the whole weight, as LARS, LAMB, "
        "NovoGrad or a clipping per tensor do when they get shards|The optimizer needs the whole matrix (Muon) or its "
        "norms and means (LARS, LAMB, Adafactor), and gets each rank's part: DTensor.to_local(), or a plain shard}"
    )
    how = (
        "{norm:?all_reduce the sum of squares over the ranks that split the weight before the root is taken, or use "
        "norm() of the DTensor with full_tensor() instead of to_local()|gather the gradient or the momentum with "
        "full_tensor() and keep the rank's own part of the result, all_reduce the sums of squares before a root or a "
        "mean, or use an implementation for DTensors}"
    )


class RowsOfPart(Cause):
    """Rows of a weight that are to stay as they are, are picked by their index in a part.

    Code that freezes rows, such as those of old words, sets their gradient to zero. It gets each rank's part from
    `to_local()`, and row 0 of that is row 0 of the whole on the first rank alone.

    Attributes:
        rows: The rows that the unsharded model's optimizer leaves.
        is_offset: Whether ranks leave others than those with the same indices: they count their first row wrongly.
    """

    rows: str
    is_offset: bool = False
    why = (
        "{is_offset:?The code that picks rows {rows} counts the first row of a rank's part wrongly|The code picks rows "
        "{rows} by their index in each rank's part of the weight, not in the whole}"
    )
    how = (
        "{is_offset:?count the first row of a rank's part as the lengths of the parts before it, and leave out rows "
        "that aren't in its part|subtract the number of the rank's first row from the indices, and leave out those "
        "that aren't in its part}"
    )


class AnotherLearningRate(Cause):
    """Every rank steps a weight by one multiple of the unsharded model's step.

    The learning rate or a scaling of gradients changed when the model was sharded. All ranks agree with each other, so
    nothing raises.

    Attributes:
        is_seen: Whether a learning rate in param_groups was seen to differ.
    """

    is_seen: bool = False
    why = (
        "{is_seen:?|The optimizer scales or clips gradients by a different number, such as a norm that isn't the whole "
        "model's}",
        "The learning rate differs once the model is sharded, such as a rate that is divided by a local size",
    )
    how = (
        "{is_seen:?|clip by the norm of all gradients: torch.nn.utils.clip_grad_norm_ on the DTensors}",
        "compare the learning rates in param_groups with the unsharded model's",
    )


class AnotherGroup(Cause):
    """The sharded optimizer has a weight in another parameter group than the unsharded one.

    Groups that are chosen by name, or by a module's type, change if a wrapper adds to the names or takes the module's
    place. The weight is then stepped with another group's learning rate or weight decay.

    Attributes:
        options: What differs: `lr 0.01 instead of 0.001`.
    """

    options: tuple[str, ...]
    why = (
        "The optimizer has this weight in another group than the unsharded model's optimizer: {options}. The code that "
        "makes the groups picks by names or modules that a wrapper changes"
    )
    how = (
        "print the names of each group; wrappers add to names (`_checkpoint_wrapped_module.`, `module.`) and stand in "
        "place of modules: compare what a name ends with, or make the groups before wrapping"
    )


class ScaledState(Cause):
    """Every rank's optimizer state is one multiple of the unsharded model's.

    The gradients that the backward leaves are right, so the optimizer multiplies them by a different number before it
    keeps them. All ranks agree with each other, so nothing raises.
    """

    why = (
        "The optimizer clips or scales gradients by a different number than the unsharded model's",
        "The sharded optimizer has different betas, or a different momentum or dampening",
        "The optimizer stepped more than once on the same gradient",
    )
    how = (
        "compute the norm behind the number from each gradient element once: torch.nn.utils.get_total_norm",
        "compare betas, momentum and dampening in param_groups with the unsharded model's",
        "call the optimizer's step() once per batch",
    )


class StateOfParts(Cause):
    """An optimizer keeps statistics of each rank's own part of a weight or of its gradient.

    Adafactor's means over rows or columns have the same shape on every rank if the dim that they are taken over is the
    one that is split. Each rank then keeps its own means, and no shape shows it.

    Attributes:
        along: The axes that split the weight, in words.
        op: The reduction that gives the unsharded model's state.
    """

    along: str
    op: str
    why = (
        "The optimizer computes this state from each rank's own part of the weight or gradient, which {along} splits. "
        "Nothing reduces it over {along}"
    )
    how = "all_reduce the statistic over {along} with ReduceOp.{op:upper} before the optimizer keeps it"


class StateOfOldWeight(Cause):
    """A state that follows a weight was updated before the rank got the new weight.

    An optimizer that divides the weights among ranks sends each one after it was stepped. A moving average that is
    updated before that follows the old weight on every rank but the one that steps it.
    """

    why = (
        "The optimizer updates this state, such as a moving average of the weight, before the new weight arrives from "
        "the rank that steps it"
    )
    how = "update the state after the broadcast of the weight"


class RankDependentDecay(Cause):
    """Some ranks decay a weight more or less than the others.

    The parameter is in a different group on these ranks, or weight_decay depends on the rank. Weights drift apart
    slowly, and gradients are right.
    """

    why = "weight_decay, or the parameter group, depends on the rank"
    how = "print param_groups on two ranks, and give every rank's optimizer the same groups and the same weight_decay"


class AnotherDecay(Cause):
    """All ranks decay a weight more or less than the unsharded model does.

    Groups are often chosen by the number of dims or by the type of a parameter, and sharding can change both. The
    parameter then falls into the wrong group without an error.
    """

    why = (
        "The parameter is in a different group than the unsharded model's, so its weight decay differs. Sharding "
        "changed the shape, ndim, type or name that chooses the group"
    )
    how = "choose the optimizer's groups by name, before sharding"


class RemainderNotStepped(Cause):
    """The last elements of a weight are stepped on no rank.

    An optimizer that lays parameters side by side in a flat one, and gives each rank a part of it, must round the parts
    up, or the remainder of the division is on no rank. It is smaller than the number of ranks.
    """

    why = (
        "The gradients are right. The sharded optimizer cuts flat parameters into parts of numel // ranks elements, "
        "and the remainder is in no part"
    )
    how = "pad the flat parameters to a multiple of the number of ranks, or round the size of a part up"


class UnexplainedWeight(Cause):
    """A weight differs from the unsharded model's after the step, by no known rule.

    The gradients and the recorded states are right, so the optimizer does something else with them. Each rank's
    optimizer runs on its own, and nothing compares its result.

    Attributes:
        settings: What the optimizer keeps besides tensors and the unsharded model's keeps otherwise, in words.
        few: How many elements of the step are not zero, if they are too few to tell a multiple.
        split_over: The axes along which ranks step parts of the weight.
        only_split: Whether a matrix that every rank has whole is stepped rightly, so that the split is what matters.
    """

    settings: str = ""
    few: str = ""
    split_over: str = ""
    only_split: bool = False
    why = (
        (
            "{settings:?The gradients are right, and the sharded optimizer's {settings} isn't the unsharded "
            "model's|{only_split:?The gradients are right, and matrices that every rank has whole are stepped as they "
            "should be. The optimizer needs the whole weight, and was given each rank's part|}}"
        ),
        (
            "The gradients are right. The sharded optimizer has {few:?a different learning rate, parameter "
            "group, clipping norm or count of steps|the weight in a different parameter group, or steps it several "
            "times}"
        ),
        (
            "{only_split:?|{split_over:?The optimizer's rule uses the whole matrix, such as its norm or its "
            "singular vectors, and gets each rank's part over {split_over}}}"
        ),
    )
    how = (
        (
            "{settings:?give the sharded optimizer the unsharded model's {settings}|gather the gradient with "
            "full_tensor() before the optimizer's computation, and keep the rank's part of the result}"
        ),
        "make the optimizer from model.parameters() after sharding, with the unsharded model's groups and options",
        "gather the gradient before the rule is applied, and keep the rank's part of the step",
    )


class TrainedThoughFrozen(Cause):
    """A weight that is frozen in the unsharded model has a gradient in the sharded step.

    `nn.Parameter(shard)` requires a gradient by default, even if the weight that was sharded did not.
    """

    why = (
        "Sharding replaces the frozen weight by a parameter that requires a gradient, as nn.Parameter(shard) does by "
        "default"
    )
    how = "pass requires_grad=weight.requires_grad to nn.Parameter, before you make the optimizer"


class LeftOutOfOptimizer(Cause, kind="write-not-applied"):
    """An optimizer does not step a weight, on some ranks or on all.

    The optimizer has the parameters from before sharding, or a filter by rank, name or type leaves this one out. The
    weight keeps its value and its gradient is ignored.
    """

    why = (
        "The optimizer has the parameters from before sharding",
        "A filter by rank, name or type leaves the parameter out, because sharding changed its name or type",
    )
    how = "make the optimizer from model.parameters() after sharding, with the same groups on every rank"


class StepNotSent(Cause):
    """A rank that steps a weight does not send it to the others.

    The optimizer divides the weights among ranks, as ZeRO's first stage does, and sends each to the others after the
    step. A loop over full rounds, or over a list that is one too short, leaves the last weights out.

    Attributes:
        arrived: A weight that the same ranks do not step either, and that did arrive; empty if none did.
    """

    arrived: str = ""
    kinds = ("write-not-applied", "unreplicated")
    why = (
        "The optimizer divides the weights among the ranks. Nothing sends this one to the ranks that don't step it"
        "{arrived:?, and {arrived} is sent|}",
        "{arrived:?|The ranks on which it is as it was leave it out of their step, by a condition of their own}",
    )
    how = (
        "broadcast every weight from the rank that steps it, the last ones of the list, too",
        "{arrived:?|step each weight on every rank, or on none}",
    )


class StepOverwritten(Cause, kind="write-not-applied"):
    """A weight is as it was before the step on all ranks, although one of them steps it.

    The optimizer divides the weights among ranks, as ZeRO's first stage does, and broadcasts each one. The source of a
    broadcast that isn't the rank that steps the weight sends the old values, over the new ones too.

    Attributes:
        steps: The ranks that step it.
        is_seen: Whether they were seen to have the new values.
    """

    steps: tuple[int, ...]
    is_seen: bool = False
    why = (
        "It is broadcast from a rank that doesn't step it, so the old values overwrite those of {steps:ranks}",
        "{is_seen:?|The optimizer of {steps:ranks} doesn't step it, or its gradient is zero or None there}",
    )
    how = (
        "broadcast every weight from the rank that steps it: compute src from the list that divides the weights",
        "{is_seen:?|print param.grad on {steps:ranks} before the step}",
    )


class AverageNotWritten(Cause, kind="write-not-applied"):
    """A weight that code writes after the step, such as a moving average, keeps its old value.

    The weight has no gradient and is in no group of the optimizer. The code that writes it was skipped, or wrote into a
    copy; neither raises.

    Attributes:
        on_some: Whether it was written on other ranks.
    """

    on_some: bool
    why = (
        (
            "The code that writes this weight after the step (a moving average) {on_some:?ran on some ranks only|did "
            "not run once the model was sharded}"
        ),
        "The code wrote into a copy{on_some:?|: a gathered tensor, or the parameters from before sharding}",
    )
    how = (
        "run this code on every rank",
        "write into the local shards: average.to_local().lerp_(weight.to_local(), rate)",
    )


class CopiesSteppedApart(Cause, kind="unreplicated"):
    """Copies of a weight were equal with equal gradients, and differ after the step.

    Each copy's optimizer has a state of its own, or one rank steps for all and doesn't send its result. No collective
    compares copies afterwards.

    Attributes:
        axes: The axes along which copies differ, in words.
        states: The kinds of state whose copies differ along the same axes.
        moved: What moved, `every copy`, if all did; empty if some copy kept its value.
    """

    axes: str
    states: str = ""
    moved: str = ""
    why = (
        (
            "{states:?Each copy's optimizer has a state of its own: {states} also differs along {axes}|{moved:?The "
            "step of {moved} depends on the rank: noise from a generator that each rank seeds differently, or a number "
            "of the rank's own|Only some ranks step this weight, and none of them sends it to the others}}"
        ),
        "{states:?|{moved:?|Each copy's optimizer has a state of its own}}",
    )
    how = (
        (
            "{states:?give all ranks along {axes} the same optimizer state|{moved:?seed the optimizer's generator "
            "alike on all ranks along {axes}|torch.distributed.broadcast every weight from the rank that steps it}}"
        ),
        "{states:?|{moved:?|give all ranks along {axes} the same optimizer state}}",
    )


class OptimizerOfOtherParameters(Cause, kind="write-not-applied"):
    """The optimizer steps tensors that are not, or no longer, the model's parameters.

    The optimizer was made before the model was sharded, or before a load that replaces parameters: fully_shard,
    parallelize_module, assign=True and setattr put new ones into the modules. The optimizer keeps the old ones, which
    get no gradient, so step() changes nothing of the model. Nothing raises, and the loss stays where it begins.

    Attributes:
        since: What replaced the parameters, if it was seen to: `sharding` or `load`.
    """

    since: Literal["", "sharding", "load"] = ""
    why = (
        "{since:?The optimizer was made before {since:load?the load|the model was sharded}, which replaced the "
        "parameters. It steps the old ones, and the model never changes|The optimizer steps the parameters from "
        "before sharding, or copies of them, not the model's parameters}",
        "{since:?|Something overwrites the result, such as a broadcast from a rank that stepped nothing}",
    )
    how = (
        "{since:load?load the model before you make the optimizer, or load in place: copy_ into the existing "
        "parameters|make the optimizer from model.parameters() after sharding{since:?, or put these into its "
        "param_groups before the first step}}",
        "{since:?|broadcast from the rank that stepped}",
    )


class WriteToGatheredCopy(Cause):
    """The optimizer writes to a weight while FSDP has it gathered, and what it writes is lost.

    Between unshard() and reshard() a module's weights are whole tensors that FSDP2 gathered into memory of their own.
    reshard() frees this memory and puts the shards back, which nothing wrote to; it raises nothing.
    """

    why = "The optimizer writes to FSDP's gathered copy of the weight, and reshard() frees it with what was written"
    how = (
        "write to the shards: compute from full_tensor() or the gathered weight, reshard(), and copy the rank's own "
        "part into weight.to_local(); or use DTensor's operators on the sharded weight"
    )


class StepSkippedByRank(Cause):
    """Each rank decides by its own numbers whether the optimizer steps.

    A step is left out after a spike of the loss, or if the gradients' norm is not finite or too large. A rank's loss is
    of its rows, and the norm of its shards is not that of the whole gradient, so ranks decide differently.

    Attributes:
        on_some: Whether some ranks take the step and others don't; else all take a step that they should leave out.
    """

    on_some: bool
    kinds = ("wrong-value", "write-not-applied", "unreplicated")
    why = (
        "{on_some:?Each rank decides by its own loss or norm whether to step, and ranks decide differently|"
        "Each rank decides by the loss or the norm of its own part, not of the whole, whether to leave out a step}"
    )
    how = (
        "decide by a number that is the same on all ranks: all_reduce the loss with ReduceOp.AVG, or take the norm by "
        "torch.nn.utils.get_total_norm of the DTensors and .full_tensor() of it"
    )


class StepNotKept(Cause, kind="write-not-applied"):
    """Some weights did not move in the step, although they have gradients and others moved.

    An optimizer that divides weights among ranks must send each result to all of them. If the wrong rank's copy is
    sent, the step is overwritten by the old value.

    Attributes:
        is_sent: Whether the optimizer broadcasts anything.
    """

    is_sent: bool
    why = (
        "{is_sent:?The broadcast sends a copy from the wrong rank, not from the rank that stepped the weight|}",
        "No rank steps this weight",
    )
    how = (
        "{is_sent:?broadcast every weight from the rank that steps it|}",
        "assign every weight to a rank, also the last ones when their number isn't divisible by the number of ranks",
    )
