"""Reading, checking and comparing dumps in a thread that posts messages, and whether files have changed since."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files, read_run
from shardviz.errors import ShardvizError
from shardviz.picture.model.nest import nest

from .model.document import Document
from .model.messages import DocumentRead, DumpsCompared, JobCompared, Progressed, ReadFailed, RunRead
from .model.tree import lines_of, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from textual.message import Message

    from shardviz.dump.read import DumpFiles


Stamps = dict[str, tuple[int, int]]
"""For each file the time at which it was written last, in nanoseconds, and its size."""

MOST_FILES = 20_000
"""Files that are looked at: a folder with more of them is no longer looked through in a frame's time."""

DEEPEST = 3
"""Folders within folders that a checkpoint has at most."""


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Return the time and the size of every file in some folders, or of files themselves.

    What cannot be read now has none, and neither have files that are still being written under a temporary name.
    """
    stamps: Stamps = {}
    for path in paths:
        for entry, status in _files(os.fspath(path), DEEPEST):
            stamps[entry] = (status.st_mtime_ns, status.st_size)
            if len(stamps) >= MOST_FILES:
                return stamps
    return stamps


def _files(path: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files in a folder; links are looked at themselves, and not followed out of it."""
    try:
        if not os.path.isdir(path):
            yield path, os.stat(path)
            return
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(".tmp"):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    yield entry.path, entry.stat(follow_symlinks=False)
                elif depth > 1:
                    yield from _files(entry.path, depth - 1)
    except OSError:
        return


DIALOGS = (".screens.dialogs",)
"""Modules that are read while the user reads: the one that reads Markdown takes as long as three frames."""

MOST_WARM = 32
"""How many lines of the tree have the holders of their tensors worked out before they are looked at."""


def load(path: Path, post: Callable[[Message], object], read: Callable[[Document], Message] = DocumentRead) -> None:
    """Read a dump, even with damaged files, then check it; post the document after each, as a `read` message.

    What `run.json` says is posted before any rank is read, and what one rank shows before the others are.
    """

    def progressed(count: int, files: int) -> None:
        post(Progressed(path, count, files))

    def first(files: DumpFiles) -> None:
        post(read(Document(path, dump_of(files), is_partial=True)))

    try:
        post(RunRead(path, read_run(path)))
        files = read_files(path, strict=False, on_progress=progressed, on_first=first)
    except ShardvizError as error:
        post(ReadFailed(error))
        return
    document = Document(path, dump_of(files))
    post(read(document))
    document = checked(document)
    _ = document.by_finding
    gc.freeze()  # a dump of a thousand ranks is a million objects that the collector would walk at every frame
    post(read(document))
    warm(document)
    for name in DIALOGS:
        import_module(name, __package__)
    gc.freeze()


def warm(document: Document) -> None:
    """Work out what the first keys will need: the step, the bytes, layouts in words, and the first tensors' holders."""
    usage = document.usage
    _ = document.step, document.counted, usage.fullest_first, usage.each_fullest_first, document.heats
    lines_of(usage.tree, order=usage.largest_first)
    for entry in document.entries:
        _ = entry.layout, entry.facts, entry.title, entry.axes
    lines = (line.entry for line in lines_of(tree_of(document.entries)))
    for index in islice((entry for entry in lines if entry is not None), MOST_WARM):
        with suppress(ShardvizError):
            sides = document.sides(index)
            _ = [nest(sides, dim) for dim in range(len(sides.holders.shape))]


def load_difference(here: Document, there: Document, post: Callable[[Message], object]) -> None:
    """Compare two dumps that are checked, and post the difference."""
    from shardviz.check.diff import compare
    from shardviz.plan.beside import sizes_beside

    if here.report is not None and there.report is not None:
        plans = sizes_beside(here.dump.files, there.dump.files)
        post(DumpsCompared(compare(here.dump, there.dump, (here.report, there.report), plans)))


def load_compared(document: Document, path: Path, post: Callable[[Message], object]) -> None:
    """Compare a dump that is read with a checkpoint, and post what became of every tensor."""
    from shardviz.checkpoint.beside.compare import compare_with_job
    from shardviz.checkpoint.beside.job import job_of
    from shardviz.checkpoint.open import open_checkpoint

    from .model.pairs import Compared

    try:
        job, checkpoint = job_of(document.dump), open_checkpoint(path)
        post(JobCompared(Compared(document, job, checkpoint, compare_with_job(job, checkpoint))))
    except ShardvizError as error:
        post(ReadFailed(error))


def checked(document: Document) -> Document:
    """Return the document with its report."""
    from shardviz.check.run import report_on

    try:
        return replace(document, report=report_on(document.dump))
    except ShardvizError as error:
        return replace(document, failed=error.message)
