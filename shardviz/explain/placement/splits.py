"""Causes of shards that are split unlike their placements, or by the wrong coordinate."""

from __future__ import annotations

from shardviz.explain.placement.order import SWIGLU, Disorder, usual_first

FSDP_OVER_TP = ("pytorch#129229", "pytorch#129206", "pytorch#130760")
FUSED_QKV = ("Automodel#1324", "pytorch#140069", "DeepSpeed#3844")


class Mislabel(Disorder, listed=False):
    """A tensor that is split as different placements would say.

    Attributes:
        placements: The placements that describe the local shards, in torch's spelling.
    """

    placements: str


class AnotherOrder(Mislabel):
    """Several axes split one dim, and not in the order that the placements say.

    A split over tp and then over fsdp gives each rank different rows than the reverse order. The shards have equal
    shapes in both orders, so nothing raises until rows are gathered.
    """

    why = (
        "FSDP2 over tensor parallel in torch before 2.5 splits the dim over the inner axis first, and labels it left "
        "to right"
    )
    how = "upgrade torch to 2.5 or newer, or label the local tensors by {placements}"
    references = FSDP_OVER_TP


class CutInnerFirst(Mislabel):
    """Several axes split one dim, the inner axis first, but the placements say left to right.

    Code that cuts shards by hand often counts ranks with the outer axis fastest. Shard(0), Shard(0) means the opposite
    order. Both give shards of equal shapes, so from_local accepts either.
    """

    why = (
        "The code cuts over the inner axis first (FSDP2 over tensor parallel does this too), and its handwritten "
        "placements say left to right"
    )
    how = "label the local tensors by {placements}, as fully_shard does, or cut each shard with distribute_tensor"
    references = FSDP_OVER_TP


class Flattened(Disorder):
    """The shards of a flattened axis are numbered in a different order than flattening counts.

    A flattened axis numbers its ranks with the last of its axes fastest. A loader that counts the first axis fastest
    takes another rank's shard, which has the same shape.
    """

    number: str
    why = "Flattening counts the last axis fastest, and the loader counts a different axis fastest"
    how = "choose the shard by get_local_rank() of the flattened mesh, or by {number}"


class MeshOrder(Mislabel):
    """The placements say that the inner axis split first, but the mesh's first axis did.

    FSDP2 over tensor parallel labels its shards with _StridedShard. A loader that cuts by the global rank, or a
    checkpoint from another mesh, knows nothing of that label. All shards have equal shapes.
    """

    why = (
        (
            "The loader cuts over the mesh's first axis first (weight.chunk(world_size)[rank]), and the placements say "
            "inner axis first"
        ),
        "The shards come from the checkpoint of a job on a different mesh",
    )
    how = (
        "cut each shard with distribute_tensor or torch.distributed.checkpoint, or label the local tensors by "
        "{placements}"
    )


class Segments(Mislabel):
    """Each segment of a fused weight was split, but the placements say one split of the dim.

    A rank then holds a part of q, of k and of v, as its attention needs. A gather by the placements joins these parts
    as if each rank had one stretch of rows. If every split weight has this order, ranks were given every other part
    of a finer split, such as the files of more ranks.

    Attributes:
        expect: The layout to expect in a probe if rows are meant to be in this order; empty if there is none.
        of_all: Whether every split weight has this order, not the fused ones alone.
    """

    expect: str = ""
    of_all: bool = False
    why = (
        "{of_all:?Every split weight has this order, so no fused weight is to blame: parts of a finer split, such as "
        "the files of more ranks, were dealt out in turn (parts[rank::size])|The code splits a fused weight (q/k/v or "
        "gate/up) segment by segment, and labels it as one dim}"
    )
    how = (
        "{of_all:?give each rank neighboring parts: parts[rank * each:(rank + 1) * each]; or |}label the local tensors "
        "by {placements}{of_all:?|, or {expect:?give each segment a Linear of its own; in a probe in which this order "
        "is meant, expect {expect!r}|split the dim as a whole}}"
    )
    references = SWIGLU


class SegmentsUnderFsdp(Disorder):
    """FSDP2 splits the local part of a fused weight in a way that no placements can say.

    Tensor parallel splits a fused weight segment by segment, and fully_shard then cuts each rank's rows as one block.
    The label has room for one factor only, so torch reads the label as a different order.

    Attributes:
        expect: The layout to expect in a probe if rows are meant to be in this order; empty if there is none.
    """

    expect: str = ""
    why = (
        "FSDP2 cuts each rank's rows of a fused weight (q/k/v or gate/up) as one stretch. Its label has one "
        "split_factor, and the weight needs two"
    )
    how = "give each segment a Linear of its own{expect:?; if this order is meant, expect it in the probe: {expect!r}}"
    references = FUSED_QKV


class UnequalSegments(Disorder):
    """Segments of different sizes were each split, but the placements say one split.

    With grouped-query attention, k and v have fewer rows than q. No placements say how such a weight is split, so it is
    labeled with plain Shard, whose shards have the same shapes.
    """

    why = (
        "The code splits a fused weight (q, and k and v with fewer heads) segment by segment, and no placements can "
        "say that"
    )
    how = "give each segment a Linear of its own, or reorder the rows of full_tensor(), which are in rank order"
    references = SWIGLU


