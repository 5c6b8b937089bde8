"""Causes of foreign elements: unwritten memory, another tensor's values, weights not loaded."""

from __future__ import annotations

from shardviz.explain.placement.order import Disorder

NO_EFFECT = (
    "The load writes into a copy that is thrown away: .data of a temporary (to_local().data = x), full_tensor(), or "
    "t[index].copy_(x)"
)

WRITE = "write with param.to_local().copy_(x) under torch.no_grad()"


class OtherTensor(Disorder, kind="foreign"):
    """A tensor holds the elements of a different tensor of the model.

    A converter exchanged two names, or a module was renamed. If both tensors have one shape, load_state_dict accepts
    them.
    """

    may_be_copy: bool = False
    why = (
        "The loader, or a rename of modules, mixed up the names",
        "{may_be_copy:?Code filled the buffer with a weight on purpose, such as a moving average that starts there}",
    )
    how = (
        "load each tensor under its own name: compare the keys of the two state_dicts",
        (
            "{may_be_copy:?copy the weight in build() too, and give the probe a batch(): shardviz then compares both "
            "tensors before sharding}"
        ),
    )


class CopiedTensor(Disorder, kind="foreign"):
    """Tensors hold the elements of a different tensor, which has its own elements too.

    A sync receives every tensor in one buffer and keeps views of it until all have come, so each view has what came
    last. Or a loader reads one key for several names. Shapes agree, so nothing raises.

    Attributes:
        owner: The tensor whose elements they hold, or the layer that it is of if theirs is another one of its kind.
        several: Whether several tensors of an earlier place in the model hold them.
        layer: Their own layer; empty if the owner is a tensor.
    """

    owner: str
    several: bool = False
    layer: str = ""
    why = (
        (
            "{several:?All were received or read through one buffer, and {owner} was written there last: views of the "
            "buffer were copied after that}"
        ),
        "The loader reads {layer:?from {owner} for {layer}|{owner} for {several:?these names|this name}} too",
        (
            "{several:?|{layer:?Tensors of both layers|This tensor and {owner}} were read through one buffer, and "
            "{owner} was written there last}"
        ),
    )
    how = (
        "{several:?clone() what was received before the buffer is filled again}",
        "load each tensor under its own name: compare the keys of the two state_dicts",
        "{several:?|clone() what was received before the buffer is filled again}",
    )


class SharedMemory(Disorder, kind="foreign"):
    """Names share memory that don't in the unsharded model, so each holds what was written last.

    A sync that receives weights in buckets hands out views of one buffer, and fills the buffer again for the next
    bucket. Nothing raises, as views stay valid.
    """

    why = (
        "These names are views of one buffer that was filled again, so each holds what was written there last",
        "The code registers one tensor under several names",
    )
    how = (
        "clone() what stays in the model before the buffer is filled again",
        "give each name a tensor of its own",
    )


class RoundedIds(Disorder, kind="foreign"):
    """A tensor went through a narrower dtype and back after the model was built.

    `model.to(dtype)` casts buffers with the weights, and a cast back does not give back the bits that were lost. With
    angles or positions, errors grow along the sequence.

    Attributes:
        role: What the tensor is.
    """

    dtype: str
    role: str = "buffer"
    why = "The code casts the {role} to {dtype} and back after the model is built, so its values are rounded"
    how = "keep the {role} in its own dtype (model.to(dtype) casts buffers too), or compute it again after the cast"


class LocalNumbering(Disorder):
    """Ranks or stages number their own modules from 0: one name is several tensors.

    With local experts, for example, rank 1 calls expert 4 its expert 0. Each rank's state_dict is consistent, and a
    checkpoint that goes by names overwrites one rank's tensor with another rank's.

    Attributes:
        what: The numbered things: `modules`, `layers`, `experts`.
        is_saved: Whether a checkpoint has some of them several times.
    """

    what: str = "modules"
    is_saved: bool = False
    kinds = ("name-collision", "foreign")
    why = (
        "{is_saved:?Each rank counts its own {what} from 0, so some {what} were written several times and others "
        "never|Each rank numbers its own {what} from 0. A checkpoint goes by the name, keeps one rank's tensor and "
        "loses the others}"
    )
    how = (
        "{is_saved:?number {what} over all ranks|name {what} by their global number, or stack the experts into one "
        "tensor and shard it with Shard(0)}"
    )
    references = ("KempnerForge#202",)


