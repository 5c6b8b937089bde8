"""Findings of one checkpoint alone: files, chunks, dtypes, ties."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked, Report, findings_in, grouped
from shardviz.checkpoint.comparing.equality import sample_of
from shardviz.checkpoint.coverage import coverage_of
from shardviz.checkpoint.formats.headers import read_safetensors
from shardviz.checkpoint.formats.pickle_reader import UnknownTypeError
from shardviz.checkpoint.formats.torch_file import BY_ITSELF
from shardviz.checkpoint.optimizer import check_optimizer, check_states
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.files import (
    ChunkOutOfBounds,
    DamagedHeader,
    FileCopiedOver,
    ForeignFile,
    MixedChunkTypes,
    ShardsOfTwoSaves,
    StaleFileIndex,
    TwoSetsOfWeights,
    UnknownPickledType,
    UnlistedChunk,
    UnreadableFile,
    UntiedCheckpointHead,
)
from shardviz.layout.dtypes import itemsize
from shardviz.layout.region import gaps_in, length
from shardviz.text import counted, listed, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from shardviz.checkpoint.records import ByteRange, Checkpoint, Chunk, StoredTensor, Tensor
    from shardviz.explain.finding import Finding

    Entries = dict[str, list[tuple[StoredTensor, Chunk]]]
    Span = tuple[int, int, str]

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "tok_embeddings.weight", "word_embeddings.weight", "shared.weight")
HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
TRIED = 3
"""Parts of tensors in a file that are looked for."""


def are_embeddings(name: str, second_name: str) -> bool:
    """Whether two names are those of an input and an output embedding, in either order.

    Example:
        >>> are_embeddings("lm_head.weight", "model.embed_tokens.weight"), are_embeddings("a.weight", "b.weight")
        (True, False)
    """
    pairs = (name, second_name), (second_name, name)
    return any(first.endswith(EMBEDDINGS) and second.endswith(HEADS) for first, second in pairs)


def check_checkpoint(checkpoint: Checkpoint, progress: Callable[[int, int], object] = lambda done, of: None) -> Report:
    """Return every finding that a checkpoint's metadata and the headers of its chunks show.

    Args:
        progress: Called with the tensors looked at, and their number.
    """
    results: list[Finding | NotChecked] = [
        *_files(checkpoint),
        *_index(checkpoint, copies := copied_files(checkpoint)),
        *_problems(checkpoint),
        *_check_unread_files(checkpoint),
    ]
    results += [second] if (second := check_second_set(checkpoint)) is not None else []
    foreign = foreign_files(checkpoint)
    results += foreign.values()
    for done, tensor in enumerate(checkpoint.tensors.values()):
        progress(done, len(checkpoint.tensors))
        is_copied = any(file in copies for file in tensor.files)
        results += [*([] if is_copied else _chunks(tensor)), *_check_chunks(checkpoint, tensor, foreign)]
    results += [*check_spans(checkpoint), *_ties(checkpoint), *check_optimizer(checkpoint), *check_states(checkpoint)]
    findings = findings_in(results)
    unchecked = [result for result in results if isinstance(result, NotChecked)]
    findings.sort(key=lambda finding: (finding.severity != "error", natural_key(finding.tensor), finding.kind))
    return Report(0, len(checkpoint.names), tuple(grouped(findings)), tuple(dict.fromkeys(unchecked)))


def _check_unread_files(checkpoint: Checkpoint) -> Iterator[NotChecked]:
    """Yield the files next to the weights that are not looked at."""
    if checkpoint.ranks:
        some = listed(map(printable, checkpoint.ranks))
        yield NotChecked("", f"the other ranks: it has one rank's parts, of {len(checkpoint.ranks)} ({some})", "run")
    if checkpoint.unread:
        some = listed(map(printable, checkpoint.unread))
        yield NotChecked("", f"files next to the weights ({some}): {BY_ITSELF}", "run")


def check_second_set(checkpoint: Checkpoint) -> Finding | NotChecked | None:
    """Compare a sample of each tensor of a file of all weights next to an index of several; None if there is none."""
    if not checkpoint.second_set:
        return None
    name = printable(checkpoint.second_set)
    before = f"{name} is next to the index, and transformers reads it before the index"
    try:
        tensors = read_safetensors(checkpoint.folder / checkpoint.second_set).tensors
    except DumpError as error:
        return TwoSetsOfWeights(name).finding("", (), f"{before}: {error.message}")
    names = sorted({*tensors, *checkpoint.tensors})
    odd = [one for one in names if not _are_alike(tensors.get(one), checkpoint.tensors.get(one))]
    if not odd:
        why = f"{name}, which transformers reads before the index: only a sample, which equals the index's files"
        return NotChecked("", why, "run")
    some = listed(map(printable, odd))
    differ = f"{counted(len(odd), 'tensor')} of {len(names):,} {'differs' if len(odd) == 1 else 'differ'} there: {some}"
    return TwoSetsOfWeights(name).finding("", (), f"{before}; {differ}")


def _are_alike(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two tensors have one dtype and shape, and equal values in a sample of them."""
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    sample, second_sample = sample_of(first), sample_of(second)
    return sample is None or second_sample is None or np.array_equal(sample, second_sample)


