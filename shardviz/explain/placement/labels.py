"""Causes of wrong or unintended labels: global shapes, dtypes, placements, planned layouts."""

from __future__ import annotations

from shardviz.explain.placement.order import Disorder
from shardviz.explain.placement.splits import FUSED_QKV


class GuessedGlobalShape(Disorder, kind="wrong-shape"):
    """A DTensor's global shape is the local shape times the ranks, and that is wrong.

    from_local computes the global shape if the caller passes none. With uneven shards, or a local tensor that is the
    whole, the result is too large, and ranks may even disagree on it.

    Attributes:
        shape: The shape to pass to from_local.
        stride: The stride to pass to from_local.
        is_placed: Whether the elements match the placements once the shape is right.
        disorder: What else is wrong with the elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_placed: bool = False
    disorder: Disorder | None = None
    why = (
        "{disorder:?{disorder.cause}. }DTensor.from_local guesses the global shape: the local shape times the number "
        "of ranks"
    )
    how = (
        "pass shape={shape} and stride={stride} to from_local{disorder:?; {disorder.fix}|{is_placed:?|, or call "
        "distribute_tensor on the whole tensor}}"
    )


class ShardedOverDifferent(Disorder, kind="wrong-shape"):
    """FSDP shards a parameter over ranks that hold different ones, such as their own experts.

    fully_shard assumes that a plain parameter is the same tensor on all ranks of its mesh. Each rank keeps a shard
    of its own tensor, and a gather joins pieces of different tensors.
    """

    axes: tuple[str, ...]
    why = (
        "Ranks along {axes} have different parts of the weight, such as their own experts, and fully_shard gathers "
        "shards of different parts as one weight"
    )
    how = "pass fully_shard a mesh without {axes}, or make the parts one DTensor over {axes} before fully_shard"


class PaddedAfterBuild(Disorder, kind="wrong-shape"):
    """A tensor was padded between building the model and sharding it.

    Padding makes a vocabulary or a head count divisible. The unsharded model, and weights that were saved before the
    padding, have the smaller shape.
    """

    built: tuple[int, ...]
    padded: tuple[int, ...]
    why = "The code pads the tensor from {built:list} to {padded:list} after it builds the model"
    how = "pad in build(), before weights are stamped and saved in that shape, or cut the padding off"


class RankDependentDtype(Disorder, kind="wrong-shape"):
    """Some ranks have a tensor in a different dtype than most ranks.

    A cast or a load depends on the rank. Sharding doesn't compare dtypes, and a collective with different dtypes hangs,
    fails or mixes up bytes, depending on the backend.
    """

    dtype: str
    why = "The code casts or loads the tensor by a rule that depends on the rank"
    how = "cast to torch.{dtype} on every rank before the model is sharded"


class RankDependentPlacements(Disorder, kind="wrong-placement"):
    """Ranks of one mesh disagree on the placements of a tensor.

    Code chose the placements by the rank, or ran on some ranks only. DTensor believes each rank's placements, so
    collectives don't match.
    """

    why = "The code chooses the placements by a rule that depends on the rank"
    how = "pass the same placements on every rank of the mesh"


class AnotherChunking(Disorder):
    """Local shapes are not those that the placements give.

    Shard cuts as torch.chunk does: full chunks first and the remainder last. Shards that were cut by a different rule
    have other sizes, and from_local doesn't compare them.
    """

    kinds = ("wrong-shape", "wrong-placement")
    why = (
        "The code cuts the shards by a different rule than torch.chunk, which gives full chunks first and the "
        "remainder last"
    )
    how = "cut the shards with torch.chunk or distribute_tensor"


class FusedWeightSplit(Disorder, kind="wrong-segment"):
    """A fused weight was split as one dim, but the model reads a part of each segment.

    ColwiseParallel and FSDP2 know nothing of segments, so a rank gets all rows of q and half of k, for example. The
    label is right and the shapes are right; forward then reads the rows as a different segment.

    Attributes:
        placements: The placements that split each segment; empty if FSDP2 splits the dim too.
        under_fsdp: The layout to expect if FSDP2 splits each rank's part.
    """

    num_segments: int
    placements: str = ""
    under_fsdp: str = ""
    why = (
        "The code splits the dim as a whole, across the segments that the model reads; ColwiseParallel does this to a "
        "fused weight"
    )
    how = (
        "give each of the {num_segments} segments a Linear of its own, or put the rows in rank order "
        "first{placements:?, or call distribute_tensor(weight, mesh, {placements})|; FSDP2 splits each rank's rows as "
        "one stretch: expect {under_fsdp}}"
    )
    references = FUSED_QKV


class Unintended(Disorder, listed=False, kind="wrong-placement"):
    """A tensor whose layout is consistent, but isn't the intended one.

    Attributes:
        held: The layout of the tensor.
        placements: The placements that give the intended layout; empty if torch has none.
    """

    held: str
    placements: str = ""


class OmittedByPlan(Unintended):
    """Every rank has the whole tensor, which was meant to be split.

    The plan's entry doesn't match the tensor's name, or no sharded group has its module. Results stay right, so only
    the memory shows it.
    """

    why = "No entry of the plan matches the tensor's name, or no sharded group has its module"
    how = "split it{placements:?, by {placements}| by hand}, or expect {held}"


class SplitAgainstIntent(Unintended):
    """The tensor is split, but every rank was meant to have all of it.

    A pattern of the plan matches more names than its author thought of. Each rank then computes with a part.
    """

    why = "The plan shards this tensor, and `expect` wants all of it on every rank"
    how = "keep it whole{placements:?, by {placements}| by hand}, or expect {held}"


class AnotherPlan(Unintended):
    """The tensor is split in a different way than intended.

    The plan names a different dim or axis than the expected layout. The label and the elements agree with each other,
    so nothing raises.

    Attributes:
        is_planned: Whether it is a plan, so nothing ran yet.
    """

    is_planned: bool = False
    why = "The plan shards this tensor in a different way than `expect` says"
    how = (
        "{is_planned:?change how it is parallelized|split it{placements:?, by {placements}| by hand}}, or expect {held}"
    )


class UnevenPlan(Disorder, kind="wrong-shape"):
    """A rank of a plan would hold a different shape than its placements give.

    torch pads or rounds some uneven splits differently from what the label says, and code that splits by hand follows
    rules of its own.
    """

    why = (
        "torch splits this tensor differently than its placements say",
        "Code splits this tensor by hand, differently than its placements say",
    )
    how = "choose sizes that divide evenly, or split it over fewer axes"