class NoWeightLoaded(Disorder):
    """All weights are zero on all ranks: the load reached none of them.

    With strict=False, load_state_dict skips every key that it doesn't know, and a write into a temporary copy leaves
    the parameter as it was. Both return without an error.
    """

    kinds = ("foreign", "missing")
    why = (
        (
            "The weights were never loaded on any rank: the checkpoint's keys aren't this model's names (a prefix, for "
            "example), and strict=False skips them"
        ),
        NO_EFFECT,
    )
    how = (
        "correct the names that load_state_dict(...) returns as missing_keys",
        WRITE,
    )


class WeightNotLoaded(Disorder):
    """One weight is zero on all ranks, although other weights were loaded.

    The checkpoint has no key for it, or the load writes to a temporary copy of it. load_state_dict with strict=False
    reports that only in its return value. Or every rank gets it from a rank that does not have it.

    Attributes:
        op: The collective whose result every rank holds; empty if none was seen.
        places: The lines that call it, as `train.py:57`.
    """

    op: str = ""
    places: tuple[str, ...] = ()
    kinds = ("foreign", "missing")
    why = (
        (
            "{op:?{op} in {places} sends every rank zeros for this weight: src is a rank that doesn't have it, the "
            "owner of other weights|This weight was never loaded on any rank, and other weights were: the checkpoint "
            "has no such key, or the load skips it}"
        ),
        f"{{op:?|{NO_EFFECT}}}",
        (
            "{op:?|A broadcast or scatter sends this weight from a rank that doesn't have it: src is the owner of "
            "other weights}"
        ),
    )
    how = (
        (
            "{op:?in {places}, send each weight from the rank that owns it: src=owner_of(name)|look for its name in "
            "missing_keys and load it, or initialize it after to_empty}"
        ),
        WRITE,
        "send each weight from the rank that owns it: src=owner_of(name)",
    )


class PlaceholderLeft(Disorder, kind="foreign"):
    """A weight is one number on all ranks, although other weights have the model's elements.

    An engine fills its weights with a number before the first sync, and the sync skips some: a loop that sends buckets
    when they are full keeps the last bucket, or a filter leaves out a name. The number is a valid weight.
    """

    why = (
        (
            "Code filled this weight with one number, and nothing wrote the model's values to it: the load or sync "
            "skips the name, or never sends its last bucket"
        ),
        "Code replaces this weight by one number on purpose",
    )
    how = (
        "list the names that were written and compare them with the model's; send what is left after the loop",
        "build the model with that number too",
    )


class BufferNotWritten(Disorder):
    """A buffer is zero on all ranks: nothing filled it after it was allocated.

    to_empty allocates the buffers of a model again. Buffers with persistent=False are in no checkpoint, so a load
    neither fills them nor misses them.
    """

    kinds = ("foreign", "missing")
    why = "No rank wrote this buffer after to_empty, zeros_like or register_buffer allocated it"
    how = "compute or load it on every rank after to_empty; a buffer with persistent=False is in no checkpoint"


class ZerosAmongElements(Disorder):
    """Zeros stand among the elements of a shard, and no element of the tensor is lost.

    The zeros are padding that is still in the shard, or memory that a loader skipped. Zeros are valid numbers, so
    nothing raises.
    """

    kinds = ("foreign", "missing")
    why = (
        "The zeros are padding that is still in the shard",
        "No loader wrote to this memory",
    )
    how = (
        "cut the padding off before you label the shard",
        "write every element of the local shard",
    )


