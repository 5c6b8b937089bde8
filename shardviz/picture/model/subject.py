"""The subject of a page: one tensor of a dump, or a layout that nobody has built yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.dump.dump import ID_NONE
from shardviz.picture.model.holders import Holders
from shardviz.picture.model.sides import Sides, sides_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.order.case import Case
    from shardviz.check.order.laid_out import LaidOut
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.region import Ranges, Region

MAX_DRAWN_RANKS = 1 << 14
"""A layout over more ranks than this is described in words only."""


@dataclass(frozen=True)
class Subject:
    """One tensor, with all that a page says of it.

    Attributes:
        name: Its name; empty for a layout alone.
        shape: Its global shape.
        dtype: Its element type; empty if nothing is known.
        mesh: The mesh that it is on.
        claimed: What its placements say; None for a plain tensor.
        held: Where its elements are, if that is known and can be written in the notation.
        sides: Who holds what, for the picture.
        claims: What each rank should hold, in words.
        holds: What each rank holds, in words; empty where that is not known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    claimed: Layout | None
    held: Layout | None
    sides: Sides
    claims: Mapping[int, str]
    holds: Mapping[int, str]

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that are to hold nothing."""
        return tuple(rank for rank, text in self.claims.items() if text == NOTHING)

    @property
    def silent(self) -> tuple[int, ...]:
        """The ranks of whose file nothing is left."""
        return tuple(rank for rank, text in self.holds.items() if text == NO_FILE)

    @property
    def misplaced(self) -> frozenset[int]:
        """The ranks that hold something else than they claim."""
        both = self.claims.keys() & self.holds.keys()
        return frozenset(rank for rank in both if self.claims[rank] != self.holds[rank])


NOTHING = "nothing"
NO_FILE = "no file"


def of_tensor(dump: Dump, tensor: Tensor, name: str, laid_out: LaidOut | None = None) -> Subject:
    """Describe one tensor of a dump.

    Args:
        dump: The dump.
        tensor: The tensor, or the fold that it is in.
        name: Its name.
        laid_out: The dump's tensors, as a check laid them out; laid out here if there was none.

    Raises:
        DumpError: The ids lie scattered and are too many to draw.
    """
    from shardviz.check.order.laid_out import LaidOut

    laid_out = laid_out or LaidOut(dump)
    cases = laid_out.cases(tensor, name)
    claims = {
        rank: region_text(region)
        for layout in tensor.by_claim
        if layout is not None
        for rank, region in layout.regions()
    }
    return Subject(
        name=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        mesh=tensor.claimed.mesh if tensor.claimed is not None else dump.files.mesh,
        claimed=tensor.claimed,
        held=cases[0].held if cases else None,
        sides=sides_of(dump, tensor, name, laid_out),
        claims=claims,
        holds=_holds(dump, tensor, cases),
    )


def _holds(dump: Dump, tensor: Tensor, cases: Sequence[Case]) -> dict[int, str]:
    """Say what each rank holds, by rank; nothing is known of a tensor that was not stamped."""
    if tensor.moment != "stamped":
        return {}
    holds = {case.rank(coord): _held_text(case, coord) for case in cases for coord in case.shards}
    holds |= dict.fromkeys(dump.files.missing_ranks, NO_FILE)
    return dict(sorted(holds.items()))


def of_layout(layout: Layout, dtype: str = "float32") -> Subject:
    """Describe a layout on its own."""
    found = dict(layout.regions())
    regions: dict[Region, int] = {}
    runs: dict[Ranges, int] = {}
    for rank, region in found.items() if layout.mesh.size <= MAX_DRAWN_RANKS else ():
        if layout.flat:
            runs[region.dims[0]] = runs.get(region.dims[0], 0) | 1 << rank
        elif region.size:
            regions[region] = regions.get(region, 0) | 1 << rank
    shape = (1,) * (2 - len(layout.tensor_shape)) + layout.tensor_shape
    return Subject(
        name="",
        shape=layout.tensor_shape,
        dtype=dtype,
        mesh=layout.mesh,
        claimed=layout,
        held=None,
        sides=Sides(
            Holders(shape, regions, runs), max(layout.mesh.ranks) + 1, bool(regions or runs), False, layout.mesh
        ),
        claims={rank: region_text(region) for rank, region in found.items()},
        holds={},
    )


def region_text(region: Region) -> str:
    """Write a region, or that it is nothing."""
    if not region.size:
        return NOTHING
    return str(region) if region.dims else "the number"


def _held_text(case: Case, coord: Coord) -> str:
    if coord in case.regions:
        return region_text(case.regions[coord])
    ids = case.ids[coord]
    kinds = {
        "own ids, scattered": int((ids > 0).sum()),
        "ids of other tensors": int((ids < ID_NONE).sum()),
        "zeros": int((ids == 0).sum()),
        "no ids": int((ids == ID_NONE).sum()),
    }
    return "; ".join(f"{kind}: {count:,}" for kind, count in kinds.items() if count)
