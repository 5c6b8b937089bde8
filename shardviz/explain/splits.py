"""Causes of shards that are split in another way than their placements say, or chosen by the wrong coordinate."""

from __future__ import annotations

from shardviz.explain.order import SWIGLU, Disorder, usually

FSDP_OVER_TP = ("pytorch#129229", "pytorch#129206", "pytorch#130760")
FUSED_QKV = ("Automodel#1324", "pytorch#140069", "DeepSpeed#3844")


class Mislabel(Disorder, abstract=True):
    """A tensor that is split in a way that other placements would say.

    Attributes:
        placements: The placements that say what is held, in torch's spelling.
    """

    placements: str


class AnotherOrder(Mislabel):
    """Several axes split one dim, and not in the order that the placements say.

    Splitting over tp and then over fsdp gives each rank other rows than the other way around. The shards have equal
    shapes in both orders, so nothing raises until rows are gathered.
    """

    why = (
        "One library split the dim over the inner axis first and another split each part again, while the placements "
        "read as if the axes had been applied left to right: FSDP2 over tensor parallel before torch 2.5 did so"
    )
    how = "upgrade torch to 2.5 or newer, or label the local tensors by {placements}"
    references = FSDP_OVER_TP


class CutInnerFirst(Mislabel):
    """Several axes split one dim, the inner axis first, but the placements say left to right.

    Code that cuts shards by hand often counts ranks with the outer axis fastest. Shard(0), Shard(0) means the opposite
    order. Both give shards of equal shapes, so from_local accepts either.
    """

    why = (
        "The shards were cut over the inner axis first, as FSDP2 over tensor parallel does or a number that counts the "
        "outer axis fastest, while the placements, written by hand, read as if the axes had been applied left to right"
    )
    how = (
        "label the local tensors by {placements}, which fully_shard writes itself, or cut each shard by its "
        "placements, as distribute_tensor does"
    )
    references = FSDP_OVER_TP


class Flattened(Disorder):
    """The shards of a flattened axis are numbered in another way than flattening counts.

    A flattened axis numbers its ranks with the last of its axes fastest. A loader that counts the first one fastest
    takes another rank's shard, which has the same shape.
    """

    number: str
    why = (
        "The shard was chosen by a number that was computed from the coordinates on the axes that were flattened, and "
        "not as flattening counts them: the last axis fastest"
    )
    how = "choose the shard by get_local_rank() of the flattened mesh itself, or by {number}"


class MeshOrder(Mislabel):
    """The placements say that the inner axis split first, but the mesh's first axis did.

    FSDP2 over tensor parallel labels its shards with _StridedShard. A loader that cuts by the global rank, or a
    checkpoint from another mesh, knows nothing of that label. All shards have equal shapes.
    """

    why = (
        "The parts were cut, read or put together by the rank's number, the mesh's first axis first, while the "
        "placements are those of FSDP2 over tensor parallel, which split the dim over the inner axis first: a "
        "checkpoint of a job on another mesh, or weight.chunk(world_size)[rank]"
    )
    how = (
        "cut each shard by its placements, as distribute_tensor and torch.distributed.checkpoint do, or label the "
        "local tensors by {placements}"
    )


class Segments(Mislabel):
    """Each segment of a fused weight was split, but the placements say one split of the dim.

    A rank then holds a part of q, of k and of v, as its attention needs. Whoever gathers by the placements puts these
    parts together as if each rank had one stretch of rows.
    """

    why = "A fused weight (q,k,v or gate/up) was split segment by segment, but labeled as one dim"
    how = "label the local tensors by {placements}, or split the dim as a whole"
    references = SWIGLU


class SegmentsUnderFsdp(Disorder):
    """FSDP2 split the local part of a fused weight, in a way that no placements can say.

    Tensor parallel splits a fused weight segment by segment, and fully_shard then cuts each rank's rows as one block.
    The label has room for one factor only, so torch reads the label as another order.
    """

    free_dims: tuple[int, ...]
    why = (
        "FSDP2 splits what each rank has of a fused weight (q,k,v or gate/up) as one stretch. No placements say that: "
        "its label has one split_factor for the ranks and one for the segments, which torch reads as another order"
    )
    how = (
        "{free_dims:?let FSDP2 split another dim (fully_shard(..., shard_placement_fn=lambda param: "
        "Shard({free_dims[0]}))), or }give each segment a Linear of its own"
    )
    references = FUSED_QKV


class UnequalSegments(Disorder):
    """Segments of different sizes were each split, but the placements say one split.

    With grouped-query attention, k and v have fewer rows than q. No placements say how such a weight is split, so it
    is labeled with plain Shard, whose shards have the same shapes.
    """

    why = (
        "A fused weight whose segments differ in size (q,k,v with fewer key and value heads) was split segment by "
        "segment, but labeled as one dim; no placements say such a split"
    )
    how = (
        "give each segment a Linear of its own, or treat the weight as stored in rank order: full_tensor() needs its "
        "rows put back"
    )
    references = SWIGLU


