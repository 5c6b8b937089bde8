"""Causes of labels that are wrong or not intended: global shapes, dtypes, placements and the plan's layouts."""

from __future__ import annotations

from shardviz.explain.order import Disorder
from shardviz.explain.splits import FUSED_QKV


class GuessedGlobalShape(Disorder):
    """A DTensor's global shape is the local shape times the ranks, and that is wrong.

    from_local computes the global shape if it is not given one. With uneven shards, or a local tensor that is the
    whole, the result is too large, and ranks may even disagree on it.

    Attributes:
        shape: The shape to give to from_local.
        stride: The stride to give to from_local.
        is_placed: Whether the elements are where the placements say, once the shape is right.
        disorder: What else is wrong with the elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_placed: bool = False
    disorder: Disorder | None = None
    kinds = ("wrong-shape",)
    why = "{disorder:?{disorder.cause}; }DTensor.from_local takes the local shape times the ranks for the global shape"
    how = (
        "give from_local shape={shape} and stride={stride}{disorder:?; {disorder.fix}|{is_placed:?|, or use "
        "distribute_tensor on the whole tensor}}"
    )


class PaddedAfterBuild(Disorder):
    """A tensor was padded between building the model and sharding it.

    Padding makes a vocabulary or a head count divisible. Weights that were saved before it, and the unsharded model,
    have the smaller shape.
    """

    built: tuple[int, ...]
    padded: tuple[int, ...]
    kinds = ("wrong-shape",)
    why = "It was padded from {built:list} to {padded:list} after the model was built"
    how = "pad in build(), before weights are stamped and saved in that shape, or cut the padding off"


class RankDependentDtype(Disorder):
    """Some ranks have a tensor in another dtype than most.

    A cast or a load depends on the rank. Sharding does not compare dtypes, and a collective with different dtypes
    hangs, fails or mixes up bytes, depending on the backend.
    """

    dtype: str
    kinds = ("wrong-shape",)
    why = "The tensor was cast, or loaded, by a rule that depends on the rank"
    how = "cast to torch.{dtype} on every rank before the model is sharded"


class RankDependentPlacements(Disorder):
    """Ranks of one mesh disagree on the placements of a tensor.

    Code chose the placements by the rank, or ran on some ranks only. DTensor takes each rank's word, so collectives do
    not match.
    """

    kinds = ("wrong-placement",)
    why = "The placements were chosen by a rule that depends on the rank"
    how = "give every rank of the mesh the same placements"


class AnotherChunking(Disorder):
    """Local shapes are not those that the placements give.

    Shard cuts as torch.chunk does: full chunks first and the remainder last. Shards that were cut by another rule
    have other sizes, and from_local does not compare them.
    """

    kinds = ("wrong-shape", "wrong-placement")
    why = "The shards were cut by another rule than torch.chunk, which gives full chunks first and the remainder last"
    how = "cut the shards with torch.chunk or distribute_tensor"


class FusedWeightSplit(Disorder):
    """A fused weight was split as one dim, but the model reads a part of each segment.

    ColwiseParallel and FSDP2 know nothing of segments, so a rank gets all rows of q and half of k, for example. The
    label is right and the shapes are right; forward then takes the rows for something else.

    Attributes:
        num_segments: How many segments the dim has.
        placements: The placements that split each segment; empty if FSDP2 splits the dim too.
        under_fsdp: The layout to expect if FSDP2 splits what is left to a rank.
    """

    num_segments: int
    placements: str = ""
    under_fsdp: str = ""
    kinds = ("wrong-segment",)
    why = (
        "The dim was split as a whole, across the segments that the model reads, as ColwiseParallel does a fused weight"
    )
    how = (
        "give each of the {num_segments} segments a Linear of its own, or put the rows in rank order before they are "
        "split{placements:?, or use distribute_tensor(weight, mesh, {placements}) and not ColwiseParallel|; FSDP2 "
        "splits what is left to a rank as one: expect {under_fsdp}}"
    )
    references = FUSED_QKV


class Unintended(Disorder, abstract=True):
    """A tensor whose layout is consistent, and not the intended one.

    Attributes:
        held: The layout that it has.
        placements: The placements that would make it as intended; empty if torch has none for that layout.
    """

    held: str
    placements: str


class OmittedByPlan(Unintended):
    """Every rank has the whole tensor, which was meant to be split.

    The plan's entry for it does not match its name, or its module is in no group that is sharded. Results stay right,
    so only the memory shows it.
    """

    kinds = ("wrong-placement",)
    why = "Nothing splits this tensor: no entry of the plan matches its name, or the module was left out"
    how = "split it{placements:?, by {placements}| by hand}, or expect {held}"


class SplitAgainstIntent(Unintended):
    """The tensor is split, but every rank was meant to have all of it.

    A pattern of the plan matches more names than its author thought of. Each rank then computes with a part.
    """

    kinds = ("wrong-placement",)
    why = "The plan shards this tensor, and its author expects all of it on every rank"
    how = "keep it whole{placements:?, by {placements}| by hand}, or expect {held}"


class AnotherPlan(Disorder):
    """The tensor is split, in another way than intended.

    The plan names another dim or another axis than the layout that is expected. The label and the elements agree with
    each other, so nothing raises.

    Attributes:
        held: The layout that it has.
        placements: The placements that would make it as intended; empty if torch has none.
        is_planned: Whether it is a plan, of which nothing ran yet.
    """

    held: str
    placements: str = ""
    is_planned: bool = False
    kinds = ("wrong-placement",)
    why = "The plan shards this tensor in another way than its author expects"
    how = (
        "{is_planned:?change how it is parallelized|split it{placements:?, by {placements}| by hand}}, or expect {held}"
    )


class UnevenPlan(Disorder):
    """A rank of a plan would hold another shape than its placements give.

    torch pads or rounds some uneven splits differently from what the label says, and code that splits by hand does as
    it likes.
    """

    kinds = ("wrong-shape",)
    why = "torch does not split it there as its placements say, or somebody split it by hand"
    how = "choose sizes that divide evenly, or split it over fewer axes"
