"""A saved tensor as the job would hold it: in the job's dtype, part by part, hashed.

If a map makes the checkpoint's tensors of the job's, they are put back: `qkv = cat(q, k, v)` gives q its part of qkv,
`q = split(qkv, 3, 0)` gives qkv a part of itself. Nothing is read before it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.live_job.job import JobTensor
from shardviz.checkpoint.maps.functions import FUNCTIONS
from shardviz.checkpoint.maps.mapped_tensors import Op, leaves, parts_of
from shardviz.checkpoint.records import StoredTensor
from shardviz.dump.arrays import hash_of, hash_of_bytes
from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.relate.casts import cast
from shardviz.relate.values import part_of
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.equality import Turn
    from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, Node
    from shardviz.checkpoint.records import Entry, Tensor
    from shardviz.layout.region import Region


class Reader:
    """Reads parts of a tensor and hashes them as a dump does; no part is read twice.

    Attributes:
        dtype: The dtype to which it is cast.
        shape: The shape in which parts are counted.
        read_bytes: Bytes that were read and hashed so far.
    """

    def __init__(
        self, saved: Entry, dtype: str, shape: tuple[int, ...], turn: Turn | None = None, through: str = ""
    ) -> None:
        """Read nothing yet.

        Args:
            dtype: The dtype of the job.
            shape: The shape in which parts are counted.
            turn: What is done to the whole before, such as a transposition.
            through: A type to which the values are rounded on the way; empty if they are not.
        """
        self.entry, self.dtype, self.shape = saved, dtype, shape
        self.read_bytes = 0
        self._turn = turn
        self._steps = (saved.dtype, through, dtype) if through else (saved.dtype, dtype)
        self._whole: NDArray[Any] | None = None
        self._known: dict[Region, str] = {}

    def bits(self, region: Region) -> NDArray[Any]:
        """Return the bits of a part.

        Raises:
            DumpError: They cannot be read, or not be cast.
        """
        if self._turn is None and isinstance(self.entry, StoredTensor) and self.entry.shape == self.shape:
            content = self.entry.read(region)
        else:
            if self._whole is None:
                whole = self.entry.bits if self._turn is None else self._turn(self.entry.bits)
                self._whole = whole.reshape(self.shape)
            content = part_of(self._whole, region)
        for dtype, to in pairwise(self._steps):
            there = cast(content, dtype, to)
            if there is None:
                raise DumpError(f"it is {self.dtype} and {dtype}, and how one is rounded to the other is not known")
            content = there
        self.read_bytes += content.nbytes
        return content

    def digest(self, region: Region) -> str:
        """Return the hash that a rank's record has if the rank holds this part.

        Raises:
            DumpError: As `bits`.
        """
        if region not in self._known:
            bits = self.bits(region)
            self._known[region] = hash_of(bits, self.dtype, bits.shape)
        return self._known[region]

    def is_held(self, region: Region, digest: str) -> bool:
        """Whether a rank's hash is that of a region; dumps of older versions hash the bytes.

        Raises:
            DumpError: As `bits`.
        """
        if self.digest(region) == digest:
            return True
        bits = self.bits(region)
        return hash_of_bytes(bits, self.dtype, bits.shape) == digest


def equals_job(live: JobTensor, saved: Entry) -> bool:
    """Whether every shard of a tensor equals the part of an entry that it claims."""
    try:
        reader = Reader(saved, live.dtype, live.index_shape)
        return live.shape == saved.shape and all(
            piece.claimed is not None and reader.is_held(piece.claimed, piece.digest) for piece in live.pieces
        )
    except DumpError:
        return False


@dataclass(frozen=True, eq=False)
class RestoredTensor:
    """A job's tensor, restored from the checkpoint's tensors that a map makes of it.

    Attributes:
        sources: How each of the checkpoint's tensors is made of it and others, and the tensor.
    """

    live: JobTensor
    sources: tuple[tuple[MappedTensor, Tensor], ...]

    @property
    def name(self) -> str:
        """The checkpoint's tensors that have it."""
        return listed(printable(one.name) for _, one in self.sources)

    @property
    def shape(self) -> tuple[int, ...]:
        """The job's shape."""
        return self.live.shape

    @property
    def dtype(self) -> str:
        """Its dtype in the checkpoint.

        Raises:
            DumpError: There are several.
        """
        dtypes = sorted({one.dtype for _, one in self.sources})
        if len(dtypes) > 1:
            raise DumpError(f"{self.name} are {' and '.join(dtypes)}", "save its parts in one type")
        return dtypes[0]

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers.

        Raises:
            DumpError: The map does not give all of it, or a tensor has another shape.
        """
        whole = np.zeros(self.shape, f"<u{itemsize(self.dtype)}")
        is_filled = np.zeros(self.shape, bool)
        for mapped, tensor in self.sources:
            if mapped.shape != tensor.shape:
                text = f"{printable(tensor.name)} is {list(tensor.shape)}, and {mapped.name} makes {list(mapped.shape)}"
                raise DumpError(text, f"see {mapped.where}")
            for leaf, at in parts_of(mapped.node, tensor.bits):
                if next(leaves(at)) is self.live:
                    _target(whole, at)[...] = leaf
                    _target(is_filled, at)[...] = True
        if not is_filled.all():
            lost = int(is_filled.size - is_filled.sum())
            raise DumpError(
                f"{lost:,} of its {is_filled.size:,} elements are, by the map, in no tensor of the checkpoint"
            )
        return whole

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""
        return part_of(self.bits, region)


def _target(whole: NDArray[Any], node: Node) -> NDArray[Any]:
    """Return the view of a tensor's array that a node takes of it.

    Raises:
        DumpError: It is not a view: what was joined is taken apart again.
    """
    if not isinstance(node, Op):
        return whole
    taken = FUNCTIONS[node.function].taken
    if taken is None:
        raise DumpError(f"{node} cannot be put back into a tensor of the job", "write the map the other way round")
    return taken(_target(whole, node.parts[0]), node.numbers)


def restored_tensors(mapped_pairs: Iterable[tuple[MappedTensor, Tensor]]) -> dict[str, RestoredTensor]:
    """Return the job's tensors that a checkpoint's are made of, by name.

    Args:
        mapped_pairs: How each of the checkpoint's tensors is made, and the tensor.
    """
    sources: dict[JobTensor, list[tuple[MappedTensor, Tensor]]] = {}
    for mapped, stored in mapped_pairs:
        for leaf in dict.fromkeys(leaves(mapped.node)):
            if isinstance(leaf, JobTensor):
                sources.setdefault(leaf, []).append((mapped, stored))
    return {live.name: RestoredTensor(live, tuple(of_live)) for live, of_live in sources.items()}
