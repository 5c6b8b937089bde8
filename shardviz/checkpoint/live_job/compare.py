"""A job's dump compared with a checkpoint, tensor by tensor, with the ranks that differ.

What a dump does not show is reported as not compared: of a large shard it has a hash, which proves what is equal.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.all_tensors.lonely import lonely_outcome
from shardviz.checkpoint.comparing.all_tensors.moves import with_ties
from shardviz.checkpoint.comparing.all_tensors.odd_files import odd_file, open_steps, siblings
from shardviz.checkpoint.comparing.compare import hint, refuse_strangers
from shardviz.checkpoint.comparing.outcome import NOT_COMPARED, Comparison, Outcome
from shardviz.checkpoint.comparing.pairs import Pair, padding_notes, pair_tensors
from shardviz.checkpoint.live_job.job import Job, JobTensor
from shardviz.checkpoint.live_job.judging import judge
from shardviz.checkpoint.live_job.reading import RestoredTensor, restored_tensors
from shardviz.checkpoint.live_job.searching import MOST_READ, Search
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, has_padding, leaves
from shardviz.checkpoint.optimizer import state_names
from shardviz.checkpoint.records import Checkpoint, StoredTensor
from shardviz.explain.checkpoints.files import FileOfAnotherSave
from shardviz.text import counted, listed, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from shardviz.checkpoint.comparing.pairs import Pairs
    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.records import Chunk, Entry, Tensor
    from shardviz.layout.region import Region

    Side: TypeAlias = Job | Checkpoint
    Both: TypeAlias = tuple[str, str, JobTensor, Tensor]
    Judged = tuple[Outcome, JobTensor, Entry]

MAX_RANKS = 4


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
    pairs = pair_tensors(before, after, rules, _states)
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


def _states(side: Side) -> frozenset[str]:
    return side.states if isinstance(side, Job) else state_names(side)


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
        if live is not None and live.role == "buffer":
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