class AcrossSegments(Mislabel):
    """The placements say that each segment was split, but the dim was split as a whole.

    A rank then holds all of q and some of k, for example, where it should have a part of each. The number of rows is
    the same in both cases.
    """

    why = "The placements say that the dim was split segment by segment, but it was split as a whole"
    how = "label the local tensors by {placements}, or split each segment with torch.chunk by itself"
    references = FUSED_QKV


class OneFactor(Disorder):
    """The label has one split factor for several splits, and some of them are uneven.

    _StridedShard multiplies the sizes of all axes that split the dim before FSDP2. The product describes the shards
    exactly only if every size divides the dim.
    """

    why = (
        "FSDP2 splits a dim that several axes split unevenly before it; its label has one split_factor for all of "
        "them, which says the same only where every size divides"
    )
    how = "make the dim divide by all axes but the last (pad it), or split it over one axis besides fsdp"


class AnotherDim(Mislabel):
    """The tensor was split on another dim than its placements name.

    Row-wise and column-wise layers were confused, or the weight is stored transposed. If both dims have the same size,
    the shapes differ only if somebody compares them with the label.
    """

    kinds = usually("wrong-shape")
    why = (
        "The tensor was split on another dim than its placements name, as when ColwiseParallel and RowwiseParallel "
        "are confused or the weight is stored transposed"
    )
    how = "label the local tensors by {placements}, or split the dim that the placements name"


class Replicated(Mislabel):
    """Every rank has the whole tensor, but the placements say that each has a shard.

    from_local takes any local tensor as the shard that the placements name. The global shape that it computes is too
    large by the number of ranks.
    """

    kinds = usually("wrong-placement")
    why = "The whole tensor was given to DTensor.from_local where a shard was wanted"
    how = "label the local tensors by {placements}, or use distribute_tensor, which cuts the shards itself"


class Split(Mislabel):
    """Each rank has its own shard, but the placements say that all have equal copies.

    from_local with Replicate() does not compare the local tensors. Every operation then runs on different shards as
    if they were one tensor.
    """

    kinds = usually("wrong-placement")
    why = "Local shards were given to DTensor.from_local with Replicate(), which does not look at them"
    how = "label the local tensors by {placements}"


class RoundRobin(Mislabel):
    """Rows were dealt out to ranks in turn, but the placements say one stretch a rank.

    weight[rank::size] gives as many rows as torch.chunk does. Shapes agree, and only gathering shows the other order.
    """

    why = (
        "The dim was dealt out in turn, as by weight[rank::size], or segment by segment, where Shard means one stretch"
    )
    how = "choose the shard by torch.chunk, or label the local tensors by {placements}"


class AnotherAxis(Mislabel):
    """The tensor is split over another axis of the mesh than its placements name.

    If both axes have the same size, the shards have the shape that the label gives. Ranks along the right axis then
    hold equal parts, and ranks along the wrong one different parts.
    """

    axis: str
    kinds = usually("wrong-placement")
    why = (
        "The shard was chosen by the coordinate on another axis than the one that the placements name: the axes were "
        "confused, or the coordinate was computed from the global rank"
    )
    how = "choose the shard by mesh.get_local_rank({axis!r}), or label the local tensors by {placements}"


class AnotherLayout(Mislabel):
    """The tensor is split in another way than its placements say.

    The label was kept from before a tensor was split again, or was written for another layout. Nothing compares a
    label with the elements.
    """

    kinds = usually("wrong-placement")
    why = "The tensor was split in another way than its placements say"
    how = "label the local tensors by {placements}, or redistribute after labeling"


class HeadTail(Disorder):
    """Each rank has a chunk from the start of the dim and its mirror image from the end.

    Context parallel orders a sequence this way to balance causal attention. The label says plain Shard, so gathering
    gives the sequence in this order.
    """

    why = (
        "The dim is in the head-tail order that balances causal attention in context parallel, but is labeled as if "
        "it were in its own order"
    )
    how = (
        "undo the order before anything reads the dim by placement: context_parallel_unshard does, by the load "
        "balancer's restore indices"
    )


class Balanced(Disorder):
    """The dim was cut as evenly as possible, but Shard means full chunks first.

    numpy.array_split and tensor_split cut ten rows on four ranks into 3, 3, 2, 2; torch.chunk cuts 3, 3, 3, 1. The
    two agree whenever the size divides, so the difference shows on odd sizes only.
    """

    kinds = usually("wrong-shape")
    why = (
        "The dim was split as evenly as possible (numpy.array_split, tensor_split), where Shard means torch.chunk: "
        "full chunks first, the remainder last"
    )
    how = "split with torch.chunk, or pad the dim to a multiple of the axis"


class SameShard(Disorder):
    """Every rank along an axis loads the same shard.

    The loader does not use the rank's coordinate on the axis. All shards have the right shape, so nothing raises: some
    elements exist many times, and the others on no rank.
    """

    axes: tuple[str, ...]
    kinds = usually("duplicated")
    why = (
        "The loader chose the shard without the rank's coordinate on the axis: a tp_rank left at its default, or one "
        "file that all ranks read"
    )
    how = "choose the shard by {axes:each or|mesh.get_local_rank({each!r})}"
    references = ("vllm-gguf-plugin#103",)


