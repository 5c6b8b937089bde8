"""A checkpoint's tensor for the drawing model: files are its holders. Also next to a job's.

The two sides share one grid: ranks on one, files on the other. A part is marked if a rank that claims it holds
something other than the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.outcome import DIFFERENT
from shardviz.checkpoint.records import extents
from shardviz.errors import DumpError
from shardviz.picture.exhibits.exhibit import Cell, Row, exhibit, title_of
from shardviz.picture.model.by_layout import PartOverlay
from shardviz.picture.model.holders import Holders, mask_of
from shardviz.picture.model.sides import Sides, sides_of
from shardviz.picture.model.subject import NOTHING, region_text
from shardviz.text import listed, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.live_job.job import Job, JobShard, JobTensor
    from shardviz.checkpoint.records import Checkpoint, Chunk, StoredTensor
    from shardviz.layout.region import Ranges, Region
    from shardviz.picture.exhibits.exhibit import Exhibit
    from shardviz.picture.model.holders import Mask, Masks
    from shardviz.picture.model.sides import Cell as Described


MOST_DRAWN = 1 << 14
"""Chunks of a tensor that are drawn."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A contiguous part of a tensor.

    Attributes:
        file: The number of its file; None if no file has it.
        start: Its first byte there.
    """

    region: Region
    file: int | None
    start: int = 0
    size: int = 0

    @property
    def bytes(self) -> str:
        """Its bytes in the file."""
        return f"bytes {self.start:,} to {self.start + self.size:,}" if self.file is not None else "in no file"


@dataclass(frozen=True)
class CheckpointSubject:
    """A checkpoint's tensor and what a picture says of it.

    Attributes:
        files: The name of each file that has any of it, by number.
        sides: Which file holds what: the bits of `Sides.claimed` are files here.
    """

    tensor: StoredTensor
    parts: tuple[StoredPart, ...]
    files: Mapping[int, str]
    sides: Sides


def number_files(checkpoint: Checkpoint) -> dict[str, int]:
    """Number a checkpoint's files, in the order of their names; a number is also a color."""
    return {name: at for at, name in enumerate(sorted(checkpoint.file_sizes, key=natural_key))}


def checkpoint_subject(tensor: StoredTensor, numbers: Mapping[str, int]) -> CheckpointSubject:
    """Describe a tensor.

    Args:
        numbers: What `number_files` returns for the checkpoint.

    Raises:
        DumpError: Its chunks are too many to draw, or reach out of it.
    """
    if len(tensor.chunks) > MOST_DRAWN:
        what = f"{printable(tensor.name)}: {len(tensor.chunks):,} chunks, more than {MOST_DRAWN:,} are not drawn"
        raise DumpError(what, "`shardviz show CHECKPOINT TENSOR --all` lists them")
    outside = next((chunk for chunk in tensor.chunks if not chunk.is_within(tensor.shape)), None)
    if outside is not None:
        what = f"{printable(tensor.name)}: its chunk {outside.region} reaches out of {list(tensor.shape)}"
        raise DumpError(what, "`shardviz check CHECKPOINT` says which chunks do")
    parts = tuple(_part(chunk, numbers) for chunk in tensor.chunks)
    files = {numbers[name]: name for name in tensor.files}
    return CheckpointSubject(tensor, parts, dict(sorted(files.items())), _sides(tensor, parts, len(numbers)))


def _part(chunk: Chunk, numbers: Mapping[str, int]) -> StoredPart:
    place = chunk.place
    if place is None:
        return StoredPart(chunk.region, None)
    return StoredPart(chunk.region, numbers[place.file], place.start, place.size)


def _sides(tensor: StoredTensor, parts: tuple[StoredPart, ...], num_files: int) -> Sides:
    """Lay out which file holds what, as `sides_of` does for ranks."""
    laid = PartOverlay()
    for part in parts:
        if part.file is not None:
            laid.add(part.region, mask_of((part.file,)))
    return Sides(laid.holders(tensor.shape), num_files + 1, has_claimed=True, has_held=False)


INSTEAD = {"moved": "another tensor's values", "stale": "another step's values"}
"""What ranks hold that is not of the checkpoint's tensor, by verdict."""

