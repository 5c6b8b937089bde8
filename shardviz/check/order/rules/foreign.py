"""`foreign` and `name-collision`: values that are no ids of their tensor; counts of ids.

Zeros are padding or memory that nothing was written to; a value that is not an id is NaN or was computed; an id of
another tensor identifies that tensor. Where ranks hold whole tensors that differ in their numbers only, another one on
each rank, the name itself means different tensors: `name-collision`. A pending sum (Partial) may hold zeros anywhere; a
plain tensor may end in padding as long as every id of it is held, and is `missing` some otherwise.

How far a whole shard of zeros goes says what went wrong: all weights of the model on all ranks, one weight on all
ranks, or some ranks. Only zeros beside a tensor that is complete are padding.

Ids are counted on a grid whose lines are the ends of all ranges, so that a tensor of any size costs what its cuts cost.
What an absent rank claims is taken as held: its absence is a finding of its own. A plain tensor claims nothing: its ids
must be held somewhere, and all equally often.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.explain import explain_elements
from shardviz.errors import ShardvizError
from shardviz.explain.placement.content import (
    AnotherCheckpoint,
    BufferNotWritten,
    CopiedTensor,
    KeyOfAWrapper,
    LeftOutOfLoad,
    LoadedIntoCopies,
    LoadedOnOneRank,
    LocalNumbering,
    NoWeightLoaded,
    OtherTensor,
    PartNotWritten,
    RanksNotLoaded,
    RanksNotWritten,
    RewrittenAfterStamping,
    RoundedIds,
    SharedMemory,
    WeightNotLoaded,
    ZerosAmongElements,
)
from shardviz.layout.dtypes import HALVES
from shardviz.layout.region import Ranges, Region, index_of, indices
from shardviz.relate.casts import rounded
from shardviz.text import listed, natural_key, starred

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding
    from shardviz.explain.placement.order import Disorder
    from shardviz.layout.mesh import Coord


MAX_CELLS = 1 << 27


class CountError(ShardvizError):
    """Ids that are too many to be counted one by one."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How often the ids of a tensor are held.

    Attributes:
        copies: How often each should be.
        num_missing: Ids held less often.
        num_duplicated: Ids held more often.
        first_missing: The element number of the first id held less often; -1 if there is none.
        first_duplicated: The same of the first held more often.
    """

    copies: int
    num_missing: int
    num_duplicated: int
    least: int
    most: int
    first_missing: int
    first_duplicated: int

    @property
    def even(self) -> bool:
        """Whether every id is held as often as it should be."""
        return not self.num_missing and not self.num_duplicated


def count_ids(case: Case) -> Counts:
    """Count how often each id of a case is held.

    Raises:
        CountError: The shards are cut in too many places to count.
    """
    grid = _Grid(case)
    times: Counter[Region] = Counter(case.regions.values())
    if case.claimed is not None:
        times.update(case.claimed.region(coord) for coord in case.absent)
    for region, count in times.items():
        grid.add(region, count)
    for ids in case.ids.values():
        grid.add_ids(ids)
    if case.claimed is None:
        return grid.counts(grid.usual(bool(case.changing_axes)), claimed=False)
    axes = (*case.claimed.replicate_axes, *(axis for axis, _ in case.claimed.partial))
    return grid.counts(case.mesh.size_over(axes), claimed=True)


class _Grid:
    """The tensor cut at every end of a range; each cell is held as a whole or not at all."""

    def __init__(self, case: Case) -> None:
        self.shape = case.shape
        regions = set(case.regions.values())
        if case.claimed is not None:
            regions |= {case.claimed.region(coord) for coord in case.absent}
        self.lines = [self._cuts(dim, regions, each=bool(case.ids)) for dim in range(len(self.shape))]
        self.cells = tuple(len(line) - 1 for line in self.lines)
        if math.prod(self.cells) > MAX_CELLS:
            raise CountError(
                f"{case.name}: shards cut it into {math.prod(self.cells):,} parts, more than {MAX_CELLS:,}"
            )
        self.held = np.zeros(self.cells, np.int64)

    def _cuts(self, dim: int, regions: set[Region], *, each: bool) -> NDArray[np.int64]:
        size = self.shape[dim]
        if each:
            return np.arange(size + 1)
        ends = {end for region in regions for range_ in region.dims[dim] for end in range_}
        return np.array(sorted(ends | {0, size}), np.int64)

    def add(self, region: Region, times: int) -> None:
        """Count a region that so many ranks hold."""
        if not region.size:
            return
        if not self.cells:
            self.held += times
            return
        cells = [self._cells_of(dim, ranges) for dim, ranges in enumerate(region.dims)]
        np.add.at(self.held, np.ix_(*cells), times)

    def add_ids(self, ids: NDArray[np.int64]) -> None:
        """Count ids one by one; values that are not ids of this tensor do not count."""
        places = ids[ids > 0] - 1
        self.held += np.bincount(places, minlength=self.held.size).reshape(self.cells)

    def _cells_of(self, dim: int, ranges: Ranges) -> NDArray[np.int64]:
        line = self.lines[dim]
        spans = tuple((int(np.searchsorted(line, start)), int(np.searchsorted(line, stop))) for start, stop in ranges)
        return indices(spans)

    def usual(self, is_cut: bool) -> int:
        """Return how often ranks hold an element of a plain tensor on the average.

        So one odd copy of a part is one too many of what it is. Where ranks hold different parts, what is on none of
        them counts apart; if all hold the same part, it is there too often.
        """
        weights = self._weights()
        there = weights[self.held > 0] if is_cut else weights
        return max(math.ceil(int((weights * self.held).sum()) / max(int(there.sum()), 1) - 0.5), 1)

    def _weights(self) -> NDArray[np.int64]:
        """Return how many elements each cell has."""
        weights = np.ones((), np.int64)
        for line in self.lines:
            weights = np.multiply.outer(weights, np.diff(line))
        return weights

    def counts(self, copies: int, *, claimed: bool) -> Counts:
        """Sum up; without a claim every id must be held, and if all are, equally often."""
        weights = self._weights()
        least, most = (int(self.held.min()), int(self.held.max())) if self.held.size else (copies, copies)
        few, many = self.held < (copies if claimed else 1), self.held > copies
        if least < most and not few.any() and not many.any():
            few = self.held < copies
        return Counts(
            copies,
            int(weights[few].sum()),
            int(weights[many].sum()),
            least,
            most,
            self._first_element(few),
            self._first_element(many),
        )

    def _first_element(self, cells: NDArray[np.bool_]) -> int:
        if not cells.any():
            return -1
        cell = np.unravel_index(int(np.argmax(cells)), self.cells) if self.cells else ()
        index = tuple(int(line[at]) for line, at in zip(self.lines, cell, strict=True))
        return int(np.ravel_multi_index(index, self.shape)) if self.shape else 0


MAX_RANKS = 4
MAX_COMPARED = 64
"""Tensors that are asked whose elements they have."""

FEW = 4
"""Fewer elements that fit a rounding may be another tensor's."""
CHANCE = 0.1
"""The part of a shard's values that a checkpoint may have by chance, if nothing of it was loaded."""


