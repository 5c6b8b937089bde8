"""A job's dump compared with a checkpoint, tensor by tensor, with the ranks that differ.

What a dump does not show is reported as not compared: of a large shard it has a hash, which proves what is equal. What
is not where it claims to be is searched for in the checkpoint, by its hash or by its values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.all_tensors.lonely import lonely_outcome
from shardviz.checkpoint.comparing.all_tensors.moves import with_ties
from shardviz.checkpoint.comparing.all_tensors.odd_files import odd_file, open_steps, siblings, tensor_in
from shardviz.checkpoint.comparing.compare import hint, refuse_strangers
from shardviz.checkpoint.comparing.outcome import NOT_COMPARED, Comparison, Outcome
from shardviz.checkpoint.comparing.pairs import Pair, padding_notes, pair_tensors
from shardviz.checkpoint.live_job.job import Job, JobTensor
from shardviz.checkpoint.live_job.judging import judge
from shardviz.checkpoint.live_job.reading import Reader, RestoredTensor, restored_tensors
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, has_padding, leaves
from shardviz.checkpoint.optimizer import state_of
from shardviz.checkpoint.records import Checkpoint, StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.files import FileOfAnotherSave
from shardviz.layout.region import Region, region_of
from shardviz.reference.lookup import UNPLACED, locate
from shardviz.relate.orders import layouts_of
from shardviz.text import counted, listed, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from shardviz.checkpoint.comparing.pairs import Pairs, Side
    from shardviz.checkpoint.live_job.job import JobShard
    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.records import Chunk, Entry, Tensor

    Both: TypeAlias = tuple[str, str, JobTensor, Tensor]
    Judged = tuple[Outcome, JobTensor, Entry]

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


MAX_RANKS = 4

FEW_NAMED = 4


def compare_with_job(
    before: Side,
    after: Side,
    rules: Sequence[Rule] = (),
    progress: Callable[[int, int], object] = lambda done, of: None,
    also: Sequence[Checkpoint] = (),
) -> Comparison:
    """Compare what the ranks of a job hold with a checkpoint; either may come first.

    Args:
        progress: Called with the tensors compared, and their number.
        also: Checkpoints of other steps, besides those beside the checkpoint.

    Raises:
        ShardvizError: They have no tensor in common, or a line of the map fits none.
    """
    job, checkpoint = (before, after) if isinstance(before, Job) else (after, before)
    assert isinstance(job, Job), "one is a job"
    assert isinstance(checkpoint, Checkpoint), "and the other is not"
    pairs = pair_tensors(before, after, rules)
    refuse_strangers(pairs, before, after)
    steps = [*also, *open_steps(siblings(checkpoint.path), [checkpoint.path])]
    search = Search(checkpoint.tensors, steps)
    judged: list[tuple[Outcome, JobTensor, Entry]] = []
    matched_tensors, source_names = _paired_tensors(pairs)
    for done, (name, saved_name, live, saved) in enumerate(matched_tensors):
        progress(done, len(matched_tensors))
        outcome = Outcome(name, saved_name, "equal", is_made=isinstance(saved, (RestoredTensor, MappedTensor)))
        outcome = _but_for_padding(judge(outcome, live, saved, job.dump, search), saved)
        judged.append((outcome, live, saved))
    outcomes = with_odd_file(judged)
    outcomes += _lonely([pair for pair in pairs.lonely if pair.name not in source_names], job, pairs, search)
    every = tuple(outcomes)
    more = () if rules else hint(before, after, every)
    return Comparison(every, (*pairs.notes, *padding_notes(pairs.both), *_notes(pairs, job, search), *more))


def _but_for_padding(outcome: Outcome, saved: Tensor) -> Outcome:
    """Return an outcome; not compared if the job's hashes include padding."""
    if outcome.verdict in ("equal", "cast") or not isinstance(saved, MappedTensor) or not has_padding(saved.node):
        return outcome
    why = "by the map, some of the job's tensor is padding, and its shards' hashes include that"
    return outcome.became("not-compared", why)


def _paired_tensors(pairs: Pairs) -> tuple[list[Both], set[str]]:
    """Return the tensors that job and checkpoint both have, and job names that the map uses."""
    direct: list[Both] = []
    turned: list[tuple[MappedTensor, Tensor]] = []
    for pair in pairs.both:
        live, saved = (pair.first, pair.second) if isinstance(pair.first, JobTensor) else (pair.second, pair.first)
        if isinstance(live, JobTensor) and saved is not None:
            direct.append((pair.name, pair.other_name, live, saved))
        else:
            turned += [
                (made_tensor, counterpart)
                for made_tensor, counterpart in (pair.both, pair.both[::-1])
                if isinstance(made_tensor, MappedTensor)
                and any(isinstance(leaf, JobTensor) for leaf in leaves(made_tensor.node))
            ]
    given_tensors = restored_tensors(turned)
    return [*direct, *((name, one.name, one.live, one) for name, one in given_tensors.items())], set(given_tensors)