class AcrossSegments(Mislabel):
    """The placements say that each segment was split, but the dim was split as a whole.

    A rank then holds all of q and some of k, for example, but needs a part of each. The number of rows is the same in
    both cases.
    """

    why = "The placements say that the dim was split segment by segment, but it was split as a whole"
    how = "label the local tensors by {placements}, or split each segment with torch.chunk"
    references = FUSED_QKV


class OneFactor(Disorder):
    """The label has one split factor for several splits, and some of them are uneven.

    _StridedShard multiplies the sizes of all axes that split the dim before FSDP2. The product describes the shards
    exactly only if every size divides the dim.
    """

    why = (
        "Several axes split the dim before FSDP2, some unevenly. FSDP2's label has one split_factor for all of them, "
        "which fits only even splits"
    )
    how = "pad the dim until all axes but the last divide it, or split it over fsdp and one other axis"


class AnotherDim(Mislabel):
    """The tensor was split on a different dim than its placements name.

    Row-wise and column-wise layers were confused, or the weight is stored transposed. If both dims have the same size,
    the shapes are right too.
    """

    kinds = usual_first("wrong-shape")
    why = (
        "The code splits a different dim than the placements name: ColwiseParallel and RowwiseParallel are confused",
        "The weight is stored transposed",
    )
    how = "label the local tensors by {placements}, or split the dim that the placements name"


class Replicated(Mislabel):
    """Every rank has the whole tensor, but the placements say that each has a shard.

    from_local takes any local tensor as the shard that the placements name. The global shape that it computes is too
    large by the number of ranks.
    """

    kinds = usual_first("wrong-placement")
    why = "The code passes the whole tensor to DTensor.from_local, which takes it for one shard"
    how = "label the local tensors by {placements}, or use distribute_tensor, which cuts the shards"


class Split(Mislabel):
    """Each rank has its own shard, but the placements say that all have equal copies.

    from_local with Replicate() doesn't compare the local tensors. Every operation then runs on different shards as if
    they were one tensor.
    """

    kinds = usual_first("wrong-placement")
    why = "The code passes local shards to DTensor.from_local with Replicate(), which doesn't compare them"
    how = "label the local tensors by {placements}"


class RoundRobin(Mislabel):
    """Rows were dealt out to ranks in turn, but the placements say one stretch per rank.

    weight[rank::size] gives as many rows as torch.chunk does. Shapes agree, and only gathering shows the other order.
    """

    why = (
        "The code deals the rows out in turn (weight[rank::size]) or segment by segment, but Shard means one stretch "
        "per rank"
    )
    how = "choose the shard with torch.chunk, or label the local tensors by {placements}"


class AnotherAxis(Mislabel):
    """The tensor is split over a different axis of the mesh than its placements name.

    If both axes have the same size, the shards have the shape that the label gives. Ranks along the labeled axis then
    hold equal parts, and ranks along the other axis hold different parts.
    """

    axis: str
    kinds = usual_first("wrong-placement")
    why = (
        "The loader chooses the shard by the coordinate on the wrong axis, or computes this coordinate from the global "
        "rank"
    )
    how = "choose the shard by mesh.get_local_rank({axis!r}), or label the local tensors by {placements}"


class AnotherLayout(Mislabel):
    """The tensor is split in a different way than its placements say.

    The label dates from before a second split, or was written for a different layout. Nothing compares a label with the
    elements.
    """

    kinds = usual_first("wrong-placement")
    why = "The tensor was split in a different way than its placements say"
    how = "label the local tensors by {placements}, or redistribute after labeling"


class HeadTail(Disorder):
    """Each rank has a chunk from the start of the dim and its mirror image from the end.

    Context parallel orders a sequence this way to balance causal attention. The label says plain Shard, so a gather
    gives the sequence in this order.
    """

    why = (
        "Context parallel put the dim into head-tail order to balance causal attention, and the label says plain Shard"
    )
    how = (
        "call context_parallel_unshard, or index by the load balancer's restore indices, before anything gathers the "
        "dim"
    )


class Balanced(Disorder):
    """The dim was cut as evenly as possible, but Shard means full chunks first.

    numpy.array_split and tensor_split cut ten rows on four ranks into 3, 3, 2, 2; torch.chunk cuts 3, 3, 3, 1. The two
    agree whenever the size divides, so the difference shows on odd sizes only.
    """

    kinds = usual_first("wrong-shape")
    why = "The code splits with numpy.array_split or tensor_split, but Shard means torch.chunk: full chunks first"
    how = "split with torch.chunk, or pad the dim to a multiple of the axis"


