"""Causes of foreign elements: memory that nothing wrote to, another tensor's values, weights that were not loaded."""

from __future__ import annotations

from shardviz.explain.order import Disorder

THROWN_AWAY = (
    "the load wrote into something that is thrown away: .data of a temporary (to_local().data = x), the copy that "
    "full_tensor() gathers, an indexed copy (t[index].copy_(x))"
)

WRITE = "write by param.to_local().copy_(x) under torch.no_grad()"


class OtherTensor(Disorder):
    """A tensor holds the elements of another tensor of the model.

    Two names were exchanged by a converter, or a module was renamed. If both tensors have one shape, load_state_dict
    accepts them.
    """

    may_be_copy: bool = False
    kinds = ("foreign",)
    why = (
        "The names were mixed up where the weights were loaded or the modules were renamed{may_be_copy:?, or the "
        "buffer was filled with a weight on purpose}"
    )
    how = (
        "load each tensor under its own name; compare the keys of the two state_dicts{may_be_copy:?; if it is meant to "
        "be a copy, as an average of the weights is at first, copy it in build() too, and give the probe a batch(): "
        "what both were before sharding is then compared}"
    )


class LocalNumbering(Disorder):
    """Ranks or stages number their own modules from 0: one name is several tensors.

    With local experts, for example, rank 1 calls expert 4 its expert 0. Each rank's state_dict is consistent, and a
    checkpoint that goes by names overwrites one rank's tensor by another's.

    Attributes:
        what: What is numbered: `modules`, `layers`, `experts`.
        is_saved: Whether a checkpoint has some of them several times.
    """

    what: str = "modules"
    is_saved: bool = False
    kinds = ("name-collision", "foreign")
    why = (
        "{is_saved:?Some {what} were written several times and others not at all, as if ranks counted their own from "
        "0|Each rank numbers its own {what} from 0, as with local experts: a checkpoint goes by the name, keeps one "
        "rank's tensor and loses those of the others}"
    )
    how = (
        "{is_saved:?number {what} over all ranks|name {what} by their global number, or stack the experts into one "
        "tensor and shard it with Shard(0)}"
    )
    references = ("KempnerForge#202",)


class NoWeightLoaded(Disorder):
    """All weights are zero on all ranks: the load reached none of them.

    With strict=False, load_state_dict skips every key that it does not know, and writing into a temporary copy leaves
    the parameter as it was. Both return without an error.
    """

    kinds = ("foreign", "missing")
    why = (
        "The weights were never written on any rank, none of the model: the keys of the checkpoint are not the names "
        f"of this model (a prefix, with strict=False), or {THROWN_AWAY}"
    )
    how = (
        "print what load_state_dict returns: where missing_keys lists the weights, mend the names; where it does not, "
        f"{WRITE}"
    )


class WeightNotLoaded(Disorder):
    """One weight is zero on all ranks, although other weights were loaded.

    The checkpoint has no key for it, or the load writes to a temporary copy of it. load_state_dict with strict=False
    reports that only in its return value.
    """

    kinds = ("foreign", "missing")
    why = (
        "It was never written on any rank, where other weights were: the checkpoint has no such key, the load passes "
        f"over it, or {THROWN_AWAY}"
    )
    how = (
        f"look for its name in missing_keys and in the checkpoint; load it and {WRITE}, or initialize it once the "
        "model is materialized (to_empty)"
    )


class BufferNotWritten(Disorder):
    """A buffer is zero on all ranks: nothing filled it after it was allocated.

    Materializing a model by to_empty allocates its buffers again. Those with persistent=False are in no checkpoint, so
    a load does not fill them and does not miss them.
    """

    kinds = ("foreign", "missing")
    why = (
        "It was never written on any rank: its memory is as to_empty, zeros_like or register_buffer made it, and "
        "nothing loads it or computes it again"
    )
    how = (
        "compute or load it on every rank once the model is materialized; a buffer with persistent=False is in no "
        "checkpoint"
    )


class ZerosAmongElements(Disorder):
    """Zeros stand among the elements of a shard, and no element of the tensor is lost.

    They are padding that is still in the shard, or memory that a loader skipped. Zeros are valid numbers, so nothing
    raises.
    """

    kinds = ("foreign", "missing")
    why = "The elements are padding, or memory that no loader wrote to"
    how = "write every element of the local shard, and cut padding off before it is labeled"


class PartNotWritten(Disorder):
    """A part of a shard is zero, and the elements that belong there are lost.

    The tensor that was read has fewer rows than the shard, for instance because the vocabulary was padded, or the loop
    that loads it ends early. Copying into a slice does not check that the rest is filled.
    """

    kinds = ("foreign", "missing")
    why = (
        "A part of the shard was never written: what was read has fewer rows than the shard, or the load stops before "
        "its end"
    )
    how = "compare the shape that is read with the local shard's on these ranks, and write every element of it"