class PartNotWritten(Disorder):
    """A part of a shard is zero, and the elements that belong there are lost.

    The source tensor has fewer rows than the shard, for instance because the vocabulary was padded, or the loop that
    loads it ends early. A copy into a slice doesn't check that the rest is filled.
    """

    kinds = ("foreign", "missing")
    why = (
        "The tensor that the loader read has fewer rows than the shard",
        "The load stops before the end of the shard",
    )
    how = "compare the shape that you read with the local shard's shape on these ranks, and write every element"


class RanksNotWritten(Disorder):
    """The shards of some ranks are zero, and the other ranks have theirs.

    These ranks didn't read a file, or a condition on the rank skips the load. Each rank loads its own shard, so the
    others don't notice.
    """

    ranks: tuple[int, ...]
    kinds = ("foreign", "missing")
    why = (
        "The load never wrote the shards of {ranks:ranks}: a condition on the rank skips them, or a file was not read "
        "there"
    )
    how = "print the files that {ranks:ranks} {ranks:1?reads|read}, and remove conditions on the rank from the load"


class RewrittenAfterStamping(Disorder, kind="foreign"):
    """Shards, or some of their elements, hold values that are not from the stamped model.

    Sharding code draws, loads, computes or allocates parameters again, on all ranks or some. The shards have the right
    shape, any number is a valid weight, and nothing compares their content with the model before sharding.
    """

    why = (
        "Code loaded, drew or computed these values after the model was stamped",
        "torch.empty or to_empty allocated this memory, and it was never written",
    )
    how = "load or initialize this tensor on these ranks as on the others, after to_empty"


class AnotherCheckpoint(Disorder, kind="foreign"):
    """A weight's values are not in the checkpoint that it is compared with.

    The job loaded a different checkpoint, trained the weight since, or never loaded it. Or it loaded into a copy, as of
    FSDP's gathered weights, that was thrown away. A weight of any content has the right shape.
    """

    reference: str
    why = (
        (
            "The weight was never loaded, what was loaded did not stay, or it was loaded from a different checkpoint: "
            "its values are not in {reference}"
        ),
        "The weight was trained since",
    )
    how = (
        (
            "load this weight from {reference}, not into a copy, such as that of FSDP's "
            "summon_full_params(writeback=False), and after the last draw; or pass the checkpoint that the model was "
            "loaded from"
        ),
        "compare before the first step, or pass the checkpoint that was saved since",
    )


class LeftOutOfLoad(Disorder, kind="foreign"):
    """A weight has nothing of the checkpoint, from which other weights of the model were loaded.

    Its key has a name that the model doesn't know, and load_state_dict with strict=False skips it. The weight keeps its
    initial values. Or code writes to it after the load: it is drawn anew as a missing weight, or ranks that did not
    read it add their initial values. Or it was trained since, and the others are frozen.

    Attributes:
        reference: The checkpoint.
    """

    reference: str
    why = (
        ("The load left this weight out, or code wrote to it after the load: others have the values of {reference}"),
        "The weight was trained since, and the others are frozen",
        "The weight was loaded from a different checkpoint than the others",
    )
    how = (
        (
            "look for this weight in the missing_keys that load_state_dict(strict=False) returns, and for its key in "
            "unexpected_keys; then for what draws it or sums it over ranks after the load"
        ),
        "compare before the first step",
        "pass the checkpoint that has this weight",
    )


class KeyOfAWrapper(Disorder, kind="foreign"):
    """A load with strict=False skipped a weight: its key and its name differ by a few words.

    Most likely a wrapper (torch.compile, activation checkpointing, data parallel) was around the model when it was
    saved, or is now; or one side has a prefix such as `model.`. No parameter has that key as its name, so the weight
    keeps its initial values on all ranks, while others are loaded. load_state_dict only returns the key, in
    unexpected_keys, and the weight's name, in missing_keys.

    Attributes:
        words: The words that only one of the two has, with their dots.
        is_longer: Whether the key has them; else the parameter's name has.
        is_prefix: Whether they are in front of all others.
    """

    words: str
    is_longer: bool
    is_prefix: bool
    why = (
        "load_state_dict(strict=False) skipped this weight: its {is_longer:?key has {words!r} {is_prefix:?in front|in "
        "it}, the model's name doesn't|name in the model has {words!r} {is_prefix:?in front|in it}, its key doesn't}"
    )
    how = (
        "{is_longer:?take {words!r} out of the keys by key.{is_prefix:?removeprefix({words!r})|replace({words!r}, '')}|"
        "load before modules are wrapped, or put {words!r} {is_prefix:?before|into} the keys}, and load with "
        "strict=True"
    )