def _problems(checkpoint: Checkpoint) -> Iterator[Finding | NotChecked]:
    """Yield what the reader of its format found."""
    for problem in checkpoint.problems:
        if problem.explanation is not None:
            yield problem.explanation.finding(problem.name, (), problem.text, kind=problem.kind)
        else:
            yield NotChecked(problem.name, problem.text, "run")


def _files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield files that are missing or shorter than the checkpoint says."""
    users: dict[str, dict[str, int]] = {}
    for name, tensor in checkpoint.tensors.items():
        for chunk in tensor.chunks:
            if chunk.place:
                of_file = users.setdefault(chunk.place.file, {})
                of_file[name] = max(of_file.get(name, 0), chunk.place.start + chunk.place.size)
    for name, place in checkpoint.objects.items():
        users.setdefault(place.file, {})[name] = place.start + place.size
    for name, file in checkpoint.indexed.items():
        users.setdefault(file, {}).setdefault(name, 0)
    for file, ends in sorted(users.items()):
        size = checkpoint.file_sizes[file]
        cut = [name for name, end in ends.items() if size is None or end > size]
        if cut:
            has = "is missing" if size is None else f"has {size:,} bytes of at least {max(ends.values()):,}"
            what = f"{printable(file)} {has}: {counted(len(cut), 'entry' if len(cut) == 1 else 'entrie')} in it cannot"
            others = listed(printable(name) for name in cut if name not in checkpoint.names)
            text = f"{what} be read{': ' * bool(others)}{others}"
            yield of_tensors(UnreadableFile().finding("", (), text), [name for name in cut if name in checkpoint.names])


def copied_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the files of an index that are copies of others, with those: as long, with the same tensors."""
    names_in: dict[str, list[str]] = {}
    for name, tensor in checkpoint.tensors.items() if checkpoint.indexed else ():
        for file in tensor.files:
            names_in.setdefault(file, []).append(name)
    owners = {(tuple(names), checkpoint.file_sizes[file]): file for file, names in names_in.items()}
    due = set(checkpoint.indexed.items())
    owners |= {
        (tuple(names), checkpoint.file_sizes[file]): file
        for file, names in names_in.items()
        if all((name, file) in due for name in names)
    }
    twins = {file: owners[tuple(names), checkpoint.file_sizes[file]] for file, names in names_in.items()}
    return {file: twin for file, twin in twins.items() if twin != file}


def _index(checkpoint: Checkpoint, copies: Mapping[str, str]) -> Iterator[Finding]:
    """Yield contradictions between the index and the files: missing or misplaced tensors."""
    if not checkpoint.indexed:
        return
    for file, twin in copies.items():
        lost = [name for name, owner in checkpoint.indexed.items() if owner == file]
        text = f"{printable(file)} has the tensors of {printable(twin)}, and none of the {len(lost):,} that the index "
        finding = FileCopiedOver(printable(file), printable(twin)).finding("", (), f"{text}says are in it")
        yield of_tensors(finding, lost)
    for name, file in checkpoint.indexed.items():
        if checkpoint.file_sizes[file] is not None and file not in copies:
            tensor = checkpoint.tensors.get(name)
            if tensor is None or file not in tensor.files:
                where = f"{printable(tensor.files[0])} has it" if tensor else "no file has it"
                text = f"the index says that it is in {printable(file)}, but {where}"
                yield StaleFileIndex().finding(name, (), text)
    for name, tensor in checkpoint.tensors.items():
        if name not in checkpoint.indexed:
            text = f"{printable(tensor.files[0])} has it, but the index does not name it: loaders leave it out"
            yield StaleFileIndex().finding(name, (), text)


