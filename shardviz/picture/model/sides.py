"""A tensor's two sides as holders, claimed and held; and where they differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import islice, product
from operator import or_
from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import DumpError
from shardviz.layout.region import Region, indices
from shardviz.picture.model.by_layout import LayoutHolders, PartOverlay, only_layout
from shardviz.picture.model.holders import Holders, mask_of
from shardviz.picture.model.palette import Coloring

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case, LaidOut
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Ranges
    from shardviz.picture.model.holders import Mask, Masks, Plane


CLAIMED_AND_HELD = ("claimed", "held")
INTENDED_AND_HELD = ("intended", "held")
"""The titles of the two sides: who should hold it, by the placements or as the author wants, and who does."""

NO_FILE = "no file"
"""What is wrong with ranks of whose file nothing is left."""

STRANGER = "a different tensor with this name"
"""What is wrong with ranks that hold another tensor by a tensor's name."""

MAX_SCATTERED = 1 << 24
"""Ids of one rank that are laid out one by one; more of them cannot be drawn."""


@dataclass(frozen=True)
class Cell:
    """The elements that a cell covers, with who should hold them and who does.

    Attributes:
        claimed: The ranks that hold any of it by the placements.
        held: The ranks that hold any of it by the ids.
        claimed_mixed: Whether its elements are claimed by different ranks.
        held_mixed: Whether its elements are held by different ranks.
        different: Whether any of its elements is held by others than the placements say, or in another place of theirs.
        due: The ranks that should hold some of it and do not, though they have a file.
        has: The ranks that hold some of it and should not.
        astray: The ranks that should hold some of it and do, in another order.
        guilty: The ranks that it is marked for though its two sides agree: a finding names them, or they have no file.
        is_partly: Whether some of its elements are right and others are not.
    """

    claimed: Mask
    held: Mask
    claimed_mixed: bool
    held_mixed: bool
    different: bool
    due: Mask = 0
    has: Mask = 0
    astray: Mask = 0
    guilty: Mask = 0
    is_partly: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether a map marks it."""
        return self.different or bool(self.guilty)

    @property
    def part(self) -> Mask:
        """Ranks that make the cell wrong, if others in its name are right; 0 if all of it is wrong."""
        found, named = self.due | self.astray | self.guilty or self.has, self.claimed or self.held
        is_some = self.is_partly or (self.guilty and not self.different)
        return found if is_some and found != named else 0


@dataclass(frozen=True)
class Sides:
    """Both sides of a tensor's map, claimed and held.

    Attributes:
        holders: Who holds what, on both sides at once: bit r is rank r by the placements, bit `shift + r` by the ids,
            and bit `2 * shift + r` if rank r holds it in another place of its shard than the placements claim.
        shift: More than the highest rank.
        has_claimed: Whether any rank's tensor has placements.
        has_held: Whether the dump has ids.
        mesh: What it is on, for the colors of ranks.
        axes: The axes that split it, outermost first, for the colors of ranks.
        titles: What the two sides are: claimed and held, or intended and held.
        copies: How many ranks should hold each element of a plain tensor; 0 if no finding says that some do not.
        blamed: The ranks whose part is in place, and of which a finding says that its values are wrong, and how,
            in a few words; a rank may be in several.
        strangers: The ranks that hold another tensor by this one's name.
        missing: The ranks of whose files nothing is left: they may hold what no other rank holds.
    """

    holders: Holders
    shift: int
    has_claimed: bool
    has_held: bool
    mesh: Mesh | None = None
    titles: tuple[str, str] = CLAIMED_AND_HELD
    axes: tuple[str, ...] = ()
    copies: int = 0
    blamed: tuple[tuple[Mask, str], ...] = ()
    strangers: Mask = 0
    missing: Mask = 0

    @property
    def marks_each_side(self) -> bool:
        """Whether each side by itself marks what is different."""
        return bool(self.copies or self.guilty or self.strangers or self.missing)

    @cached_property
    def guilty(self) -> Mask:
        """The ranks whose part is in place, and of which a finding says that its values are wrong."""
        return reduce(or_, (ranks for ranks, _ in self.blamed), 0)

    @cached_property
    def out_of_order(self) -> Mask:
        """Ranks that hold elements at the wrong place within their shard."""
        return reduce(or_, self.holders.regions.values(), 0) >> 2 * self.shift if self.is_compared else 0

    @property
    def is_placed(self) -> bool:
        """Whether what findings say to be wrong is known to be in place."""
        return bool(self.blamed) and self.is_compared

    @property
    def reasons(self) -> tuple[str, ...]:
        """What is wrong with the ranks that both sides mark, in a few words each."""
        return tuple(words for ranks, words in self._marks if ranks)

    @property
    def _marks(self) -> tuple[tuple[Mask, str], ...]:
        return (*self.blamed, (self.strangers, STRANGER), (self.missing, NO_FILE))

    @property
    def is_compared(self) -> bool:
        """Whether two sides are known."""
        return self.has_claimed and self.has_held

    @property
    def coloring(self) -> Coloring:
        """What ranks get their colors by."""
        return Coloring(self.mesh, self.axes)

    def reasons_at(self, cell: Cell) -> list[tuple[Mask, str]]:
        """Return the ranks that both sides mark at a cell, with what is wrong with them."""
        return [(cell.guilty & ranks, words) for ranks, words in self._marks if cell.guilty & ranks]

    def cell(self, masks: Masks) -> Cell:
        """Sum up the holders that a window gives for a cell."""
        parts = [self._part(mask) for mask in masks]
        if len(parts) == 1:
            return parts[0]
        claimed, held = {part.claimed for part in parts}, {part.held for part in parts}
        return Cell(
            reduce(or_, claimed),
            reduce(or_, held),
            len(claimed) > 1,
            len(held) > 1,
            any(part.different for part in parts),
            due=reduce(or_, (part.due for part in parts)),
            has=reduce(or_, (part.has for part in parts)),
            astray=reduce(or_, (part.astray for part in parts)),
            guilty=reduce(or_, (part.guilty for part in parts)),
            is_partly=len({part.is_wrong for part in parts}) > 1,
        )

    def _part(self, mask: Mask) -> Cell:
        """Describe elements that all have the same holders."""
        low = (1 << self.shift) - 1
        claimed, held, astray = mask & low, mask >> self.shift & low, mask >> 2 * self.shift
        if self.has_held and not held:
            held = claimed & self.missing or self.missing
        guilty = (claimed | held) & (self.guilty | self.missing) | self.strangers & ~(claimed | held)
        if not self.is_compared:
            different = bool(self.copies) and held.bit_count() != self.copies
            return Cell(claimed, held, False, False, different, guilty=guilty)
        due, has = claimed & ~held & ~self.missing, held & ~claimed
        return Cell(claimed, held, False, False, bool(due | has | astray), due, has, astray, guilty)

    def at(self, index: Sequence[int]) -> Cell:
        """Describe one element as far as it is known, given by its index in the holders' shape."""
        return self.cell(frozenset((self.holders.at(index),)))