class RanksNotWritten(Disorder):
    """The shards of some ranks are zero, and the other ranks have theirs.

    On these ranks a file was not read, or a condition on the rank skips the load. Each rank loads for itself, so the
    others do not notice.
    """

    ranks: tuple[int, ...]
    kinds = ("foreign", "missing")
    why = (
        "The shards of {ranks:ranks} were never written, where the other ranks' were: a file was not read there, or "
        "the load ends early"
    )
    how = "look at which files are read on {ranks:ranks}, and at conditions on the rank in the load"


class RewrittenAfterStamping(Disorder):
    """Shards, or some of their elements, hold values that are not from the stamped model.

    Sharding code draws, loads, computes or allocates parameters again, on all ranks or some. The shards have the right
    shape, any number is a valid weight, and nobody compares their content with the model that was sharded.
    """

    kinds = ("foreign",)
    why = (
        "These values were loaded, drawn or computed after the model was stamped, or never written (torch.empty, "
        "to_empty)"
    )
    how = "load or initialize this tensor on these ranks as on the others, once it is materialized"


class AnotherCheckpoint(Disorder):
    """A weight's values are not in the checkpoint that it is compared with.

    The job loaded another checkpoint, trained the weight since, or never loaded it. A weight of any content has the
    right shape.
    """

    reference: str
    kinds = ("foreign",)
    why = (
        "These values are not in {reference}: the weight was loaded from another checkpoint, was trained since, or "
        "was never loaded"
    )
    how = "pass the checkpoint that the model was loaded from, or load this weight from {reference}"


class RanksNotLoaded(Disorder):
    """Some ranks have nothing of a weight that the other ranks loaded from the checkpoint.

    The load did not run on these ranks, or something wrote to the weight afterwards. Each rank loads for itself, so
    the others do not notice.
    """

    reference: str
    ranks: tuple[int, ...]
    kinds = ("foreign",)
    why = (
        "Other ranks have their part of what is in {reference}, and nothing of it is on {ranks:ranks}: the weight was "
        "not loaded there, or was written afterwards"
    )
    how = "load or initialize this weight on {ranks:ranks} as on the others, and write to it on all ranks or on none"


class LoadedOnOneRank(Disorder):
    """One rank has the loaded weights, and every other rank has values of its own.

    Rank 0 reads the checkpoint to save memory or bandwidth, and the broadcast to the other ranks is missing. They
    train from their random initialization without an error.
    """

    rank: int
    kinds = ("foreign",)
    why = (
        "Only rank {rank} has the weights that it was to load, the others values of their own: it loaded or drew "
        "them alone and did not send them"
    )
    how = "torch.distributed.broadcast every weight from rank {rank} before it is sharded, or load it on every rank"


class NeverInitialized(Disorder):
    """A parameter still has what was in its memory when to_empty allocated it.

    to_empty leaves parameters uninitialized, and modules without reset_parameters are skipped by most init functions.
    Old memory often contains plausible numbers, so the loss shows it late or never.
    """

    kinds = ("foreign",)
    why = (
        "to_empty allocates memory and leaves in it what was there; no reset_parameters, init function or loaded "
        "checkpoint has reached these parameters since"
    )
    how = (
        "initialize it after to_empty: call reset_parameters of every module that has parameters of its own, or load a "
        "checkpoint that has its name"
    )


class BufferMadeAgain(Disorder):
    """A buffer is zero on some ranks, and whole on the others.

    A module that is built or materialized again on some ranks has new buffers, which nothing fills. Buffers are
    neither sharded nor synchronized, so each rank computes with its own.
    """

    rank: int
    kinds = ("unreplicated",)
    why = (
        "The buffer was made again there (to_empty, zeros_like, a module built again) and never written: buffers "
        "are neither sharded nor synchronized, and one with persistent=False is in no checkpoint"
    )
    how = (
        "compute or load it on every rank once the model is materialized, or torch.distributed.broadcast it from "
        "rank {rank}"
    )


class RankDependentOrder(Disorder):
    """Some ranks hold a whole tensor in another order than the other ranks.

    A permutation, a table of indices or a mask is computed from the rank. The tensor is plain, so nothing compares its
    copies.
    """

    ranks: tuple[int, ...]
    kinds = ("misordered",)
    why = "The copies were not made by the same code: what made or changed these depends on the rank"
    how = (
        "make it alike on every rank, or torch.distributed.broadcast it; if {ranks:ranks} should read it in another "
        "order, keep one order in the tensor and index it in forward: a checkpoint keeps one copy for all"
    )