def _chunks(tensor: StoredTensor) -> Iterator[Finding | NotChecked]:
    """Yield gaps, overlaps and chunks out of bounds."""
    coverage = coverage_of(tensor)
    if coverage is None:
        text = f"whether its {len(tensor.chunks):,} chunks cover it: there are too many, or they are too irregular"
        yield NotChecked(tensor.name, text, "order")
        return
    chunks = counted(len(tensor.chunks), "chunk")
    if coverage.outside:
        first = coverage.outside[0]
        text = f"{len(coverage.outside)} of {chunks} reach beyond its shape {list(tensor.shape)}: the one at "
        text += f"{list(first.offsets)} has shape {list(first.sizes)}"
        yield ChunkOutOfBounds().finding(tensor.name, (), text)
    if coverage.missing:
        where = "not in its only chunk" if len(tensor.chunks) == 1 else f"in none of its {chunks}"
        text = f"{coverage.missing:,} of {tensor.size:,} elements are {where}, the first at {coverage.gap}"
        yield ShardsOfTwoSaves().finding(tensor.name, (), text)
    if coverage.repeated:
        text = f"{coverage.repeated:,} of {tensor.size:,} elements are in several of its {chunks}, the first at "
        text += f"{coverage.overlap}: a load may read any of them"
        yield ShardsOfTwoSaves(is_twice=True).finding(tensor.name, (), text, kind="duplicated")


def _unreadable(name: str, error: DumpError) -> Finding | NotChecked:
    """Report a chunk that can't be read; a tensor subclass is only not checked."""
    if not isinstance(error, UnknownTypeError):
        return UnreadableFile(is_whole=True).finding(name, (), error.message)
    if error.is_subclass:
        why = (
            "its content: a tensor subclass, such as a quantized weight, is pickled as code, which shardviz doesn't run"
        )
        return NotChecked(name, why, "run")
    return UnknownPickledType().finding(name, (), error.message)


def _check_chunks(
    checkpoint: Checkpoint, tensor: StoredTensor, foreign: Container[str]
) -> Iterator[Finding | NotChecked]:
    """Yield chunks that are damaged or stored in a different dtype or shape than recorded.

    Those in files of another save are reported with the file.
    """
    others: list[tuple[Chunk, str]] = []
    for chunk in tensor.chunks:
        if chunk.place is None:
            text = f"the checkpoint does not say which file has {chunk.region}"
            yield UnlistedChunk().finding(tensor.name, (), text)
        elif not (chunk.place.transformed or chunk.place.file in foreign) and _is_there(checkpoint, chunk.place):
            try:
                stored = tensor.stored(chunk)
            except DumpError as error:
                yield _unreadable(tensor.name, error)
                continue
            if stored.dtype != tensor.dtype or stored.shape != chunk.sizes:
                others.append((chunk, f"{stored.dtype}{list(stored.shape)}"))
    if others:
        chunk, has = others[0]
        text = (
            f"{len(others)} of {counted(len(tensor.chunks), 'chunk')} are not {tensor.dtype} of the shape they claim: "
        )
        text += f"the one at {list(chunk.offsets)} is {has}, not {tensor.dtype}{list(chunk.sizes)}"
        yield MixedChunkTypes(tensor.dtype).finding(tensor.name, (), text)


def _is_there(checkpoint: Checkpoint, place: ByteRange) -> bool:
    """Whether the bytes of a chunk are in its file; where not, that is reported once for the file."""
    size = checkpoint.file_sizes[place.file]
    return size is not None and place.start + place.size <= size


def _ties(checkpoint: Checkpoint) -> Iterator[Finding | NotChecked]:
    """Yield an output embedding that differs from the input one if the settings tie them."""
    if not checkpoint.tied:
        return
    inputs = [name for name in checkpoint.tensors if name.endswith(EMBEDDINGS)]
    heads = [name for name in checkpoint.tensors if name.endswith(HEADS)]
    if len(inputs) != 1 or len(heads) != 1:
        return
    embedding, head = checkpoint.tensors[inputs[0]], checkpoint.tensors[heads[0]]
    try:
        is_alike = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
        same = is_alike and np.array_equal(embedding.bits, head.bits)
    except DumpError as error:
        yield NotChecked(heads[0], f"whether it is {printable(inputs[0])}: {error.message}", "ties")
        return
    if not same:
        text = f"config.json ties it to {printable(inputs[0])}, but both are saved and they differ"
        yield UntiedCheckpointHead().finding(heads[0], (), text)


