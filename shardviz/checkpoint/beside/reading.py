"""A checkpoint's tensor as a job would have it: in the job's dtype, part by part, and each part's hash."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.records import Saved
from shardviz.dump.digests import hash_of, hash_of_bytes
from shardviz.errors import DumpError
from shardviz.relate.casts import cast
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shardviz.checkpoint.beside.job import Live
    from shardviz.checkpoint.tensor import Entry
    from shardviz.layout.region import Region

    Turn = Callable[[NDArray[Any]], NDArray[Any]]


class Reader:
    """Reads parts of a tensor and hashes them as a dump does; no part is read twice.

    Attributes:
        entry: The tensor.
        dtype: The dtype to which it is cast.
        shape: The shape in which parts are counted.
        read_bytes: Bytes that were read and hashed so far.
    """

    def __init__(
        self, entry: Entry, dtype: str, shape: tuple[int, ...], turn: Turn | None = None, through: str = ""
    ) -> None:
        """Read nothing yet.

        Args:
            entry: The tensor.
            dtype: The dtype of the job.
            shape: The shape in which parts are counted.
            turn: What is done to the whole before, such as a transposition.
            through: A type to which the values are rounded on the way; empty if they are not.
        """
        self.entry, self.dtype, self.shape = entry, dtype, shape
        self.read_bytes = 0
        self._turn = turn
        self._steps = (entry.dtype, through, dtype) if through else (entry.dtype, dtype)
        self._whole: NDArray[Any] | None = None
        self._known: dict[Region, str] = {}

    def bits(self, region: Region) -> NDArray[Any]:
        """Return the bits of a part.

        Raises:
            DumpError: They cannot be read, or not be cast.
        """
        if self._turn is None and isinstance(self.entry, Saved) and self.entry.shape == self.shape:
            content = self.entry.read(region)
        else:
            content = part_of(self._all(), region)
        for dtype, to in pairwise(self._steps):
            there = cast(content, dtype, to)
            if there is None:
                raise DumpError(f"it is {self.dtype} and {dtype}, and how one is rounded to the other is not known")
            content = there
        self.read_bytes += content.nbytes
        return content

    def _all(self) -> NDArray[Any]:
        if self._whole is None:
            whole = self.entry.bits if self._turn is None else self._turn(self.entry.bits)
            self._whole = whole.reshape(self.shape)
        return self._whole

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
        """Whether a rank's hash is that of a part; a dump of an earlier version has the hash of its bytes.

        Raises:
            DumpError: As `bits`.
        """
        if self.digest(region) == digest:
            return True
        bits = self.bits(region)
        return hash_of_bytes(bits, self.dtype, bits.shape) == digest


def is_of(live: Live, entry: Entry) -> bool:
    """Whether every shard of a tensor has what an entry has in the part that it claims."""
    try:
        reader = Reader(entry, live.dtype, live.index_shape)
        return live.shape == entry.shape and all(
            piece.claimed is not None and reader.is_held(piece.claimed, piece.digest) for piece in live.pieces
        )
    except DumpError:
        return False