def check_foreign(case: Case) -> Iterator[Finding]:
    """Yield the findings about elements that are not the tensor's own.

    Raises:
        CountError: The ids are too many to be counted.
    """
    foreign = {coord: ids for coord, ids in case.ids.items() if np.any(ids <= 0)}
    if not foreign or (case.claimed is None and not any(np.any(ids < 0) for ids in foreign.values())):
        return
    owners = {coord: _owner(case, ids) for coord, ids in foreign.items()}
    names = {name for name in owners.values() if name}
    mixed = len(names) > 1 or (len(names) == 1 and len(foreign) < len(case.shards))
    if dtype := _rounded_to(case):
        yield _rounded_ids(case, foreign, dtype)
    elif mixed and all(owners.values()) and _may_be_renumbered(case, names):
        by_rank = owners_of(case)
        named = listed(f"{name} on rank {rank}" for rank, name in by_rank.items())
        distinct = len(set(by_rank.values()))
        sentence = f"ranks use this name for {distinct} different tensors of the unsharded model: {named}"
        yield case.finding(LocalNumbering(), by_rank, sentence, held="a different tensor on each rank")
    elif names and all(owners.values()):
        yield _other_tensor(case, foreign, sorted(names, key=natural_key))
    else:
        yield _foreign_values(case, foreign)