def sides_of(dump: Dump, tensor: Tensor, name: str = "", laid_out: LaidOut | None = None) -> Sides:
    """Lay both sides of a tensor over each other.

    A rank whose file is missing is claimed where the others' mesh says it is, and drawn where the layout that the
    others hold has it.

    Args:
        dump: The dump that the tensor is in.
        name: Which of the fold's names, if its ids differ from those of the others; the first by default.
        laid_out: The dump's tensors, as a check laid them out; laid out here if there was none.

    Raises:
        DumpError: The ids lie scattered and are too many to draw.
    """
    from shardviz.check.order.case import LaidOut

    shift = dump.files.run.num_ranks
    if (only := only_layout(dump, tensor)) is not None:
        sides = Sides(LayoutHolders.of(*only), shift, True, False, only[0].mesh, axes=only[0].nested_axes)
        return _with_missing_files(sides, dump)
    laid = PartOverlay()
    for ranks, region, flat in claimed_parts(dump, tensor):
        laid.add(region, mask_of(ranks), flat=flat)
    has_claimed = bool(laid.regions or laid.runs)
    cases = (laid_out or LaidOut(dump)).cases(tensor, name or tensor.names[0])
    for case in cases:
        _add_held(laid, case, shift)
        _add_astray(laid, case, shift)
        _add_missing(laid, case, shift)
    layout = tensor.claimed or (cases[0].held if cases else None)
    mesh, axes = (layout.mesh, layout.nested_axes) if layout is not None else (dump.files.mesh, ())
    return _with_missing_files(
        Sides(laid.holders(tensor.shape), shift, has_claimed, bool(cases), mesh, axes=axes), dump
    )


def _with_missing_files(sides: Sides, dump: Dump) -> Sides:
    """Let sides mark the parts of ranks of whose files nothing is left."""
    return replace(sides, missing=mask_of(dump.files.missing_ranks))


def sides_of_intended(dump: Dump, tensor: Tensor, name: str, wanted: Layout, laid_out: LaidOut) -> Sides:
    """Lay what is held over what the author wants; the arguments are those of `sides_of`.

    Raises:
        DumpError: The ids lie scattered and are too many to draw.
    """
    shift = dump.files.run.num_ranks
    laid = PartOverlay()
    for region, ranks in wanted.holders().items():
        laid.add(region, mask_of(ranks), flat=wanted.flat is not None)
    for case in laid_out.cases(tensor, name):
        _add_held(laid, case, shift)
        _add_missing(laid, case, shift)
    sides = Sides(laid.holders(tensor.shape), shift, True, True, wanted.mesh, INTENDED_AND_HELD, wanted.nested_axes)
    return _with_missing_files(sides, dump)


def claimed_parts(dump: Dump, tensor: Tensor) -> Iterator[tuple[list[int], Region, bool]]:
    """Yield ranks with the region that they claim, and whether the parameter is flat."""
    missing = dump.files.missing_ranks
    for layout, claiming in tensor.claims.items():
        if layout is not None:
            own = {*claiming, *missing}
            for region, holders in layout.holders().items():
                ranks = [rank for rank in holders if rank in own]
                if ranks:
                    yield ranks, region, layout.flat is not None


