"""Causes in optimizer states, in a dump, a step or a checkpoint, and in what else a load must bring."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class StaleMaster(Cause):
    """The optimizer's master copy has other values than the weight.

    The weight was loaded after the master copy was made, or the other way around. The model is right until the first
    step, which writes the old master copy over it.
    """

    kinds = ("foreign",)
    why = (
        "The weight was written after its master copy was made, as by load_state_dict, or the master copy was loaded "
        "without the weight: the optimizer's next step writes the master copy over the weight"
    )
    how = (
        "load before deepspeed.initialize or by engine.load_checkpoint on every rank; or make the master copies again: "
        "engine.optimizer.refresh_fp32_params()"
    )


class MisplacedMaster(Cause):
    """A rank's part of the master copies belongs to other elements than it says.

    Ranks loaded each other's optimizer files, or the recorded offsets into the flat buffer are wrong. Buffers of all
    ranks have one size, so nothing raises.
    """

    kinds = ("misordered", "foreign")
    why = (
        "Ranks loaded each other's optimizer files, or the fragment's address (_hp_mapping) is not where its elements "
        "are in the flat buffer, as with round_robin_gradients in DeepSpeed 0.19.8"
    )
    how = (
        "load each rank's own zero_pp_rank_* file, with the number of ranks that saved it; while addresses are wrong, "
        "leave out round_robin_gradients, or read no master by name (safe_get_full_fp32_param)"
    )


class RankDependentOffsets(Cause):
    """Elements of a weight are in several ranks' flat buffers, or in none.

    The offsets of fragments differ from what deepspeed.initialize computed, on some ranks. Each rank's buffer is
    complete in itself.
    """

    kinds = ("wrong-placement",)
    why = "The offsets of fragments were computed by a rule that depends on the rank, or were changed on it"
    how = "use the addresses that deepspeed.initialize made (param._hp_mapping.lp_fragment_address), on every rank"


class StateOfAnotherLayout(Cause):
    """An optimizer's state is laid out in another way than intended.

    The optimizer was made before sharding, or shards its states itself. States follow the parameter that the optimizer
    saw, and nothing compares them with the model's.
    """

    kinds = ("wrong-placement",)
    why = (
        "The state was made of a parameter that is laid out in another way: before sharding, or by an optimizer "
        "that shards what it keeps, or that does not"
    )
    how = "make the optimizer once the model is sharded; where this layout is meant, expect it"


class SameOptimizerFile(Cause):
    """Different shards of an optimizer's state hold bitwise the same values.

    Every rank loaded the optimizer file of one rank. The shapes fit, and training continues from wrong moments.
    """

    kinds = ("identical-shards",)
    why = "Ranks loaded the same rank's optimizer file"
    how = "load each rank's own optimizer file (zero_pp_rank_*), with the number of ranks that saved it"


class StateNotLoaded(Cause):
    """An optimizer's state started from zeros, although the unsharded model's did not.

    The state was not loaded, or was loaded into tensors that the optimizer no longer uses. The optimizer then makes
    new states without a word.
    """

    kinds = ("wrong-value",)
    why = (
        "The state started from zeros where the unsharded model's did not: it was never loaded, or it was loaded into "
        "tensors that the optimizer does not use"
    )
    how = (
        "load the state into the optimizer of the sharded model, as torch.distributed.checkpoint.state_dict."
        "set_optimizer_state_dict does, and check that it took"
    )


class StateInAnotherOrder(Cause):
    """A rank has the right elements of an optimizer's state, in another order than its weight.

    The weight was permuted, cut or flattened in one way and its state in another. Both have the same size, so each
    element is stepped with a neighbor's moments.
    """

    kinds = ("wrong-value",)
    why = (
        "The state was cut, joined or flattened in another order than its weight: rows of another layout, or a "
        "permutation of the weight that its state did not go through"
    )
    how = (
        "do with the state what was done with the weight: the same permutation, the same split, the same transposition"
    )


class StateOfAnotherRank(Cause):
    """Ranks have the optimizer's state of another rank's part of the weight.

    The state was cut by another coordinate or offset than the weight, or by none. It has the shape of every shard, so
    the optimizer accepts it.

    Attributes:
        is_one: Whether all ranks have the state of one part.
    """

    is_one: bool = False
    kinds = ("wrong-value",)
    why = (
        "The part of the state was chosen {is_one:?without the coordinate on the axis that splits its weight|by "
        "another coordinate or offset than that of its weight}"
    )
    how = "cut the state as its weight: by mesh.get_local_rank() on the axis that splits the weight"


class UnexplainedState(Cause):
    """An optimizer's state differs from the unsharded model's after the step, by no known rule.

    All gradients of the step are right, so the difference was there before it or is made by the optimizer. A state of
    any content has the right shape.
    """

    kinds = ("wrong-value",)
    why = (
        "The gradients are right, but what they are added to is not the unsharded model's state: it was loaded in "
        "another order or for another weight, or has other betas; or the gradients were clipped by another norm"
    )
    how = (
        "load the state by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, or cut it by the weight's "
        "own placements, as distribute_tensor does; compare betas and clipping with the unsharded model's"
    )


TO_LOAD = (
    "load the optimizer's state by parameter, with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, "
    "or in place with the optimizer's own load_state_dict"
)


class StateLostInLoad(Cause):
    """The optimizer lacks a state after a load that it had when it was saved.

    Optimizers make missing states at the next step, from zero. Training goes on, with a bump in the loss at most.
    """

    kinds = ("incomplete",)
    why = (
        "The optimizer's state was not loaded, or what was loaded has none of this parameter: saved by number, under "
        "another name, or of another stage"
    )
    how = TO_LOAD


class StepLostInLoad(Cause):
    """The optimizer's number of steps is not the saved one after a load.

    The step is a number beside the moments. A save of tensors alone leaves it out.
    """

    kinds = ("write-not-applied",)
    why = "The step is not among what was saved, or the load left the one that was there: bias correction starts again"
    how = "save the whole state of each parameter, with its numbers, and load all of it"


class SettingLostInLoad(Cause):
    """A hyperparameter of the optimizer is not the saved one after a load.

    The learning rate and the like are in param_groups, which a save of the states alone leaves out.
    """

    kinds = ("write-not-applied",)
    why = "The groups' hyperparameters were not saved, or the load kept those that the optimizer was built with"
    how = "save and load param_groups beside the state; if the new run is to set its own, leave 'setting' out of `of`"


class TieLostInLoad(Cause):
    """Two names shared storage before a load and do not afterwards.

    assign=True and setattr replace a parameter under one of its names. Both have the same values until the next step.
    """

    kinds = ("untied",)
    why = "The load put a new tensor in the place of one of them (assign=True, setattr): they drift apart from now on"
    how = "load in place, or tie them again after the load, before the optimizer is made"


class ReplacedParameters(Cause):
    """The optimizer steps tensors that are not the model's any more.

    It keeps the parameters that it was built with. After a load that replaces them it updates the old ones, and the
    model never changes.
    """

    kinds = ("wrong-value",)
    why = (
        "The load put new parameters into the model (assign=True, setattr), and the optimizer still steps the old ones"
    )
    how = "load the model before the optimizer is made, or load in place: copy_ into the parameters that are there"


class ThawedByLoad(Cause):
    """A parameter is trained after a load and was frozen before, or the other way around.

    A new nn.Parameter has requires_grad=True, whatever it replaces.
    """

    kinds = ("wrong-value",)
    why = "The load put a new parameter in its place, or set requires_grad: a new nn.Parameter is always trained"
    how = "load in place, or set requires_grad again after the load, before the optimizer is made"


class NameLostInLoad(Cause):
    """The model lacks a tensor after a load that it had before.

    The load made a new model, or replaced a module, and that one has other names.
    """

    kinds = ("incomplete",)
    why = "The load replaced the model by one that lacks it, or renamed it"
    how = "load into a model with the same modules"


class OrphanState(Cause):
    """The checkpoint has optimizer state of a parameter that the model in it does not have.

    States are found by the parameter's name. After a rename, or with a model and an optimizer of different saves, the
    load finds no match and the parameter starts with an empty state.
    """

    kinds = ("foreign",)
    why = "The model and its optimizer were saved at different times, or the parameter was renamed"
    how = "save both from one state dict, with torch.distributed.checkpoint.state_dict.get_state_dict"


class MisshapenState(Cause):
    """An optimizer's state does not have the shape of its parameter.

    A moment has one element for each element of its parameter. A local shard that is saved as if it were the whole
    tensor has fewer.
    """

    kinds = ("wrong-shape",)
    why = "The state is of another parameter, or a shard of it was saved as the whole"
    how = "save both as DTensors"


class LostParamGroup(Cause):
    """Parameters have optimizer state, and no parameter group of the checkpoint names them.

    A save that takes the states and only some of the groups loses settings. After the load these parameters train with
    the settings that the optimizer was built with.
    """

    kinds = ("incomplete",)
    why = "A group was lost, with its learning rate and weight decay"
    how = "save all of optimizer.state_dict()['param_groups'], as get_state_dict does"


class PartialState(Cause):
    """A parameter lacks one of the states that similar parameters have.

    Adam needs both moments and the number of steps. A conversion that copies only tensors leaves out the step, and the
    optimizer then makes a new one that starts at 0.
    """

    kinds = ("incomplete",)
    why = "Its state was saved only in part, or was put together from another checkpoint"
    how = (
        "save the whole state of each parameter (torch.distributed.checkpoint.state_dict.get_state_dict); where it was "
        "saved whole, copy all files of the checkpoint again, or convert it again from them"
    )


class AbsentState(Cause):
    """A parameter group names a parameter of which the checkpoint has no optimizer state.

    Optimizers make the state of a parameter when it first has a gradient, so an unused parameter has none. If it was
    trained, a rank failed to save, and its moments restart from zero.
    """

    kinds = ("incomplete",)
    why = "A rank did not save its states, or the parameter never had a gradient"
    how = "load with care: the optimizer starts this parameter from nothing"


class NotFiniteState(Cause):
    """An optimizer's moment has nan or infinite values.

    One gradient that was not finite is enough: a running mean keeps it forever. The weights may still be finite when
    the checkpoint is written.
    """

    kinds = ("wrong-value",)
    why = "A gradient was nan or infinite, or memory was saved that nothing was written to"
    how = "resume from an earlier step; skip steps whose gradients are not finite"


class NegativeSquares(Cause):
    """A mean of squares has negative values.

    Squares cannot be negative, so these values are another tensor's: the first moment has the same shape and dtype, and
    nothing in a load notices the exchange.
    """

    kinds = ("wrong-value",)
    why = "First and second moments were exchanged, or another tensor was written here"
    how = "find out which tensor it is: `shardviz diff` with the step before; do not resume from this one"


class LostStepCounter(Cause):
    """The optimizer's step is 0 and its moments are not zero.

    Moments and step are separate entries of a state. Without the step, bias correction treats trained moments as if
    they were of the first step, and the updates after the load have a wrong size.
    """

    kinds = ("wrong-value",)
    why = "The counter was lost or set back, by a conversion or by a save that left it out"
    how = "write the counter of the step that the moments are of: Adam divides by 1 - beta**step"


class EmptyMoments(Cause):
    """All moments of the optimizer are zero, although it has taken steps.

    A save that does not gather the moments writes the zeros they were allocated with. The load succeeds, and training
    goes on as if the optimizer had never seen a gradient.
    """

    kinds = ("wrong-value",)
    why = "The moments were not gathered or not loaded before this save, or no parameter had a gradient"
    how = "save them as they are during training, with torch.distributed.checkpoint.state_dict.get_state_dict"


class MixedStepFiles(Cause):
    """The optimizer's steps in one file are different from those in all other files.

    All ranks take the same number of steps. A file that was left in the folder, or copied, from another save of the
    same job has the right shapes and the wrong step.
    """

    kinds = ("wrong-value",)
    why = "The file is of another save, or has a stage whose training began later"
    how = "lay the checkpoint beside another step's: `shardviz diff` shows whether all that is odd is in this file"