def _rounded_to(case: Case) -> str:
    """Return the narrower dtype to which all ids were rounded; empty if they weren't."""
    first = case.dump.first_ids.get(case.name)
    if first is None or case.numel < FEW:
        return ""
    for dtype in HALVES:
        pairs = [(case.local_ids(coord), _own_ids(case, coord)) for coord in case.shards]
        as_of_model = [(np.where(ids > 0, ids + first - 1, -1 - ids), own_ids + first - 1) for ids, own_ids in pairs]
        if all(np.array_equal(held, rounded(due, dtype)) for held, due in as_of_model):
            return dtype
    return ""


def _own_ids(case: Case, coord: Coord) -> NDArray[np.int64]:
    is_split = case.claimed is not None and case.claimed.flat is None
    return case.claimed_ids(coord) if is_split else Region.whole(case.shape).flat_ids(case.shape) + 1


def _rounded_ids(case: Case, foreign: dict[Coord, NDArray[np.int64]], dtype: str) -> Finding:
    coord = next(iter(foreign))
    lost = int(np.count_nonzero(case.ids[coord] != _own_ids(case, coord)))
    return case.finding(
        RoundedIds(dtype, "buffer" if case.tensor.role == "buffer" else "weight"),
        map(case.rank, foreign),
        f"every element is its own, rounded to {dtype}: {lost:,} of the {case.ids[coord].size:,} ids on rank "
        f"{case.rank(coord)} lost bits",
        kind="foreign",
        held=f"its own elements, rounded to {dtype}",
    )


def _owner(case: Case, ids: NDArray[np.int64]) -> str:
    """Return the one tensor that a whole shard is of; empty if it is of several, or of none."""
    if np.any(ids >= -1):
        return ""
    first, last = case.owner(-1 - int(ids.max()))[0], case.owner(-1 - int(ids.min()))[0]
    return first if first == last else ""


def owners_of(case: Case) -> dict[int, str]:
    """Return the one tensor of each rank's whole shard; empty if a shard mixes several."""
    return {
        shard.rank: _owner(case, case.ids[coord]) if coord in case.ids and np.any(case.ids[coord] <= 0) else case.name
        for coord, shard in case.shards.items()
    }


def _may_be_renumbered(case: Case, names: Iterable[str]) -> bool:
    """Whether each rank has whole tensors that it numbers itself: names differ in numbers only."""
    whole = all(tuple(shard.body.local_shape) == case.shape for shard in case.shards.values())
    return whole and {starred(name) for name in names} == {starred(case.name)}


def _other_tensor(case: Case, foreign: dict[Coord, NDArray[np.int64]], names: Sequence[str]) -> Finding:
    coord = next(iter(foreign))
    at = case.owner(-1 - int(foreign[coord].flat[0]))[1]
    of_it = f"element {at} of {_owner(case, foreign[coord])}"
    is_own_part = len(names) == 1 and int(_own_ids(case, coord).flat[0]) - 1 == at
    begins = "" if is_own_part else f": rank {case.rank(coord)}'s shard begins with {of_it}"
    return case.finding(
        SharedMemory() if _share_memory(case, foreign) else _exchanged_or_copied(case, foreign, names),
        map(case.rank, foreign),
        f"{len(foreign):,} of {len(case.shards):,} ranks hold {listed(names, MAX_RANKS)} under this name{begins}",
        held=f"the elements of {listed(names, MAX_RANKS)}",
    )