def _add_held(laid: PartOverlay, case: Case, shift: int) -> None:
    flat = case.claimed is not None and case.claimed.flat is not None
    for coord, region in case.regions.items():
        laid.add(region, 1 << shift + case.rank(coord), flat=flat)
    for coord, ids in case.ids.items():
        rank = case.rank(coord)
        if ids.size > MAX_SCATTERED:
            raise DumpError(
                f"{case.name}: rank {rank} holds {ids.size:,} scattered ids, more than {MAX_SCATTERED:,} are not drawn"
            )
        laid.add_run(stretches_of(ids), 1 << shift + rank)


def _add_missing(laid: PartOverlay, case: Case, shift: int) -> None:
    """Place ranks without a file where the layout held by the others, or claimed, puts them."""
    layout = case.held or case.claimed
    if layout is None:
        return
    for rank in case.dump.files.missing_ranks:
        if rank in layout.mesh:
            region = layout.region_of_rank(rank)
            laid.add(region, 1 << shift + rank, flat=layout.flat is not None)


def _add_astray(laid: PartOverlay, case: Case, shift: int) -> None:
    """Add what ranks hold in another place of their shard than their placements claim."""
    if case.claimed is None or case.claimed.flat is not None:
        return
    for coord, held in case.regions.items():
        claimed = case.claimed.region(coord)
        if claimed.dims != held.dims and (astray := out_of_place(claimed, held)) is not None:
            laid.add(astray, 1 << 2 * shift + case.rank(coord))


MOST_BLOCKS = 1024
MOST_SLICES = 64
"""How many blocks per dim, and slices of the other dims, are searched for a difference."""


def first_difference(sides: Sides, plane: Plane) -> tuple[int, ...] | None:
    """Return the first element that a map marks; the slices of a plane are searched in turn."""
    others = [dim for dim in range(len(plane.at)) if dim not in (plane.rows, plane.cols)]
    rows, cols = (_starts(sides, dim) for dim in (plane.rows, plane.cols))
    for at in islice(product(*(_starts(sides, dim).tolist() for dim in others)), MOST_SLICES):
        place = list(plane.at)
        for dim, index in zip(others, at, strict=True):
            place[dim] = index
        spans = [np.stack([starts, starts + 1], axis=-1) for starts in (rows, cols)]
        window = sides.holders.window(replace(plane, at=tuple(place)), *spans)
        different = np.array([sides.cell(masks).is_wrong for masks in window.masks])[window.codes]
        if different.any():
            row, col = divmod(int(different.argmax()), len(cols))
            place[plane.rows], place[plane.cols] = int(rows[row]), int(cols[col])
            return tuple(place)
    return None


def found_in_place_of(tensor: Tensor, index: Sequence[int], rank: int) -> tuple[int, ...] | None:
    """Return the element that a rank holds in the place of another.

    Args:
        index: The element that should be there.
        rank: A rank that holds it by the placements.

    Returns:
        The index of the element that is there; None if the rank's shard is not a product of ranges, or is shorter.
    """
    shard = tensor.shards.get(rank)
    if shard is None or shard.held is None or shard.layout is None or shard.layout.flat is not None:
        return None
    claimed = shard.layout.region_of_rank(rank)
    element = []
    for at, says, has in zip(index, claimed.dims, shard.held.dims, strict=True):
        local = next((before + at - start for before, start, stop in _with_offsets(says) if start <= at < stop), -1)
        there = next(
            (start + local - n for n, start, stop in _with_offsets(has) if n <= local < n + stop - start), None
        )
        if local < 0 or there is None:
            return None
        element.append(there)
    return tuple(element)


def out_of_place(claimed: Region, held: Region) -> Region | None:
    """Return what two regions share at different places; all of it if several dims are permuted.

    If one dim is permuted this is exact: the other dims are equal.
    """
    moved, common = [], []
    for says, has in zip(claimed.dims, held.dims, strict=True):
        due, got = indices(says), indices(has)
        both, at, there = np.intersect1d(due, got, return_indices=True)
        moved.append(both[at != there])
        common.append(both)
    permuted = [dim for dim, found in enumerate(moved) if len(found)]
    if not permuted or not all(map(len, common)):
        return None
    chosen = [moved[dim] if permuted == [dim] else both for dim, both in enumerate(common)]
    return Region(tuple(stretches_of(found + 1) for found in chosen))


def stretches_of(ids: NDArray[np.int64]) -> Ranges:
    """Return ids, counted from 1, as rising ranges of row-major indices, ignoring all non-ids."""
    indices = np.unique(ids[ids > 0]) - 1
    if not indices.size:
        return ()
    breaks = np.flatnonzero(np.diff(indices) > 1)
    starts, stops = np.append(indices[0], indices[breaks + 1]), np.append(indices[breaks] + 1, indices[-1] + 1)
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _with_offsets(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield each range with the number of indices before it."""
    before = 0
    for start, stop in ranges:
        yield before, start, stop
        before += stop - start


def _starts(sides: Sides, dim: int) -> NDArray[np.int64]:
    return sides.holders.edges(dim)[:-1][:MOST_BLOCKS]