def _lonely(pairs: Sequence[Pair], job: Job, every: Pairs, search: Search) -> Iterator[Outcome]:
    """Yield outcomes of tensors that only one side has, except a job's unsaved buffers."""
    saved_by_name = {
        pair.name: side for pair in every.both for side in pair.both if not isinstance(side, (JobTensor, MappedTensor))
    }
    equal_pairs = [(Outcome(name, "", "equal"), Pair(name, entry, entry)) for name, entry in saved_by_name.items()]
    for pair in pairs:
        live = next((one for one in (pair.first, pair.second) if isinstance(one, JobTensor)), None)
        outcome = lonely_outcome(pair, "job" if live is not None else "checkpoint")
        if (live is not None and live.role == "buffer") or _is_counter(pair):
            continue
        if live is not None:
            yield _as_tied(outcome, live, saved_by_name, job, search)
        elif job.missing_ranks or pair.name in job.without_values:
            why = f"only the checkpoint has it, and the dump lacks {named_ranks(job.missing_ranks)}"
            if pair.name in job.without_values:
                why = "the dump was captured with stamps: it has places of elements, not values"
            yield outcome.became("not-compared", why)
        else:
            yield with_ties([*equal_pairs, (outcome, pair)])[-1][0]


def _is_counter(pair: Pair) -> bool:
    """Whether a checkpoint's tensor is a number that an optimizer keeps, such as a step: a job's dump has none."""
    saved = next((one for one in (pair.first, pair.second) if isinstance(one, StoredTensor)), None)
    return saved is not None and not saved.shape and state_of(saved.name) is not None


def _as_tied(outcome: Outcome, live: JobTensor, saved_by_name: dict[str, Tensor], job: Job, search: Search) -> Outcome:
    """Compare a tensor missing from the checkpoint by the tensor that it is tied to in the job."""
    twin = next((name for name in live.tied if name in saved_by_name), None)
    if twin is None:
        return outcome
    twin_outcome = judge(outcome.became("equal", "", other=twin), live, saved_by_name[twin], job.dump, search)
    words = f"only the job has it, sharing the storage of {printable(twin)}"
    return outcome.became("tied", words, other=twin) if twin_outcome.verdict in ("equal", "cast") else twin_outcome


def _notes(pairs: Pairs, job: Job, search: Search) -> Iterator[str]:
    """Yield what was left out."""
    if job.missing_ranks:
        yield f"not compared: the shards of {named_ranks(job.missing_ranks)}, whose files the dump lacks"
    lonely = chain.from_iterable((pair.first, pair.second) for pair in pairs.lonely)
    buffers = [printable(one.name) for one in lonely if isinstance(one, JobTensor) and one.role == "buffer"]
    if buffers:
        what = counted(len(buffers), "buffer")
        yield f"not compared: {what} that only the job has, as those that are not saved: {listed(buffers)}"
    if counters := [printable(pair.name) for pair in pairs.lonely if _is_counter(pair)]:
        what, names = counted(len(counters), "number"), listed(counters, FEW_NAMED)
        yield f"not compared: {what} that the optimizer keeps, which a job's dump doesn't have: {names}"
    if search.is_over:
        yield f"where shards are that differ was looked for until {MOST_READ:,} bytes were read, not in all tensors"


def with_odd_file(judged: Sequence[Judged]) -> list[Outcome]:
    """Say that all parts which ranks hold differently are in one file of the checkpoint."""
    odd = odd_file(1, (_files(*one) for one in judged if one[0].verdict not in NOT_COMPARED))
    if odd is None or not odd.differs:
        return [outcome for outcome, _, _ in judged]
    ranks = named_ranks({rank for outcome, _, _ in judged for rank in outcome.ranks}, MAX_RANKS)
    cause = FileOfAnotherSave(odd, "checkpoint", "job", ranks=ranks)
    return [
        outcome.became("other", outcome.why, cause, ranks=outcome.ranks) if outcome.is_open else outcome
        for outcome, _, _ in judged
    ]


def _files(outcome: Outcome, live: JobTensor, saved: Entry) -> tuple[set[str], set[str]]:
    """Return the files that have what ranks hold, and those that have something else."""
    if not isinstance(saved, StoredTensor):
        return set(), set()
    wrong = [piece.claimed for piece in live.pieces if piece.rank in outcome.ranks and piece.claimed is not None]
    if outcome.ranks and not wrong:
        return set(), set(saved.files)
    files: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in saved.chunks:
        if chunk.place is not None:
            files[any(_share(region, chunk) for region in wrong)].add(chunk.place.file)
    return files[False], files[True]


def _share(region: Region, chunk: Chunk) -> bool:
    """Whether a part and a chunk have elements in common."""
    if len(region.dims) != len(chunk.sizes):
        return True
    spans = zip(chunk.offsets, chunk.sizes, strict=True)
    return all(
        any(max(start, first) < min(stop, first + size) for start, stop in ranges)
        for ranges, (first, size) in zip(region.dims, spans, strict=True)
    )