def _exchanged_or_copied(case: Case, foreign: Collection[Coord], names: Sequence[str]) -> Disorder:
    """Return the cause of another tensor's elements: were names exchanged, or does that tensor have them too?"""
    owner = names[0]
    is_everywhere = len(names) == 1 and len(foreign) == len(case.shards)
    if case.tensor.role != "param" or not is_everywhere or not _is_own(case.dump, owner):
        return OtherTensor(case.tensor.role == "buffer")
    alike = [
        name
        for tensor in islice(case.dump.at("stamped"), MAX_COMPARED)
        for name in tensor.names
        if tensor.role == case.tensor.role and tensor.shape == case.shape and not _is_own(case.dump, name)
    ]
    before = list(case.dump.stamps)
    before = before[: before.index(owner)]
    several = len(alike) > 1 and all(name in before and _first_owner(case, name) == owner for name in alike)
    layers = () if several else _layers(owner, case.name)
    return CopiedTensor(*(layers[:1] or (owner,)), several, *layers[1:])


def _layers(owner: str, name: str) -> tuple[str, str] | tuple[()]:
    """Return the layers of two tensors of one kind, up to the number in which their names differ; else nothing."""
    words, own_words = owner.split("."), name.split(".")
    differing = [at for at, pair in enumerate(zip(words, own_words, strict=False)) if len(set(pair)) > 1]
    if len(words) != len(own_words) or len(differing) != 1 or not words[differing[0]].isdigit():
        return ()
    end = differing[0] + 1
    is_layer = own_words[differing[0]].isdigit() and end < len(words)
    return (".".join(words[:end]), ".".join(own_words[:end])) if is_layer else ()


def _is_own(dump: Dump, name: str) -> bool:
    """Whether every rank has only elements of a tensor under its name."""
    tensor = dump.stamped.get(name)
    return tensor is not None and all(shard.held is not None for shard in tensor.shards.values())


def _first_owner(case: Case, name: str) -> str:
    """Return the tensor whose element is the first that the first rank has under a name; empty if none."""
    ids = case.dump.local_ids(case.dump.stamped[name].first, name)
    return case.owner(-1 - int(ids.flat[0]))[0] if ids.size and ids.flat[0] < -1 else ""


def _share_memory(case: Case, foreign: Collection[Coord]) -> bool:
    """Whether each rank that holds another tensor has both under names that share storage."""
    records = case.dump.files.ranks
    return all(
        any({case.name, _owner(case, case.ids[coord])} <= {*group} for group in records[case.rank(coord)].tied)
        for coord in foreign
    )


def _foreign_values(case: Case, foreign: dict[Coord, NDArray[np.int64]]) -> Finding:
    reference = case.dump.files.run.reference
    zeros = sum(int(np.count_nonzero(ids == 0)) for ids in foreign.values())
    none = sum(int(np.count_nonzero(ids == -1)) for ids in foreign.values())
    num_others = sum(int(np.count_nonzero(ids < -1)) for ids in foreign.values())
    place = f"in {reference}" if reference else "an id" if none in (1, case.num_held) else "ids"
    parts = [f"{zeros:,} {'is' if zeros == 1 else 'are'} zero"] if zeros else []
    if none:
        parts.append(f"{none:,} {'is' if none == 1 else 'are'} not {place}")
    if num_others:
        ids = next(ids for ids in foreign.values() if np.any(ids < -1))
        name, at = case.owner(-1 - int(ids[ids < -1][0]))
        first_id = f"the first is element {at} of {name}"
        parts.append(f"{num_others:,} {'is' if num_others == 1 else 'are'} from other tensors ({first_id})")
    counts = count_ids(case)
    lost = counts.num_missing
    coord, ids = next(iter(foreign.items()))
    first = index_of(int(np.argmax(ids <= 0)), ids.shape)
    cause, clause = _explain(case, zeros, none)
    where = "lost" if counts.copies == 1 or not counts.least else "not in every copy"
    how_many = "all" if lost == case.numel and where == "lost" else f"{lost:,}"
    details = (f"{how_many} of the tensor's {case.numel:,} elements are {where}{clause}",) if lost else ()
    of_all = {none: f"none of the elements held is {place}", zeros: "every element held is zero"}
    which = f"of the {case.num_held:,} elements held, {' and '.join(parts)}, the first at {first} of rank "
    which += f"{case.rank(coord)}'s shard"
    return case.finding(
        cause,
        map(case.rank, foreign),
        f"{of_all.get(case.num_held, which)}{'' if lost else clause}",
        kind="foreign",
        details=details,
        generic=all(np.all(ids == -1) for ids in foreign.values()) or _is_unrelated(case.dump),
    )


