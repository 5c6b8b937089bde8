"""Where a shard's bytes are in a checkpoint if they are not where it claims: proved by its hash, or by its values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import TYPE_CHECKING

from shardviz.checkpoint.beside.reading import Given, Reader
from shardviz.checkpoint.comparing.steps import tensor_in
from shardviz.errors import DumpError, LayoutError
from shardviz.layout.ids import region_of
from shardviz.layout.region import Region
from shardviz.reference.lookup import locate
from shardviz.reference.windows import UNPLACED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardviz.checkpoint.beside.job import Live, Piece
    from shardviz.checkpoint.records import Checkpoint, Tensor
    from shardviz.layout.layout import Layout
    from shardviz.layout.splits import Chain

MOST_READ = 1 << 32
"""Bytes that are hashed to find out where shards are that are not what they claim, of all tensors together."""

FEW = 16
"""Segments of a dim that are tried: q, k and v; gate and up; heads of a small model."""

MOST = 256
"""Layouts that are tried of one tensor."""

MOST_AXES = 4


@dataclass
class Search:
    """What shards are looked for in, and how much that took.

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

    def regions(self, live: Live, wrong: Iterable[Piece], reader: Reader) -> dict[int, Region]:
        """Return the parts of the tensor that ranks hold instead of those that they claim, as far as they are found."""
        regions: dict[int, Region] = {}
        lost = [piece for piece in wrong if not piece.is_alike]
        for look in (self._looked_up, self._exchanged, self._relabeled, self._by_values):
            if lost:
                regions |= look(live, lost, reader)
                lost = [piece for piece in lost if piece.rank not in regions]
        return regions

    def _looked_up(self, live: Live, lost: Sequence[Piece], reader: Reader) -> dict[int, Region]:
        """Return the parts that the job itself found in its reference."""
        return {
            piece.rank: piece.held
            for piece in lost
            if piece.held is not None and piece.held.is_within(reader.shape) and self._fits(piece, piece.held, reader)
        }

    def _exchanged(self, live: Live, lost: Sequence[Piece], reader: Reader) -> dict[int, Region]:
        """Return the parts that are other ranks'."""
        parts = dict.fromkeys(piece.claimed for piece in live.pieces if piece.claimed is not None)
        return {
            piece.rank: region
            for piece in lost
            if (region := next((one for one in parts if self._fits(piece, one, reader)), None)) is not None
        }

    def _relabeled(self, live: Live, lost: Sequence[Piece], reader: Reader) -> dict[int, Region]:
        """Return the parts of the first other layout by which any of the shards is what another rule would cut."""
        layout = live.dumped.claimed
        for other in other_layouts(layout) if layout is not None else ():
            parts = [
                (piece, other.region(other.mesh.coord_of(piece.rank))) for piece in lost if piece.rank in other.mesh
            ]
            found = {piece.rank: part for piece, part in parts if self._fits(piece, part, reader)}
            if found or self.is_over:
                return found
        return {}

    def _fits(self, piece: Piece, region: Region, reader: Reader) -> bool:
        return region.shape == piece.shape and not self.is_over and self._digest(reader, region) == piece.digest

    def _digest(self, reader: Reader, region: Region) -> str:
        before = reader.read_bytes
        try:
            return reader.digest(region)
        except DumpError:
            return "unreadable"
        finally:
            self.left -= reader.read_bytes - before

    def _by_values(self, live: Live, lost: Sequence[Piece], reader: Reader) -> dict[int, Region]:
        """Return the parts that shards with values hold, value by value."""
        regions = {}
        for piece in lost:
            region = _located(piece, reader) if piece.bits is not None else None
            if region is not None:
                regions[piece.rank] = region
        return regions

    def other_name(self, live: Live, piece: Piece, stored_name: str) -> str:
        """Return the other tensor of the checkpoint with a shard's bytes at its claimed place; empty if none."""
        if piece.is_alike or piece.claimed is None or self.is_over:
            return ""
        key = (live.shape, live.index_shape, live.dtype, piece.claimed)
        if key not in self._tables:
            table: dict[str, str] = {}
            for name, other in self.tensors.items():
                if other.shape == live.shape and not self.is_over:
                    digest = self._digest(Reader(other, live.dtype, live.index_shape), piece.claimed)
                    table.setdefault(digest, name)
            self._tables[key] = table
        name = self._tables[key].get(piece.digest, "")
        return name if name != stored_name else ""

    def step_of(self, live: Live, wrong: Sequence[Piece], entry: Tensor) -> Checkpoint | None:
        """Return the checkpoint of another step that has some shards' bytes where they claim to be."""
        for step in self.steps if not any(piece.is_alike for piece in wrong) else ():
            there = _of_step(step, entry)
            if there is not None and there.shape == live.shape:
                reader = Reader(there, live.dtype, live.index_shape)
                if all(piece.claimed and self._digest(reader, piece.claimed) == piece.digest for piece in wrong):
                    return step
        return None


def _located(piece: Piece, reader: Reader) -> Region | None:
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


def _of_step(step: Checkpoint, entry: Tensor) -> Tensor | None:
    """Return the same tensor of another step."""
    if not isinstance(entry, Given):
        return tensor_in(step, entry)
    sources = [(made, tensor_in(step, one)) for made, one in entry.sources]
    there = tuple((made, one) for made, one in sources if one is not None)
    return replace(entry, sources=there) if len(there) == len(sources) else None


def other_layouts(claimed: Layout) -> Iterator[Layout]:
    """Yield layouts with the axes of a given one: in other orders, on other dims, and around segments of a dim.

    Example:
        >>> from shardviz.layout.mesh import parse_mesh
        >>> from shardviz.layout.notation import parse, write
        >>> layout = parse("[8/a/b]").layout(parse_mesh("a=2,b=2"))
        >>> [write(one) for one in other_layouts(layout)][:3]
        ['[8/b/a]', '[8/2/a/b]', '[8/a/2/b]']
    """
    axes = claimed.split_axes
    if claimed.flat is not None or not axes or len(axes) > MOST_AXES:
        return
    layouts = dict.fromkeys(chains for base in _bases(claimed, axes) for chains in (base,))
    layouts |= dict.fromkeys(chains for base in list(layouts) for chains in _with_segments(base, claimed.shape))
    left = MOST
    for chains in layouts:
        if chains != claimed.chains and left:
            left -= 1
            try:
                yield replace(claimed, chains=chains)
            except LayoutError:  # more segments than a dim may be cut into
                continue


def _bases(claimed: Layout, axes: tuple[str, ...]) -> Iterator[tuple[Chain, ...]]:
    """Yield the axes in every order on every dim, those of the claim first."""
    dims = range(len(claimed.shape))
    own = tuple(next(dim for dim in dims if axis in claimed.chains[dim]) for axis in axes)
    for placed in sorted(product(dims, repeat=len(axes)), key=lambda one: one != own):
        for order in permutations(range(len(axes))):
            yield tuple(tuple(axes[at] for at in order if placed[at] == dim) for dim in dims)


def _with_segments(base: tuple[Chain, ...], shape: tuple[int, ...]) -> Iterator[tuple[Chain, ...]]:
    """Yield a layout's chains with a number of segments before one of the axes of a dim."""
    for dim, chain in enumerate(base):
        for number in [number for number in range(2, min(FEW, shape[dim] - 1) + 1) if shape[dim] % number == 0]:
            for at in range(len(chain)):
                yield (*base[:dim], (*chain[:at], number, *chain[at:]), *base[dim + 1 :])
