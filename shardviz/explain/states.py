"""Causes in optimizer states: master copies, moments of another rank, another order, or none."""

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