def foreign_files(checkpoint: Checkpoint) -> dict[str, Finding]:
    """Return the files of a DCP folder that are not those that its metadata describes."""
    entries: Entries = {}
    ends: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        for chunk in tensor.chunks:
            if chunk.place is not None and chunk.place.archive and not chunk.place.transformed:
                entries.setdefault(chunk.place.file, []).append((tensor, chunk))
                ends[chunk.place.file] = max(ends.get(chunk.place.file, 0), chunk.place.start + chunk.place.size)
    for place in checkpoint.objects.values():
        ends[place.file] = max(ends.get(place.file, 0), place.start + place.size)
    sizes = checkpoint.file_sizes
    long = [file for file in entries if (size := sizes[file]) is not None and size > ends[file]]
    return {
        file: _finding(file, sizes[file] or 0, ends[file], entries[file])
        for file in long
        if not any(_is_readable(tensor, chunk) for tensor, chunk in entries[file][:TRIED])
    }


def _is_readable(tensor: StoredTensor, chunk: Chunk) -> bool:
    try:
        tensor.stored(chunk)
    except UnknownTypeError:
        return True
    except DumpError:
        return False
    return True


def _finding(file: str, size: int, end: int, entries: list[tuple[StoredTensor, Chunk]]) -> Finding:
    few = min(len(entries), TRIED)
    text = (
        f"{printable(file)} has {size:,} bytes, the metadata describes {end:,} of them, and nothing is where it says: "
    )
    text += f"{few} of its {counted(len(entries), 'part')} of tensors were tried"
    finding = ForeignFile(printable(file)).finding("", (), text)
    return of_tensors(finding, dict.fromkeys(tensor.name for tensor, _ in entries))


def of_tensors(finding: Finding, names: Iterable[str]) -> Finding:
    """Return a file's finding as that of the tensors with a part in it."""
    return replace(finding, members=tuple(replace(finding, tensor=name) for name in names))


def check_spans(checkpoint: Checkpoint) -> Iterator[Finding | NotChecked]:
    """Yield bytes claimed by several tensors or by none, and unknown dtypes."""
    if checkpoint.kind != "safetensors":
        return
    for file, spans in _spans(checkpoint).items():
        yield from _overlaps(file, spans)
        yield from _unused(file, spans, checkpoint.file_sizes.get(file))
    strange = [name for name, one in checkpoint.tensors.items() if not itemsize(one.dtype)]
    if strange:
        types = listed(sorted({checkpoint.tensors[name].dtype for name in strange}))
        why = f"whether the bytes of {counted(len(strange), 'tensor')} fit: dtype {types} is not known here"
        yield NotChecked(strange[0] if len(strange) == 1 else "", why, "run")


def _spans(checkpoint: Checkpoint) -> dict[str, list[Span]]:
    """Return which bytes of each file are which tensor's, in order."""
    spans_of: dict[str, list[Span]] = {}
    for name, tensor in checkpoint.tensors.items():
        for chunk in tensor.chunks:
            if chunk.place is not None and chunk.place.size:
                place = chunk.place
                spans_of.setdefault(place.file, []).append((place.start, place.start + place.size, name))
    return {file: sorted(spans) for file, spans in spans_of.items()}


def _overlaps(file: str, spans: list[Span]) -> Iterator[Finding]:
    """Yield each tensor that shares bytes with one before it."""
    end, owner = 0, ""
    for start, stop, name in spans:
        if start < end:
            text = f"bytes {start:,} to {min(end, stop):,} of {printable(file)} are {printable(owner)}'s too"
            yield DamagedHeader().finding(name, (), text, kind="duplicated")
        if stop > end:
            end, owner = stop, name


def _unused(file: str, spans: list[Span], size: int | None) -> Iterator[Finding]:
    """Yield that a file has bytes between or behind its tensors that are none's."""
    used = [(0, spans[0][0]), *((start, stop) for start, stop, _ in spans)]
    if holes := gaps_in(used, size or 0):
        text = f"{length(holes):,} bytes of {printable(file)} belong to no tensor, the first at byte {holes[0][0]:,}"
        yield DamagedHeader().finding("", (), text, kind="incomplete")
