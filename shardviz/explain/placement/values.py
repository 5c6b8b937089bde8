"""Causes in the model's values: differing copies, repeated shards, broken ties, lost writes."""

from __future__ import annotations

from shardviz.explain.cause import Cause

OF_REPLICAS = ("OLMo-core#319", "composer#2812")


class RankDependentSeed(Cause, kind="unreplicated"):
    """Replicas of a weight start with different values.

    Each replica drew its weights with its own seed, or loaded a file of its own. Data parallelism averages gradients
    and never weights, so the replicas stay different while the loss falls.
    """

    axes: tuple[str, ...]

    why = "Each replica draws from a seed that depends on the rank, or loads its own file"
    how = (
        "set one seed on all ranks{axes:? along {axes}} before you draw the weights, or torch.distributed.broadcast "
        "them from one rank, as DDP does unless init_sync=False"
    )
    references = OF_REPLICAS


class RoundedCopies(Cause, kind="unreplicated"):
    """Some replicas hold a weight rounded to a narrower dtype, and others hold it as it was.

    A sync casts what it sends. The sender keeps its own values, or some ranks load a file of a narrower dtype, and the
    replicas differ by a rounding from then on.
    """

    dtype: str
    why = (
        "Some replicas hold this weight rounded to {dtype}, the others hold it as it was: a sender casts what it sends "
        "and keeps its own values",
        "Some ranks load a copy of the checkpoint in {dtype}",
    )
    how = (
        "copy what is sent into the sender's weights too, or send it in the weights' own dtype",
        "load one checkpoint on all ranks",
    )


class UnsynchronizedBuffer(Cause, kind="unreplicated"):
    """A buffer has different values on ranks that should have copies of it.

    FSDP2, tensor parallel and DeepSpeed leave buffers as each rank made them. A table that is drawn, or statistics
    that are updated, then differ from rank to rank.
    """

    axes: tuple[str, ...]

    why = (
        "Nothing makes this buffer equal on all ranks: FSDP2, tensor parallel and DeepSpeed leave buffers as each rank "
        "made them"
    )
    how = (
        "torch.distributed.broadcast it {axes:?along {axes}|on all ranks} after it is made, or set one seed on all "
        "ranks first"
    )
    references = ("LlamaFactory#10820",)


class PlainAmongShards(Cause, kind="unreplicated"):
    """A plain parameter of a sharded model has different values on each rank.

    A parameter that fully_shard ignores stays an ordinary tensor. No broadcast makes its copies equal and no reduction
    touches its gradient, so each rank trains its own.
    """

    axes: tuple[str, ...]

    why = "fully_shard leaves this parameter plain (ignored_params), so nothing broadcasts it or reduces its gradient"
    how = (
        "torch.distributed.broadcast it {axes:?along {axes}|on all ranks} before training and all_reduce its gradient, "
        "or, if values should differ, make it a split DTensor{axes:? over {axes}}"
    )


class ShardedOnSomeRanks(Cause, kind="unreplicated"):
    """A tensor is a DTensor on some ranks and a plain tensor on the others.

    The code that shards it ran under a condition on the rank. Each rank computes with its own form of the tensor, and
    their values are no longer copies.
    """

    sharded: tuple[int, ...]
    plain: tuple[int, ...]
    why = (
        "The code that shards this tensor ran on some ranks only: it is a DTensor on {sharded:ranks} and a plain "
        "tensor on {plain:ranks}"
    )
    how = "shard it on all ranks (distribute_tensor, parallelize_module or fully_shard), or on none"


class FirstRankAlone(Cause, kind="unreplicated"):
    """The first ranks of a part hold different values than all other copies of it.

    Rank 0 reads the checkpoint or has a different seed, and the broadcast to the other ranks is missing. Copies are
    never compared in training.

    Attributes:
        odd: These ranks, in words.
    """

    odd: str
    why = "Only {odd} reads a checkpoint or has a different seed, and nothing sends the values to the other ranks"
    how = "torch.distributed.broadcast it from there to the ranks with the same part, or load it on every rank"
    references = OF_REPLICAS


class OddRanksAlone(Cause, kind="unreplicated"):
    """A few ranks hold different values than all other copies of a tensor.

    Something runs, or is read, on these ranks only: a seed, a branch, a file of that machine, or a broadcast that
    leaves them out. Training never compares copies.

    Attributes:
        odd: These ranks, in words.
    """

    odd: str
    why = (
        "Only {odd} used a different seed, file or branch of the code: all other copies agree",
        "A broadcast leaves out these ranks",
    )
    how = (
        "look for code, files and random state that only these ranks use",
        "torch.distributed.broadcast it from a rank that agrees with the others",
    )
    references = OF_REPLICAS


class RepeatedDraw(Cause, kind="identical-shards"):
    """Different shards of a weight hold bitwise the same values.

    Each rank initialized its local shard with the seed that all ranks share. The weight then repeats one shard, which
    makes features identical; shapes and statistics look normal.

    Attributes:
        along: The axes along which shards repeat, in words.
        is_on_cpu: Whether CPUs hold the shards: on CPUs torch doesn't give each shard its own stream.
    """

    along: str
    is_on_cpu: bool
    why = (
        "Every rank drew its own shard with one seed",
        "All ranks loaded the same shard",
        "The parts start alike on purpose, such as experts copied from one network",
    )
    how = (
        (
            "{is_on_cpu:?draw the weights before you shard them, or seed each rank by its coordinate along "
            "{along}|initialize the DTensors, not their local tensors, after torch.manual_seed, or seed each rank by "
            "its coordinate along {along}}"
        ),
        "load each rank's own slice along {along}",
        "leave the weight as it is",
    )
    references = ("OLMo-core#307", "torchtitan#3106")


class BrokenTie(Cause, kind="untied"):
    """Two names that shared one storage, or should share it, are two tensors after sharding.

    A shard, to_empty or copy of modules one by one gives each name its own parameter. They start equal and drift apart,
    as each gets a part of the gradient.

    Attributes:
        tensor: The name that follows, or several of them.
        tied_to: The name whose storage it should share.
        was_tied: Whether the unsharded model has the tie; if not, a test asserts it.
    """

    tensor: str
    tied_to: str
    was_tied: bool = True
    why = (
        "Sharding of one module after the other, to_empty(), load_state_dict(assign=True), or a copy of a module "
        "broke the tie{was_tied:?|, or the names were never tied}"
    )
    how = (
        "tie them{was_tied:? again} after the model is sharded: model.{is_one:?{tensor}|NAME} = model.{tied_to}"
        "{is_one:?|, for each NAME of {tensor}}; with FSDP2 tie them before, and give both modules to one "
        "fully_shard([...])"
    )
    references = ("foundation-model-stack#331",)

    @property
    def is_one(self) -> bool:
        """Whether it is one name: one assignment to several names would unpack a tensor."""
        return not any(sign in self.tensor for sign in ", [")


class LostWrite(Cause, kind="write-not-applied"):
    """An in-place write to a tensor does not change what is read from it.

    Some views and tensor subclasses copy into a temporary. The call returns normally, and the tensor keeps its old
    values.
    """

    why = "The tensor is a view or a subclass, and its copy_ writes elsewhere than reads come from"
    how = "load through the parameter that owns the memory, or call .contiguous() on the tensor before you fill it"