def _is_unrelated(dump: Dump) -> bool:
    """Whether a reference has no weight of the model: zeros then mean nothing of their own."""
    return bool(dump.files.run.reference) and dump.all_without_ids in ("values", "mixed")


def _explain(case: Case, zeros: int, none: int) -> tuple[Disorder, str]:
    """Return why a case has foreign values, and how the sentence ends that says so."""
    shifted = next(explain_elements(case), None) if case.claimed is not None else None
    if shifted is not None:
        return shifted.cause, shifted.clause
    if case.dump.files.run.reference and (none or _is_unrelated(case.dump)):
        ranks = sorted(case.rank(coord) for coord, ids in case.ids.items() if np.mean(ids > 0) <= CHANCE)
        claimed = case.claimed
        is_some_right = claimed is not None and any(
            region.size and region == claimed.region(coord) for coord, region in case.regions.items()
        )
        lack_all = ranks and len(ranks) >= sum(bool(ids.size) for ids in case.ids.values())
        of_ranks = RanksNotLoaded(case.dump.files.run.reference, tuple(ranks)) if lack_all else None
        not_loaded = of_ranks if is_some_right else _skipped_load(case)
        cause = LeftOutOfLoad if _are_others_own(case) else AnotherCheckpoint
        return not_loaded or cause(case.dump.files.run.reference), ""
    if none and all(np.all(ids == -1) for ids in case.ids.values()):
        holders = sorted(case.rank(coord) for coord, region in case.regions.items() if region.size)
        return LoadedOnOneRank(holders[0]) if len(holders) == 1 else RewrittenAfterStamping(), ""
    if none:
        return RewrittenAfterStamping(), ""
    return (_skipped_load(case) or cause_of_zeros(case)) if zeros else OtherTensor(), ""


def _are_others_own(case: Case) -> bool:
    """Whether the tensor has none of its values, and another parameter of the model has all of its own."""
    has_none = not any(np.any(ids > 0) for ids in case.ids.values())
    return has_none and any(_is_own(case.dump, name) for name in case.dump.by_name("stamped", "param"))


def _skipped_load(case: Case) -> Disorder | None:
    """Return the cause if a load had a different prefix or read the values into a copy."""
    keys = {name: key for record in case.dump.files.ranks.values() for name, key in record.skipped_keys}
    key = keys.get(case.name)
    if key is None:
        return None
    if key == case.name:
        return LoadedIntoCopies()
    longer, shorter = sorted((key, case.name), key=len, reverse=True)
    if longer.endswith(shorter):
        return KeyOfAWrapper(longer.removesuffix(shorter), key == longer, is_prefix=True)
    extra = Counter(longer.split(".")) - Counter(shorter.split("."))
    return KeyOfAWrapper("".join(f"{word}." for word in extra), key == longer, is_prefix=False)


def cause_of_zeros(case: Case) -> Disorder:
    """Return why a case holds zeros and no other foreign values."""
    shards = [coord for coord, shard in case.shards.items() if 0 not in shard.body.local_shape]
    blank = [coord for coord in shards if coord in case.ids and not case.ids[coord].any()]
    if not blank:
        return PartNotWritten() if count_ids(case).num_missing else ZerosAmongElements()
    if len(blank) < len(shards):
        return RanksNotWritten(tuple(sorted(map(case.rank, blank))))
    if case.tensor.role != "param":
        return BufferNotWritten()
    is_nothing_loaded = case.dump.all_without_ids == "zeros" and len(case.dump.without_ids) > 1
    return NoWeightLoaded() if is_nothing_loaded else WeightNotLoaded(*_collective_of(case))


def _collective_of(case: Case) -> tuple[str, tuple[str, ...]]:
    """Return the collective that gave all ranks the tensor, and the lines that call it."""
    ranks = case.dump.files.ranks
    records = [[sent for sent in ranks[rank].sent if sent.name == case.name] for rank in case.tensor.shards]
    if not all(records):
        return "", ()
    return records[0][0].op, tuple(dict.fromkeys(sent.place for of_rank in records for sent in of_rank))