class SameShard(Disorder):
    """Every rank along an axis takes the same shard.

    The code that cuts or loads it doesn't use the rank's coordinate on the axis. All shards have the right shape, so
    nothing raises: some elements exist many times, and others on no rank.
    """

    axes: tuple[str, ...]
    kinds = usual_first("duplicated")
    why = (
        "The code that cuts or loads a rank's part ignores its coordinate on {axes}: a tp_rank is left at its "
        "default, or all ranks read one file"
    )
    how = "choose the shard by {axes:each or|mesh.get_local_rank({each!r})}"
    references = ("vllm-gguf-plugin#103",)


class RepeatedShards(Disorder):
    """Several ranks share one shard, by a rule of their number, and other shards are on no rank.

    The loader divided or wrapped a coordinate, for instance by the number of ranks of an earlier job, or ranks that
    share a file read it from its start. Every shard that is read is valid, so nothing raises.
    """

    coordinate: str
    kinds = usual_first("duplicated")
    why = (
        "The loader divides or wraps the coordinate, so several ranks read the same part",
        "Several ranks share a file, and each reads it from the start",
    )
    how = (
        "choose the shard by {coordinate}, undivided",
        "read the file at each rank's own offset",
    )


class SharedShards(Disorder):
    """A few ranks hold the shard of a neighbor, and all others hold their own.

    An index like min(i, n - 1), a list that is one entry short, or a file that was copied under two names gives two
    ranks one shard. It has the right shape, so nothing raises.
    """

    kinds = usual_first("duplicated")
    why = (
        "Most likely an index was clamped (min(i, n - 1)) or is off by one at its end",
        "A save or a copy wrote one part under several names",
    )
    how = (
        "correct the index by which these ranks choose what they read",
        "compare the files that these ranks read, and write the wrong file again",
    )


class ExchangedRanks(Disorder):
    """A few ranks hold shards of other ranks, and all others hold their own.

    Two entries of a list of hosts or of files changed places. All shards are there, with the right shapes, so only a
    gather shows it. If the files of the other ranks were not read, a shard can also be a copy.

    Attributes:
        is_unread: Whether the ranks whose shards they hold were not read.
    """

    is_unread: bool = False
    why = (
        (
            "Two files or hosts, or two entries in a list of them, changed places{is_unread:?: a few ranks have the "
            "parts of ranks that were not read}"
        ),
        "{is_unread:?A save or a copy wrote one part under several names}",
    )
    how = (
        "correct the list or the file names by which these ranks find their parts",
        "{is_unread:?check again with the files of all ranks}",
    )


class Reversed(Disorder):
    """Ranks hold shards in descending order: the first rank along an axis has the last shard.

    A loader that counts from the end, or a mesh that was built from ranks in descending order, chooses the mirrored
    shard. Equal shards fit everywhere.
    """

    axis: str
    why = (
        "The loader counts the coordinate from the other end",
        "The mesh lists its ranks in descending order",
    )
    how = (
        "choose the shard by mesh.get_local_rank({axis!r})",
        "build the mesh with init_device_mesh",
    )


class Rotated(Disorder):
    """Every rank holds the shard of a rank a fixed number of positions further along an axis.

    A ring exchange that stops one step early or late leaves shards with a neighbor, and so does an offset in the
    coordinate. Equal shards fit everywhere.
    """

    axis: str
    why = (
        "A ring exchange sent the shards on to a neighbor once too often or too rarely",
        "The loader adds an offset to the coordinate",
    )
    how = "choose the shard by mesh.get_local_rank({axis!r})"


class GlobalRank(Disorder):
    """The global rank chooses the shard, although the tensor is split over one axis of the mesh.

    On a mesh of one axis both numbers are the same, so the code works there. On a larger mesh the global rank modulo
    the size, or divided by it, is the coordinate on some other axis.
    """

    axis: str
    why = "The loader chooses the shard by the global rank instead of the coordinate on {axis}"
    how = "choose the shard by mesh.get_local_rank({axis!r}), not by torch.distributed.get_rank()"


class PermutedRanks(Disorder):
    """Ranks hold each other's shards: loader and mesh number the ranks in different orders.

    A DeviceMesh may list ranks in any order, and a loader that goes by the global rank ignores it. All shards are
    there, with the right shapes, so only a gather shows it.
    """

    why = "The loader numbers the ranks in a different order than the mesh"
    how = "choose the shard by mesh.get_coordinate(), or build the mesh with init_device_mesh"


class CutByHand(Disorder):
    """Parts that ranks cut from a plain tensor overlap, have padding or leave elements out.

    The code computes a start or an end with rounding, with a halo or without the padding, or an integer division gives
    every rank size // ranks rows and no rank takes the rest. Each part is a valid slice, so nothing raises.

    Attributes:
        fault: What is wrong with the parts: `overlap`, `remainder` or `padding`.
    """

    fault: str
    kinds = ("missing", "duplicated")
    why = (
        "{fault:overlap?The ranks cut overlapping parts|{fault:padding?A rank's first or last index is off, so padding "
        "stands in the place of elements|The code drops the remainder of size // ranks, or a rank never loaded its "
        "part}}"
    )
    how = (
        "cut the {fault:padding?padded }tensor with torch.chunk, by mesh.get_coordinate(): the last parts are smaller, "
        "and no element is left over"
    )