class RepeatedShards(Disorder):
    """Several ranks share one shard, by a rule of their number, and other shards are on no rank.

    A coordinate was divided or wrapped, for instance by the number of ranks of another job, or ranks that share a file
    read it from its start. Every shard that is read is valid, so nothing raises.
    """

    coordinate: str
    kinds = usually("duplicated")
    why = (
        "Several ranks read the same part: the shard was chosen by less than the whole coordinate, as where a "
        "file that several ranks share is read from its start, or the coordinate was divided or wrapped by the number "
        "of ranks of another job"
    )
    how = (
        "choose the shard by {coordinate}, undivided; read a file with the shards of several ranks at each rank's own "
        "offset"
    )


class SharedShards(Disorder):
    """A few ranks hold the shard of a neighbor, and all others hold their own.

    An index like min(i, n - 1), a list that is one entry short, or a file that was copied under two names gives two
    ranks one shard. It has the right shape, so nothing raises.
    """

    kinds = usually("duplicated")
    why = (
        "A few ranks read another rank's part: an index that was clamped or is off by one at its end, a part that was "
        "saved or copied under several names"
    )
    how = (
        "look for how these ranks choose what they read (min(), a last index, a list of files), and compare the files "
        "of both"
    )


class ExchangedRanks(Disorder):
    """A few ranks hold shards of other ranks, and all others hold their own.

    Two entries of a list of hosts or of files were exchanged. All shards are there, with the right shapes, so only
    gathering shows it. If the files of the other ranks were not read, it can also be a copy.

    Attributes:
        is_unread: Whether the ranks whose shards they hold were not read.
    """

    is_unread: bool = False
    why = (
        "A few ranks have {is_unread:?the parts of ranks that were not read|each other's parts}: files or hosts were "
        "exchanged, or entries of a list of files or hosts{is_unread:?, or a part was copied under several names}"
    )
    how = (
        "look for the list or the file names by which these ranks find their parts{is_unread:?, and check again with "
        "the files of all ranks}"
    )


class Reversed(Disorder):
    """Ranks hold shards in falling order: the first rank along an axis has the last shard.

    A loader that counts from the end, or a mesh that was built from falling ranks, chooses the mirrored shard. Equal
    shards fit everywhere.
    """

    axis: str
    why = "The loader counts the coordinate from the other end, or the mesh was built from ranks in falling order"
    how = "choose the shard by mesh.get_local_rank({axis!r}), and build the mesh by init_device_mesh"


class Rotated(Disorder):
    """Every rank holds the shard of a rank a fixed number of positions further along an axis.

    A ring exchange that stops one step early or late leaves shards with a neighbor, and so does an offset in the
    coordinate. Equal shards fit everywhere.
    """

    axis: str
    why = "Shards were sent on to a neighbor, as in a ring, or the coordinate has an offset"
    how = "choose the shard by mesh.get_local_rank({axis!r})"


class GlobalRank(Disorder):
    """The global rank chooses the shard, although the tensor is split over one axis of the mesh.

    On a mesh of one axis both numbers are the same, so the code works there. On a larger mesh the global rank modulo
    the size, or divided by it, is the coordinate on some other axis.
    """

    axis: str
    why = "The shard was chosen by the global rank, where the coordinate on one axis of the mesh was meant"
    how = "choose the shard by mesh.get_local_rank({axis!r}), not by torch.distributed.get_rank()"


class PermutedRanks(Disorder):
    """Ranks hold each other's shards: the loader numbers them in another order than the mesh.

    A DeviceMesh may list ranks in any order, and a loader that goes by the global rank ignores it. All shards are
    there, with the right shapes, so only gathering shows it.
    """

    why = "The loader numbers the ranks in another order than the mesh, as with a DeviceMesh whose ranks are not rising"
    how = "choose the shard by mesh.get_coordinate(), not by the global rank, or build the mesh by init_device_mesh"


class CutByHand(Disorder):
    """Parts that ranks cut from a plain tensor overlap, have padding or leave elements out.

    A start or an end is computed with rounding, with a halo or without counting the padding, or an integer division
    gives every rank size // ranks rows and nobody takes the rest. Each part is a valid slice, so nothing raises.

    Attributes:
        fault: What is wrong with the parts: `overlap`, `remainder` or `padding`.
    """

    fault: str
    kinds = ("missing", "duplicated")
    why = (
        "{fault:overlap?Ranks cut overlapping parts|{fault:padding?Padding stands where a part of the tensor belongs: "
        "a rank's first or last index is off|The remainder of dividing the size by the ranks was dropped, or a part "
        "was never loaded}}"
    )
    how = (
        "cut the {fault:padding?padded }tensor with torch.chunk, by mesh.get_coordinate(): its last parts are smaller, "
        "and none is left over"
    )