TITLES = ("the job, by rank", "the checkpoint, by file")
MOST_EXTENTS = 2
"""Stretches of bytes that are written of one part."""


@dataclass(frozen=True)
class MarkedSides(Sides):
    """Two sides whose parts are marked explicitly, not where they differ.

    Attributes:
        wrong: The ranks whose parts are marked.
    """

    wrong: Mask = 0

    @property
    def marks_each_side(self) -> bool:
        """Whether each side by itself marks what is different."""
        return True

    def cell(self, masks: Masks) -> Described:
        """Sum up the holders of a cell; it is different where a wrong rank holds any of it."""
        return replace(super().cell(masks), different=any(mask & self.wrong for mask in masks))

    def turned(self) -> MarkedSides:
        """Swap the sides, files first and ranks second: files have no place on the mesh."""
        low, by = (1 << self.shift) - 1, max((mask.bit_length() for mask in self._masks), default=0)

        def turn(mask: Mask) -> Mask:
            return mask >> self.shift | (mask & low) << by

        original = self.holders
        regions = {region: turn(mask) for region, mask in original.regions.items()}
        runs = {ranges: turn(mask) for ranges, mask in original.runs.items()}
        holders, titles = Holders(original.shape, regions, runs), (self.titles[1], self.titles[0])
        return MarkedSides(holders, by, self.has_held, self.has_claimed, titles=titles, wrong=self.wrong << by)

    @property
    def _masks(self) -> tuple[Mask, ...]:
        return (*self.holders.regions.values(), *self.holders.runs.values())


@dataclass(frozen=True)
class ComparisonSubject:
    """A tensor of a job and of a checkpoint, and what a picture says of them.

    Attributes:
        sides: Who holds what: ranks on the first side, files on the second; None if there is nothing to draw.
        stored: The checkpoint's tensor; None if a map makes it of several, or it has none.
        exhibit: For each rank the part that it claims, what it holds, and the bytes of that part in the checkpoint.
        why: Why one side is not drawn; empty if both are.
    """

    outcome: Outcome
    shape: tuple[int, ...]
    sides: MarkedSides | None
    stored: CheckpointSubject | None
    exhibit: Exhibit | None
    why: str = ""

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.outcome.name

    @property
    def is_wrong(self) -> bool:
        """Whether it differs."""
        return self.outcome.verdict in DIFFERENT


def comparison_subject(
    outcome: Outcome, job: Job, checkpoint: Checkpoint, numbers: Mapping[str, int]
) -> ComparisonSubject:
    """Describe a tensor.

    Args:
        numbers: What `number_files` returns for the checkpoint.

    Raises:
        DumpError: It has too many parts to draw.
    """
    live, saved = _both_tensors(outcome, job, checkpoint)
    stored_tensor = checkpoint_subject(saved, numbers) if saved is not None else None
    shape = live.index_shape if live is not None else saved.shape if saved is not None else ()
    wrong = frozenset(outcome.ranks) if outcome.verdict in DIFFERENT else frozenset()
    is_alike = live is None or saved is None or live.index_shape == saved.shape
    is_there = live is not None and (saved is not None or outcome.is_made)
    table = _exhibit(outcome, live, saved if is_alike else None, wrong) if live is not None and is_there else None
    sides = _both_sides(live, stored_tensor if is_alike else None, job, wrong)
    return ComparisonSubject(outcome, shape, sides, stored_tensor, table, _why_one_side(outcome, live, saved))


def _both_tensors(outcome: Outcome, job: Job, checkpoint: Checkpoint) -> tuple[JobTensor | None, StoredTensor | None]:
    """Return a tensor on either side; either may be the one that the outcome is named by."""
    names = [name for name in dict.fromkeys((outcome.name, outcome.other)) if name]
    if not outcome.is_made and outcome.verdict not in ("missing", "added"):
        for own, their in (names, names[::-1]) if len(names) > 1 else ((*names, *names),):
            if own in job.tensors and their in checkpoint.tensors:
                return job.tensors[own], checkpoint.tensors[their]
    live = next((job.tensors[name] for name in names if name in job.tensors), None)
    return live, checkpoint.tensors.get(outcome.name) if live is None else None


