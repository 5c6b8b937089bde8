"""Search of a checkpoint for a shard's bytes, by its hash or by its values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.all_tensors.odd_files import tensor_in
from shardviz.checkpoint.live_job.reading import Reader, RestoredTensor
from shardviz.errors import DumpError
from shardviz.layout.region import Region, region_of
from shardviz.reference.lookup import UNPLACED, locate
from shardviz.relate.orders import layouts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardviz.checkpoint.live_job.job import JobShard, JobTensor
    from shardviz.checkpoint.records import Checkpoint, Tensor

MOST_READ = 1 << 32
"""Bytes that are hashed to find out where shards are that are not what they claim, of all tensors together."""

FEW = 16
"""Segments of a dim that are tried: q, k and v; gate and up; heads of a small model."""

MOST = 256
"""Layouts that are tried of one tensor."""

MOST_AXES = 4


@dataclass
class Search:
    """The tensors that shards are searched in, and the bytes that may still be hashed.

    Attributes:
        tensors: The checkpoint's tensors.
        steps: Checkpoints of other steps.
        left: Bytes that may still be hashed.
    """

    tensors: Mapping[str, Tensor]
    steps: Sequence[Checkpoint] = ()
    left: int = MOST_READ
    _tables: dict[tuple[object, ...], dict[str, str]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether as much was hashed as is worth it."""
        return self.left <= 0

    def regions(self, live: JobTensor, wrong: Iterable[JobShard], reader: Reader) -> dict[int, Region]:
        """Find the parts of the tensor that ranks hold instead of the claimed ones."""
        regions: dict[int, Region] = {}
        lost = [piece for piece in wrong if not piece.is_alike]
        for look in (self._parts_looked_up, self._parts_of_other_ranks, self._parts_of_other_layout, self._by_values):
            if lost:
                regions |= look(live, lost, reader)
                lost = [piece for piece in lost if piece.rank not in regions]
        return regions

    def _parts_looked_up(self, live: JobTensor, lost: Sequence[JobShard], reader: Reader) -> dict[int, Region]:
        """Return the parts that the job itself found in its reference."""
        return {
            piece.rank: piece.held
            for piece in lost
            if piece.held is not None and piece.held.is_within(reader.shape) and self._fits(piece, piece.held, reader)
        }

    def _parts_of_other_ranks(self, live: JobTensor, lost: Sequence[JobShard], reader: Reader) -> dict[int, Region]:
        """Return the parts that are other ranks'."""
        parts = dict.fromkeys(piece.claimed for piece in live.pieces if piece.claimed is not None)
        return {
            piece.rank: region
            for piece in lost
            if (region := next((one for one in parts if self._fits(piece, one, reader)), None)) is not None
        }

    def _parts_of_other_layout(self, live: JobTensor, lost: Sequence[JobShard], reader: Reader) -> dict[int, Region]:
        """Return the parts of the other layout by which most of the shards are what it would cut."""
        layout = live.dumped.claimed
        if layout is None or layout.flat is not None or len(layout.mesh.axes) > MOST_AXES:
            return {}
        best: dict[int, Region] = {}
        shapes = {piece.rank: piece.shape for piece in live.pieces}
        held = [shapes.get(rank) for rank in layout.mesh.ranks]
        for candidate in layouts_of(held, layout.mesh, layout.shape, layout, range(2, FEW + 1))[1:MOST]:
            parts = [(piece, candidate.region_of_rank(piece.rank)) for piece in lost if piece.rank in candidate.mesh]
            fitting = {piece.rank: part for piece, part in parts if self._fits(piece, part, reader)}
            best = max(best, fitting, key=len)
            if len(best) == len(lost) or self.is_over:
                break
        return best

    def _fits(self, piece: JobShard, region: Region, reader: Reader) -> bool:
        return region.shape == piece.shape and not self.is_over and self._digest(reader, region) == piece.digest

    def _digest(self, reader: Reader, region: Region) -> str:
        before = reader.read_bytes
        try:
            return reader.digest(region)
        except DumpError:
            return "unreadable"
        finally:
            self.left -= reader.read_bytes - before

    def _by_values(self, live: JobTensor, lost: Sequence[JobShard], reader: Reader) -> dict[int, Region]:
        """Return the parts that shards with values hold, value by value."""
        regions = {}
        for piece in lost:
            region = _located(piece, reader) if piece.bits is not None else None
            if region is not None:
                regions[piece.rank] = region
        return regions

    def other_name(self, live: JobTensor, piece: JobShard, stored_name: str) -> str:
        """Return a different tensor with a shard's bytes at its claimed place; empty if none."""
        if piece.is_alike or piece.claimed is None or self.is_over:
            return ""
        key = (live.shape, live.index_shape, live.dtype, piece.claimed)
        if key not in self._tables:
            table: dict[str, str] = {}
            for name, candidate in self.tensors.items():
                if candidate.shape == live.shape and not self.is_over:
                    digest = self._digest(Reader(candidate, live.dtype, live.index_shape), piece.claimed)
                    table.setdefault(digest, name)
            self._tables[key] = table
        name = self._tables[key].get(piece.digest, "")
        return name if name != stored_name else ""

    def step_of(self, live: JobTensor, wrong: Sequence[JobShard], saved: Tensor) -> Checkpoint | None:
        """Return the checkpoint of another step that has some shards' bytes where they claim to be."""
        for step in self.steps if not any(piece.is_alike for piece in wrong) else ():
            there = _of_step(step, saved)
            if there is not None and there.shape == live.shape:
                reader = Reader(there, live.dtype, live.index_shape)
                if all(piece.claimed and self._digest(reader, piece.claimed) == piece.digest for piece in wrong):
                    return step
        return None


def _located(piece: JobShard, reader: Reader) -> Region | None:
    """Return the part of a tensor that a shard's values are; None if some of them are not in it."""
    assert piece.bits is not None, "the caller has looked"
    try:
        whole = reader.bits(Region.whole(reader.shape))
    except DumpError:
        return None
    if piece.bits.ndim != whole.ndim or not whole.ndim:
        return None
    ids = locate(piece.bits, whole, piece.claimed)
    return region_of(ids, reader.shape) if not (ids == UNPLACED).any() else None


def _of_step(step: Checkpoint, saved: Tensor) -> Tensor | None:
    """Return the same tensor of another step."""
    if not isinstance(saved, RestoredTensor):
        return tensor_in(step, saved)
    sources = [(made, tensor_in(step, one)) for made, one in saved.sources]
    there = tuple((made, one) for made, one in sources if one is not None)
    return replace(saved, sources=there) if len(there) == len(sources) else None