class LoadedIntoCopies(Disorder, kind="foreign"):
    """The job read a checkpoint into copies of the weights, and never set them.

    torch.distributed.checkpoint.load writes into the tensors that it is given. If they are clones, or tensors that
    get_model_state_dict gathered, nothing of the checkpoint reaches the model before set_model_state_dict is called.
    The weights keep their initial values. The step number is read, too, so the log looks like that of a job that goes
    on.
    """

    why = (
        "The job read the checkpoint into copies of the weights and never set them. The copies are gone, and the model "
        "keeps its initial values"
    )
    how = "call set_model_state_dict(model, weights) after checkpoint.load, or load into model.state_dict()"


class RanksNotLoaded(Disorder, kind="foreign"):
    """Some ranks have nothing of a weight that the other ranks loaded from the checkpoint.

    The load didn't run on these ranks, or something wrote to the weight afterwards. Each rank loads its own shard, so
    the others don't notice.
    """

    reference: str
    ranks: tuple[int, ...]
    why = (
        "The load skipped {ranks:ranks}, or code wrote to the weight afterwards: the other ranks have their part of "
        "{reference}"
    )
    how = "load this weight on {ranks:ranks} as on the others, and write to it later on all ranks or on none"


class LoadedOnOneRank(Disorder, kind="foreign"):
    """One rank has the loaded weights, and every other rank has values of its own.

    Rank 0 reads the checkpoint to save memory or bandwidth, and the broadcast to the other ranks is missing. They train
    from their random initialization without an error.
    """

    rank: int
    why = "Only rank {rank} loaded the weights, and it didn't send them to the others"
    how = "torch.distributed.broadcast every weight from rank {rank} before you shard it, or load it on every rank"


class NeverInitialized(Disorder, kind="foreign"):
    """A parameter still has what was in its memory when to_empty allocated it.

    to_empty leaves parameters uninitialized, and most init functions skip modules without reset_parameters. Old memory
    often contains plausible numbers, so the loss shows it late or never.
    """

    why = (
        "No reset_parameters, init function or checkpoint wrote these parameters after to_empty, which keeps whatever "
        "was in memory"
    )
    how = (
        "after to_empty, call reset_parameters of every module with its own parameters, or load a checkpoint that has "
        "the names"
    )


class BufferMadeAgain(Disorder, kind="unreplicated"):
    """A buffer is zero on some ranks, and whole on the others.

    A module that is built or materialized again on some ranks has new buffers, which nothing fills. Buffers are neither
    sharded nor synchronized, so each rank computes with its own.
    """

    rank: int
    why = (
        "These ranks allocated the buffer again (to_empty, zeros_like or a second build of the module) and never wrote "
        "it"
    )
    how = "compute or load it on every rank after to_empty, or torch.distributed.broadcast it from rank {rank}"


class RankDependentOrder(Disorder, kind="misordered"):
    """Some ranks hold a whole tensor in a different order than the other ranks.

    The code computes a permutation, a table of indices or a mask from the rank. The tensor is plain, so nothing
    compares its copies.
    """

    ranks: tuple[int, ...]
    why = (
        "The code that makes or changes this tensor depends on the rank, so {ranks:ranks} {ranks:1?holds|hold} a "
        "different order"
    )
    how = (
        "keep one order on every rank (torch.distributed.broadcast), and index it in forward if {ranks:ranks} should "
        "read a different order"
    )
