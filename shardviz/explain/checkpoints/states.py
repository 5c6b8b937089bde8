"""Causes in optimizer state of dumps, steps and checkpoints, and in what a load restores."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class StaleMaster(Cause, kind="foreign"):
    """The optimizer's master copy has different values than the weight.

    The weight was loaded after the master copy was made, or the other way around. The model is right until the first
    step, which writes the old master copy over it.
    """

    why = (
        (
            "Code wrote the weight after its master copy was made (load_state_dict, for example). The optimizer's next "
            "step writes the old master copy over it"
        ),
        "The master copy was loaded without the weight",
    )
    how = (
        (
            "load before deepspeed.initialize or by engine.load_checkpoint on every rank, or call "
            "engine.optimizer.refresh_fp32_params()"
        ),
        "load the weight and its master copy from one checkpoint",
    )


class MisplacedMaster(Cause):
    """A rank's part of the master copies belongs to different elements than it says.

    Ranks loaded each other's optimizer files, or the recorded offsets into the flat buffer are wrong. Buffers of all
    ranks have one size, so nothing raises.
    """

    kinds = ("misordered", "foreign")
    why = (
        "Ranks loaded each other's optimizer files",
        (
            "The fragment's address (_hp_mapping) isn't the place of its elements in the flat buffer; DeepSpeed 0.19.8 "
            "does this with round_robin_gradients"
        ),
    )
    how = (
        "load each rank's own zero_pp_rank_* file, with the number of ranks that saved it",
        "leave out round_robin_gradients, or don't read masters by name (safe_get_full_fp32_param)",
    )


class RankDependentOffsets(Cause, kind="wrong-placement"):
    """Elements of a weight are in several ranks' flat buffers, or in none.

    The offsets of fragments differ from what deepspeed.initialize computed, on some ranks. Each rank's buffer is
    complete in itself.
    """

    why = "Code computes or changes the offsets of fragments by a rule that depends on the rank"
    how = "use the addresses that deepspeed.initialize made (param._hp_mapping.lp_fragment_address), on every rank"


class StateOfAnotherLayout(Cause, kind="wrong-placement"):
    """An optimizer's state has a different layout than intended.

    The optimizer was made before sharding, or shards its states itself. States follow the parameter that the optimizer
    got, and nothing compares them with the model's.
    """

    why = (
        "The optimizer was made before sharding",
        "The optimizer has sharding rules of its own for its states",
    )
    how = (
        "make the optimizer after sharding",
        "expect the layout of this optimizer",
    )


class SameOptimizerFile(Cause, kind="identical-shards"):
    """Different shards of an optimizer's state hold bitwise the same values.

    Every rank loaded the optimizer file of one rank. The shapes fit, and training continues from wrong moments.
    """

    why = "Ranks loaded the same rank's optimizer file"
    how = "load each rank's own optimizer file (zero_pp_rank_*), with the number of ranks that saved it"


class StateNotLoaded(Cause):
    """An optimizer's state started from zeros, although the unsharded model's did not.

    The state was not loaded, or was loaded into tensors that the optimizer no longer uses. The optimizer then makes new
    states without a warning.
    """

    why = (
        "The state started from zeros: it was never loaded, and the unsharded model's was",
        "The load wrote into tensors that the optimizer doesn't use",
    )
    how = (
        "call torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with the optimizer of the sharded model"
    )


class StateInAnotherOrder(Cause):
    """A rank has the right elements of a state, in a different order than its weight.

    The weight was permuted, cut or flattened in one way and its state in a different way. Both have the same size,
    so the optimizer steps each element with a neighbor's moments.
    """

    why = (
        "The state was cut, joined or flattened in a different order than its weight",
        "The weight was permuted or transposed, and its state was not",
    )
    how = "give the state the same split, permutation and transposition as the weight"


class StateOfAnotherRank(Cause):
    """Ranks have the optimizer's state of another rank's part of the weight.

    The state was cut by a different coordinate or offset than the weight, or by none. It has the shape of every
    shard, so the optimizer accepts it.

    Attributes:
        is_one: Whether all ranks have the state of one part.
    """

    is_one: bool = False
    why = (
        "The code cuts the state, or chooses the file that has it, {is_one:?without the coordinate on the axis that "
        "splits its weight|by a different coordinate or offset than its weight}"
    )
    how = "cut or load the state like its weight: by mesh.get_local_rank() on the axis that splits the weight"


class UnexplainedState(Cause):
    """An optimizer's state differs from the unsharded model's after the step, by no known rule.

    All gradients of the step are right, so the difference was there before it or comes from the optimizer. A state of
    any content has the right shape.

    Attributes:
        along: The axes along which ranks should have the same state and don't, in words.
        begin: What the unsharded model's state started from in this step, `zeros`, if it was not loaded.
    """

    along: str = ""
    begin: str = ""
    why = (
        (
            "{along:?The gradients are right. The optimizer computes the state from what each rank along {along} has "
            "of its own: a part of the weight or of the gradient, or a weight that is not updated yet}"
        ),
        "{begin:?|The gradients are right. The state was loaded in a different order or for a different weight}",
        (
            "{along:?|The gradients are right. The sharded optimizer computes the state by a different rule or from "
            "different tensors}"
        ),
    )
    how = (
        "{along:?compute it from whole tensors (full_tensor()), or reduce it over {along} before it is kept}",
        (
            "{begin:?|call torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, or cut the state with "
            "distribute_tensor by the weight's placements}"
        ),
        "{along:?|compare the optimizer's class and options with the unsharded model's}",
    )


TO_LOAD = (
    "load the optimizer's state by parameter, with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, "
    "or in place with the optimizer's own load_state_dict"
)


class StateLostInLoad(Cause, kind="incomplete"):
    """The optimizer lacks a state after a load that it had when it was saved.

    Optimizers make missing states at the next step, from zero. Training goes on, with a bump in the loss at most.
    """

    why = (
        "The load skipped the optimizer's state",
        (
            "The saved state has no entry of this parameter: it was saved by number, under a different name, or by a "
            "different stage"
        ),
    )
    how = TO_LOAD


class SettingLostInLoad(Cause, kind="write-not-applied"):
    """A hyperparameter of the optimizer, or its step, is not the saved one after a load.

    The learning rate and the like are in param_groups, which a save of the states alone leaves out. The step is a
    number next to the moments, which a save of tensors alone leaves out.

    Attributes:
        is_step: Whether it is the number of steps.
    """

    is_step: bool
    why = (
        "{is_step:?The save leaves out the step, or the load keeps the old one, so bias correction starts again|The "
        "save leaves out the groups' hyperparameters}",
        "{is_step:?|The load keeps the hyperparameters that the optimizer was built with}",
    )
    how = (
        "{is_step:?save the whole state of each parameter, with its numbers, and load all of it}",
        "{is_step:?|save and load param_groups with the state; if the new run should set its own, leave 'setting' out "
        "of `of`}",
    )


class TieLostInLoad(Cause, kind="untied"):
    """Two names shared storage before a load and do not afterwards.

    assign=True and setattr replace a parameter under one of its names. Both have the same values until the next step.
    """

    why = "The load replaces one of the two tensors (assign=True, setattr), so they drift apart from now on"
    how = "load in place, or tie them again after the load, before the optimizer is made"


class ThawedByLoad(Cause):
    """A parameter is trained after a load and was frozen before, or the other way around.

    A new nn.Parameter has requires_grad=True, whatever parameter it replaces.
    """

    why = "The load puts a new nn.Parameter in its place, which always has requires_grad=True, or sets requires_grad"
    how = "load in place, or set requires_grad again after the load, before you make the optimizer"


class NameLostInLoad(Cause, kind="incomplete"):
    """The model lacks a tensor after a load that it had before.

    The load made a new model, or replaced a module, and the new one has different names.
    """

    why = "The load replaced the model by one without this tensor, or renamed it"
    how = "load into a model with the same modules"


class OrphanState(Cause, kind="foreign"):
    """The checkpoint has optimizer state of a parameter that the model in it does not have.

    States are found by the parameter's name. After a rename, or with a model and an optimizer of different saves, the
    load finds no match and the parameter starts with an empty state.
    """

    why = (
        "The model and its optimizer were saved at different times",
        "The parameter was renamed",
    )
    how = "save both from one state dict, with torch.distributed.checkpoint.state_dict.get_state_dict"


class MisshapenState(Cause, kind="wrong-shape"):
    """An optimizer's state does not have the shape of its parameter.

    A moment has one element for each element of its parameter. A local shard that is saved as if it were the whole
    tensor has fewer.
    """

    why = (
        "A rank's shard of the state was saved as the whole",
        "The state belongs to a different parameter",
    )
    how = "save the parameter and its state as DTensors"


class LostParamGroup(Cause, kind="incomplete"):
    """Parameters have optimizer state, and no parameter group of the checkpoint names them.

    A save that takes the states and only some of the groups loses settings. After the load these parameters train with
    the settings that the optimizer was built with.
    """

    why = "The save lost a group, with its learning rate and weight decay"
    how = "save all of optimizer.state_dict()['param_groups'], as get_state_dict does"


class PartialState(Cause, kind="incomplete"):
    """A parameter lacks one of the states that similar parameters have.

    Adam needs both moments and the number of steps. A conversion that copies only tensors leaves out the step, and the
    optimizer then makes a new one that starts at 0.
    """

    why = (
        "The save or a conversion left out a part of the state",
        "The state comes from a different checkpoint",
    )
    how = (
        "save the whole state of each parameter: torch.distributed.checkpoint.state_dict.get_state_dict",
        "copy all files of the checkpoint again, or convert it again",
    )


class AbsentState(Cause, kind="incomplete"):
    """A parameter group names a parameter whose optimizer state isn't in the checkpoint.

    Optimizers make the state of a parameter when it first has a gradient, so an unused parameter has none. If it was
    trained, a rank failed to save, and its moments restart from zero.
    """

    why = (
        "The parameter never had a gradient",
        "A rank did not save its states",
    )
    how = (
        "load with planner=DefaultLoadPlanner(allow_partial_load=True): torch.distributed.checkpoint.load otherwise "
        "raises Missing key for the state",
        "save the checkpoint again on every rank",
    )


class StatelessParameters(Cause, kind="incomplete"):
    """A checkpoint has no optimizer state of some parameters, and an earlier one does.

    torch's get_optimizer_state_dict and set_optimizer_state_dict leave out parameters that don't require gradients. A
    layer that is frozen before a load loses its moments in the next save. They restart from zero when it is thawed.

    Attributes:
        moved: Whether some of their weights changed between the two, so that they weren't frozen.
    """

    moved: bool
    why = (
        "{moved:?|They were frozen when the optimizer's state was loaded or saved, and torch drops the state of frozen "
        "parameters}",
        "The optimizer was made without them",
        "A rank or a conversion did not save their state",
    )
    how = (
        "load and save the optimizer's state before requires_grad_(False), or copy their state from the first",
        "make it with all parameters, and set lr=0 for those that it must not change",
        "save it again on every rank, or convert it again",
    )


class NotFiniteState(Cause):
    """An optimizer's moment has nan or infinite values.

    One gradient that was not finite is enough: a running mean keeps it forever. The weights may still be finite when
    the checkpoint is written.
    """

    why = (
        "A gradient was nan or infinite",
        "The save wrote memory that nothing had written to",
    )
    how = "resume from an earlier step; skip steps whose gradients are not finite"


class NegativeSquares(Cause):
    """A mean of squares has negative values.

    Squares cannot be negative, so these values belong to a different tensor: the first moment has the same shape and
    dtype, and no load notices the exchange.
    """

    why = (
        "The first and second moments changed places",
        "A different tensor was written here",
    )
    how = "compare with the checkpoint of the step before by `shardviz diff`; don't resume from this one"


class LostStepCounter(Cause):
    """The optimizer's step is 0 and its moments are not zero.

    Moments and step are separate entries of a state. Without the step, bias correction treats trained moments as if
    they were of the first step, and the updates after the load have a wrong size.
    """

    why = "A conversion, or a save that left it out, set the step counter back"
    how = "write the step of the moments into the counter: Adam divides by 1 - beta**step"


class EmptyMoments(Cause):
    """All moments of the optimizer are zero, although it has taken steps.

    A save that doesn't gather the moments writes the zeros that they were allocated with. The load succeeds, and
    training goes on as if the optimizer had never seen a gradient.
    """

    why = (
        "The save doesn't gather the moments, or they were not loaded before it",
        "No parameter had a gradient",
    )
    how = (
        "save them with torch.distributed.checkpoint.state_dict.get_state_dict",
        "check requires_grad, and that backward runs before step()",
    )


class LostMoments(Cause):
    """Moments of some weights of every layer are zero, although the optimizer has taken steps.

    A conversion that cuts a fused weight, or renames one, looks for its moments under the new names, doesn't find them
    and writes zeros. The step count stays, so the first updates of these weights are far too large or too small.
    """

    why = (
        "The moments were looked up under names that they don't have, because a weight was cut or renamed, and zeros "
        "took their place",
        "These weights had no gradient in any step",
    )
    how = (
        "cut and rename the moments as the weights, and raise if there are none; without moments, set step to 0",
        "check that the loss uses these weights, and that they aren't detached",
    )


class MixedStepFiles(Cause):
    """The optimizer's steps in one file differ from those in all other files.

    All ranks take the same number of steps. A file that was left in the folder, or copied, from an earlier save of the
    same job has the right shapes and the wrong step.
    """

    why = (
        "The file belongs to a different save",
        "A stage's training began later than the others'",
    )
    how = (
        "compare with another step's checkpoint by `shardviz diff`, which shows whether all differences are in this "
        "file"
    )
