"""Causes in the model's own values: copies that differ, shards that repeat, ties that broke, writes that were lost."""

from __future__ import annotations

from shardviz.explain.cause import Cause

OF_REPLICAS = ("OLMo-core#319", "composer#2812")


class RankDependentSeed(Cause):
    """Replicas of a weight start with different values.

    Each replica drew its weights with its own seed, or loaded a file of its own. Data parallelism averages gradients
    and never weights, so the replicas stay different while the loss falls.
    """

    axes: tuple[str, ...]

    kinds = ("unreplicated",)
    why = (
        "Each replica drew or loaded its own values, by a seed or a file that depends on the rank, and nothing makes "
        "them agree: gradients are averaged, weights are not"
    )
    how = (
        "give all ranks {axes:?along {axes} |}one seed before the weights are drawn, or torch.distributed.broadcast "
        "the weights from the first of these ranks before training"
    )
    references = OF_REPLICAS


class UnsynchronizedBuffer(Cause):
    """A buffer has different values on ranks that should have copies of it.

    FSDP2 and tensor parallel leave buffers as each rank made them. A table that is drawn, or statistics that are
    updated, then differ from rank to rank.
    """

    axes: tuple[str, ...]

    kinds = ("unreplicated",)
    why = "Buffers are neither sharded nor synchronized: each rank computes with its own"
    how = (
        "torch.distributed.broadcast it {axes:?along {axes}|on all ranks} once it is made, or give all ranks one seed "
        "before"
    )
    references = ("LlamaFactory#10820",)


class PlainAmongShards(Cause):
    """A plain parameter of a sharded model has different values on each rank.

    What fully_shard ignores stays an ordinary tensor. No broadcast makes its copies equal and no reduction touches
    its gradient, so each rank trains its own.
    """

    axes: tuple[str, ...]

    kinds = ("unreplicated",)
    why = (
        "It is a plain tensor beside sharded ones, as FSDP's ignored_params are, and what no fully_shard takes: "
        "nothing broadcasts it and nothing reduces its gradient, so each rank keeps its own values"
    )
    how = (
        "where ranks should have copies, torch.distributed.broadcast it {axes:?along {axes}|on all ranks} before "
        "training and all_reduce its gradient; where each should have its own, make it a DTensor that is split{axes:? "
        "over {axes}}: of plain copies a checkpoint keeps one"
    )


class ShardedOnSomeRanks(Cause):
    """A tensor is a DTensor on some ranks and a plain tensor on the others.

    The code that shards it ran under a condition on the rank. Each rank computes with what it has, and their values
    are no longer copies.
    """

    sharded: tuple[int, ...]
    plain: tuple[int, ...]
    kinds = ("unreplicated",)
    why = (
        "It is a DTensor on {sharded:ranks} and a plain tensor on {plain:ranks}: what shards it ran on some ranks only"
    )
    how = "shard it on all ranks alike (distribute_tensor, parallelize_module, fully_shard), or on none"


class FirstRankAlone(Cause):
    """The first ranks that have a part hold other values than all other copies of it.

    Rank 0 reads the checkpoint or has another seed, and the broadcast to the other ranks is missing. Copies are never
    compared in training.

    Attributes:
        odd: These ranks, in words.
    """

    odd: str
    kinds = ("unreplicated",)
    why = (
        "Only {odd} loaded, drew or changed it, as where the first rank reads a checkpoint or has another seed, and "
        "nothing sent it on"
    )
    how = "torch.distributed.broadcast it from {odd} to the ranks with the same part, or load it on every rank"
    references = OF_REPLICAS


class OddRanksAlone(Cause):
    """A few ranks hold other values than all other copies of a tensor.

    Something runs or is read on these ranks only: a seed, a branch, a file of that machine, or a broadcast that leaves
    them out. Copies are never compared in training.

    Attributes:
        odd: These ranks, in words.
    """

    odd: str
    kinds = ("unreplicated",)
    why = (
        "All other copies agree, so {odd} alone loaded, drew or changed it: another seed there, code that runs only "
        "there, another file on that machine, or a broadcast without it"
    )
    how = (
        "look for what runs or is read only on {odd}, and the random state there; torch.distributed.broadcast from a "
        "rank that has the same part and agrees with the others makes the copies equal"
    )
    references = OF_REPLICAS


class RepeatedDraw(Cause):
    """Different shards of a weight hold bitwise the same values.

    Each rank initialized its local shard with the seed that all ranks share. The weight then repeats one shard, which
    makes features identical; shapes and statistics look normal.

    Attributes:
        along: The axes along which shards repeat, in words.
        is_on_cpu: Whether CPUs hold them: there torch does not give each shard its own stream.
    """

    along: str
    is_on_cpu: bool
    kinds = ("identical-shards",)
    why = (
        "Every rank drew its own shard, with one seed on all of them, or all of them loaded the same shard; where "
        "parts of the weight are meant to start alike, as experts that are copied from one network, it is right"
    )
    how = (
        "{is_on_cpu:?draw the weights before they are sharded, or seed each rank by its coordinate along {along}: on "
        "CPUs torch draws every shard from one stream|initialize the DTensors themselves, not their local tensors, "
        "after torch.manual_seed: each shard then has its own stream; or seed each rank by its coordinate along "
        "{along}}; or load the file or the slice of the rank's own coordinate"
    )
    references = ("OLMo-core#307", "torchtitan#3106")


class BrokenTie(Cause):
    """Two names that shared one storage, or should share it, are two tensors after sharding.

    Sharding, materializing or copying modules one by one gives each name its own parameter. They start equal and drift
    apart, as each gets a part of the gradient.

    Attributes:
        tensor: The name that follows, or several of them.
        tied_to: The name whose storage it should share.
        was_tied: Whether the unsharded model has the tie; else a test asserts it.
    """

    tensor: str
    tied_to: str
    was_tied: bool = True
    kinds = ("untied",)
    why = (
        "{was_tied:?Something gave|They were never tied; or they were, and then something gave} the names parameters "
        "of their own: sharding or to_empty() module by module, load_state_dict(assign=True), a copy of one module"
    )
    how = (
        "tie them{was_tied:? again} after the model is sharded, under one layout{was_tied:?, or shard the module that "
        "owns both as one unit}: model.{is_one:?{tensor}|NAME} = model.{tied_to}{is_one:?|, for each NAME of {tensor}}"
    )
    references = ("foundation-model-stack#331",)

    @property
    def is_one(self) -> bool:
        """Whether it is one name: one assignment to several names would unpack a tensor."""
        return not any(sign in self.tensor for sign in ", [")


class LostWrite(Cause):
    """An in-place write to a tensor does not change what is read from it.

    Some views and tensor subclasses copy into a temporary. The call returns normally, and the tensor keeps its old
    values.
    """

    kinds = ("write-not-applied",)
    why = "The tensor is a view or a subclass whose copy_ writes elsewhere than its elements are read from"
    how = "load through the parameter that owns the memory, or make the tensor contiguous before it is filled"
