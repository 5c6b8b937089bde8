"""Causes of shards on the wrong ranks: a loader that chose another rank's shard, or parts that overlap or are lost."""

from __future__ import annotations

from shardviz.explain.order import Disorder, usually


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
