"""Causes of wrong weights and buffers after the optimizer's step: rates, decay, groups, and weights left unstepped."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class RankDependentStep(Cause):
    """Ranks step a weight by different multiples of the unsharded model's step.

    The learning rate, or the factor by which gradients are clipped or divided, depends on the rank. Each rank's step
    points in the right direction, so the loss still falls.
    """

    kinds = ("wrong-value", "unreplicated")
    why = (
        "Each rank has a learning rate of its own, or divides or clips the gradients by a number of its own before "
        "the step"
    )
    how = (
        "give all ranks the same learning rate and the same factor: print param_groups on two ranks, and clip by "
        "torch.nn.utils.clip_grad_norm_ on the DTensors"
    )


class RepeatedStep(Cause):
    """Every rank steps a weight by a whole multiple of the unsharded model's step.

    step() runs several times for one batch, for instance in a hook and in the training loop, or the learning rate was
    multiplied. Training only looks as if its rate were higher.
    """

    times: int
    kinds = ("wrong-value",)
    why = (
        "The optimizer stepped {times} times on the same gradient, as where a hook or a wrapper steps too, or its "
        "learning rate is {times} times as large once the model is sharded"
    )
    how = "call step() once per batch; where it is called once, compare the learning rates in param_groups"


class StepOfPart(Cause):
    """An optimizer that works on whole matrices runs on each rank's part of one.

    Muon makes the step orthogonal, others divide it by its norm. Both are defined for a part too, and shapes fit, so
    nothing raises; but the parts do not make up the step of the whole matrix.
    """

    kinds = ("wrong-value",)
    why = (
        "The optimizer works on whole matrices, as Muon does, or scales by norms of the whole, as LARS and LAMB do, "
        "and was given each rank's part: DTensor.to_local(), or a plain shard"
    )
    how = (
        "gather the gradient or the momentum with full_tensor() before that operation and keep the rank's own part of "
        "the result, all_reduce squares before a root, or use an implementation for DTensors"
    )


class AnotherLearningRate(Cause):
    """Every rank steps a weight by one multiple of the unsharded model's step.

    The learning rate or a scaling of gradients changed when the model was sharded. All ranks agree with each other, so
    nothing raises.
    """

    kinds = ("wrong-value",)
    why = (
        "The learning rate differs once the model is sharded, or the optimizer scales or clips gradients "
        "by a different number, such as a norm that is not the whole model's"
    )
    how = (
        "compare the learning rates in param_groups, and the norm that gradients are clipped by, with the unsharded "
        "model's"
    )


class RankDependentDecay(Cause):
    """Some ranks decay a weight more or less than the others.

    The parameter is in another group on these ranks, or weight_decay is set by the rank. Weights drift apart slowly,
    and gradients are right.
    """

    kinds = ("wrong-value",)
    why = "Weight decay, or the parameter group, depends on the rank"
    how = "give every rank's optimizer the same groups and the same weight_decay: print param_groups on two ranks"


class AnotherDecay(Cause):
    """All ranks decay a weight more or less than the unsharded model does.

    Groups are often chosen by the number of dims or by the type of a parameter, and flat or wrapped parameters have
    others. The parameter then falls into the wrong group without an error.
    """

    kinds = ("wrong-value",)
    why = (
        "Weight decay differs from the unsharded model's: the parameter is in another group, because groups were "
        "chosen by a shape, a number of dims, a type or a name that sharding changes (shards of FSDP keep their ndim, "
        "flat parameters do not)"
    )
    how = "choose the groups of the optimizer before sharding, by name, or by what sharding leaves alone"


class UnexplainedWeight(Cause):
    """A weight differs from the unsharded model's after the step, by no known rule.

    The gradients of the step are right, so the optimizer does something else with them. Each rank's optimizer runs by
    itself, and nothing compares its result.
    """

    kinds = ("wrong-value",)
    why = (
        "The gradients are right, but the sharded optimizer steps differently: another "
        "learning rate, another parameter group, clipping by another norm, another count of steps, or a state that is "
        "not its own"
    )
    how = (
        "make the optimizer from model.parameters() once the model is sharded, with the same groups and options, and "
        "compare state[parameter]['step'] where a state is loaded"
    )


class LeftOutOfOptimizer(Cause):
    """An optimizer does not step a weight, on some ranks or on all.

    The optimizer has the parameters from before sharding, or a filter by rank, name or type leaves this one out. The
    weight keeps its value and its gradient is ignored.
    """

    kinds = ("write-not-applied",)
    why = (
        "Parameters were collected before the model was sharded, or chosen by a rank, a name or a type that "
        "sharding changed"
    )
    how = "make the optimizer of model.parameters() once the model is sharded, with the same groups on every rank"


class AverageNotWritten(Cause):
    """A weight that code writes after the step, such as a moving average, keeps its old value.

    It has no gradient and is in no group of the optimizer. The code that writes it was skipped, or wrote into a copy;
    neither raises.

    Attributes:
        on_some: Whether it was written on other ranks.
    """

    on_some: bool
    kinds = ("write-not-applied",)
    why = (
        "The code that writes it after the step (a moving average) {on_some:?ran on some ranks only|did not run once "
        "the model was sharded}, or wrote into a copy{on_some:?|: a gathered tensor, or the parameters from before "
        "sharding}"
    )
    how = "run it on every rank, and write into the local shards: average.to_local().lerp_(weight.to_local(), rate)"


class CopiesSteppedApart(Cause):
    """Copies of a weight were equal with equal gradients, and differ after the step.

    Each copy's optimizer has a state of its own, or one rank steps for all and its result is not sent. No collective
    compares copies afterwards.

    Attributes:
        axes: The axes along which copies differ, in words.
        states: The kinds of state whose copies differ along the same axes.
    """

    axes: str
    states: str = ""
    kinds = ("unreplicated",)
    why = (
        "Each copy is stepped from an optimizer state of its own{states:?: {states} differs along {axes} too|, or only "
        "some ranks step it and none of these sends it to the others}"
    )
    how = (
        "give all ranks along {axes} the same optimizer state, or torch.distributed.broadcast every weight from "
        "the rank that steps it"
    )


class OptimizerOfOtherParameters(Cause):
    """The optimizer's step changes no weight of the model, although all have gradients.

    The optimizer was made before the model was sharded, and sharding replaced the parameters. It steps tensors that
    nothing else uses.
    """

    kinds = ("write-not-applied",)
    why = (
        "The optimizer does not step the model's parameters, but those from before it was sharded, or copies of them; "
        "or its result was overwritten, as by a broadcast from a rank that stepped nothing"
    )
    how = "make the optimizer of model.parameters() once the model is sharded; broadcast from the rank that stepped"


class StepNotKept(Cause):
    """Some weights did not move in the step, although they have gradients and others moved.

    An optimizer that divides weights among ranks must send each result to all of them. If the wrong rank's copy is
    sent, the step is overwritten by the old value.
    """

    kinds = ("write-not-applied",)
    why = "The rank that stepped it is not the one whose copy was kept or sent to the others, or none did"
    how = "broadcast every weight from the rank that steps it, and step each on one at least"


class BufferOfParts(Cause):
    """Copies of a buffer differ along an axis whose ranks see the same rows of the batch.

    Its module sees a part of the features, or a term of a sum that is still pending, and updates the buffer from that.
    Buffers are not synchronized, so each rank keeps its own.

    Attributes:
        along: The axes, in words.
    """

    along: str
    kinds = ("unreplicated",)
    why = "It is updated from activations that differ along {along}: parts of the features, or terms of a sum"
    how = "update it from what is equal along {along}, or all_reduce what it is updated from"


class UnreducedStatistics(Cause):
    """Each rank's buffer has the statistics of its own part of the batch only.

    Running statistics, such as a maximum, are updated from local rows. Without a reduction every rank normalizes or
    scales by its own numbers.

    Attributes:
        along: The axes that split the batch, in words.
        op: The reduction that gives the unsharded model's value.
    """

    along: str
    op: str
    kinds = ("unreplicated",)
    why = "It is updated from each rank's own part of the batch, which {along} splits, and never reduced"
    how = "all_reduce what it is updated from over {along} with ReduceOp.{op:upper}"


class UnexplainedBuffer(Cause):
    """A buffer differs from the unsharded model's after the step, by no known rule.

    Its module updates it from activations, and on each rank these can be a part of the batch or of the features. No
    axis splits the batch here, so all ranks should have the same value.
    """

    kinds = ("wrong-value",)
    why = "The buffer is updated from something else than the unsharded model's activations"
    how = "compute it from the whole batch and all features, or reduce it over the axes that split them"