def _why_one_side(outcome: Outcome, live: JobTensor | None, saved: StoredTensor | None) -> str:
    """Say why one side is not drawn, or not beside the other."""
    if live is None or saved is None:
        made = f"the checkpoint has it as {printable(outcome.other)}" if live is not None and outcome.other else ""
        return made or f"only the {'checkpoint' if live is None else 'job'} has it"
    if live.index_shape != saved.shape:
        return f"it is {list(live.index_shape)} in the job and {list(saved.shape)} in the checkpoint"
    return ""


def _both_sides(
    live: JobTensor | None, stored_tensor: CheckpointSubject | None, job: Job, wrong: frozenset[int]
) -> MarkedSides | None:
    """Lay files over ranks; None if neither is known."""
    if live is None:
        return (
            MarkedSides(stored_tensor.sides.holders, 0, False, True, titles=TITLES)
            if stored_tensor is not None
            else None
        )
    claimed = sides_of(job.dump, live.dumped)
    low = (1 << claimed.shift) - 1
    regions: dict[Region, Mask] = {region: mask & low for region, mask in claimed.holders.regions.items()}
    runs: dict[Ranges, Mask] = {ranges: mask & low for ranges, mask in claimed.holders.runs.items()}
    if not claimed.has_claimed:
        _add_plain(regions, live)
    for region, mask in stored_tensor.sides.holders.regions.items() if stored_tensor is not None else ():
        regions[region] = regions.get(region, 0) | mask << claimed.shift
    holders = Holders(claimed.holders.shape, regions, runs)
    has_claimed = any(mask & low for mask in (*regions.values(), *runs.values()))
    if not has_claimed and stored_tensor is None:
        return None
    known = (claimed.shift, has_claimed, stored_tensor is not None, claimed.mesh, TITLES, claimed.axes)
    return MarkedSides(holders, *known, wrong=mask_of(wrong))


def _add_plain(regions: dict[Region, Mask], live: JobTensor) -> None:
    """Add the holders of a plain tensor: every rank has all of it."""
    for piece in live.pieces:
        if piece.claimed is not None and piece.claimed.size:
            regions[piece.claimed] = regions.get(piece.claimed, 0) | mask_of((piece.rank,))


def _exhibit(outcome: Outcome, live: JobTensor, saved: StoredTensor | None, wrong: frozenset[int]) -> Exhibit | None:
    """Return the table of ranks, differing ones first; ranks with equal parts share a row."""
    held_parts = dict(outcome.parts)
    alike: dict[tuple[bool, Region | None, Region | None], list[JobShard]] = {}
    for piece in sorted(live.pieces, key=lambda piece: (piece.rank not in wrong, piece.rank)):
        key = piece.rank in wrong, piece.claimed, held_parts.get(piece.rank)
        alike.setdefault(key, []).append(piece)
    unknown = frozenset(outcome.ranks) - wrong
    instead = INSTEAD.get(outcome.verdict, "other values")
    rows = [
        _row(pieces, held, saved, unknown, instead if is_wrong else "") for (is_wrong, _, held), pieces in alike.items()
    ]
    heads = ("", "claims", "holds of the checkpoint", "where the checkpoint has what it claims")
    return exhibit("What ranks hold, and where the checkpoint has it", heads, rows)


def _row(
    pieces: Sequence[JobShard], held: Region | None, saved: StoredTensor | None, unknown: frozenset[int], instead: str
) -> Row:
    """Return the row of ranks that hold the same; `instead` says what wrong ranks hold."""
    claimed = pieces[0].claimed
    claims = region_text(claimed) if claimed is not None else pieces[0].why
    holds = region_text(held) if held is not None else instead or claims
    if any(piece.rank in unknown for piece in pieces):
        holds = "not known"
    where = _bytes_text(saved, claimed) if saved is not None and claimed is not None else ""
    return Row(title_of([piece.rank for piece in pieces]), (Cell(claims), Cell(holds, bool(instead)), Cell(where)))


def _bytes_text(saved: StoredTensor, region: Region) -> str:
    """Say which bytes of which files have a part."""
    if not region.size:
        return NOTHING
    try:
        places = sorted(extents(saved, region), key=lambda one: (one.file, one.start))
    except DumpError as error:
        return error.message
    return listed((f"{one} of {printable(one.file)}" for one in places), MOST_EXTENTS) or "no file"
