"""Reading, checking and comparing in a thread that shows what it has read, and whether files have changed since."""

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
from shardviz.picture.model.drawing import nest

from .model.document import Document
from .model.stored import StoredDocument
from .model.tree import lines_of, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from shardviz.checkpoint.records import Checkpoint
    from shardviz.dump.read import DumpFiles

    Show = Callable[[object], object]
    """Shows what was read: a run, a document, a comparison, how far it is, or why it cannot be read."""


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
    for file in islice((file for path in paths for file in _files(os.fspath(path))), MOST_FILES):
        with suppress(OSError):
            status = os.lstat(file)
            stamps[file] = (status.st_mtime_ns, status.st_size)
    return stamps


def _files(path: str) -> Iterator[str]:
    """Yield the files in a folder, or the file itself; links are looked at themselves, and not followed."""
    if os.path.isfile(path):
        yield os.path.realpath(path)
    for folder, folders, names in os.walk(path):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        yield from (os.path.join(folder, name) for name in (*names, *links) if not name.endswith(".tmp"))
        if folder[len(path) :].count(os.sep) >= DEEPEST - 1:
            folders.clear()


MOST_WARM = 32
"""How many lines of the tree have the holders of their tensors worked out before they are looked at."""

MOST_STEPS = 100
"""How many times it is said how far a dump has been read."""


def load(path: Path, show: Show) -> None:
    """Read a dump, even with damaged files, then check it; show the document after each.

    What `run.json` says is shown before any rank is read, and what one rank has before the others are.
    """

    def progressed(count: int, files: int) -> None:
        if count % max(files // MOST_STEPS, 1) == 0:
            show(f"reading rank {count:,} of {files:,}")

    def first(files: DumpFiles) -> None:
        show(Document(path, dump_of(files), is_partial=True))

    try:
        show(read_run(path))
        files = read_files(path, strict=False, on_progress=progressed, on_first=first)
    except ShardvizError as error:
        show(error)
        return
    document = Document(path, dump_of(files))
    show(document)
    document = checked(document)
    _ = document.by_finding
    gc.freeze()  # a dump of a thousand ranks is a million objects that the collector would walk at every frame
    show(document)
    warm(document)
    import_module(".screens.dialogs", __package__)  # the module that reads Markdown takes as long as three frames
    gc.freeze()


def warm(document: Document) -> None:
    """Work out what the first keys will need: the step, the bytes, layouts in words, and the first tensors' holders."""
    usage = document.usage
    _ = document.step, document.counted, document.heats
    for each in (False, True):
        usage.lines(each, True)
    lines_of(usage.tree, order=usage.largest_first)
    for entry in document.entries:
        _ = entry.layout, entry.facts, entry.title, entry.axes
    lines = (line.entry for line in lines_of(tree_of(document.entries)))
    for index in islice((entry for entry in lines if entry is not None), MOST_WARM):
        with suppress(ShardvizError):
            sides = document.sides(index)
            _ = [nest(sides, dim) for dim in range(len(sides.holders.shape))]


def load_difference(here: Document, there: Document, show: Show) -> None:
    """Compare two dumps that are checked, and show the pairs of their tensors."""
    from shardviz.check.diff import compare
    from shardviz.plan.alternatives import sizes_beside

    from .model.pairs import compared_dumps

    if here.report is not None and there.report is not None:
        plans = sizes_beside(here.dump.files, there.dump.files)
        show(compared_dumps(here, there, compare(here.dump, there.dump, (here.report, there.report), plans)))


def load_compared(document: Document, path: Path, show: Show) -> None:
    """Compare a dump that is read with a checkpoint, and show what became of every tensor."""
    from shardviz.checkpoint.live_job.compare import compare_with_job
    from shardviz.checkpoint.live_job.job import job_of
    from shardviz.checkpoint.open import open_checkpoint

    from .model.pairs import compared_with_checkpoint

    try:
        job, checkpoint = job_of(document.dump), open_checkpoint(path)
        show(compared_with_checkpoint(document, job, checkpoint, compare_with_job(job, checkpoint)))
    except ShardvizError as error:
        show(error)


def load_checkpoint(opened: Callable[[], Checkpoint], show: Show) -> None:
    """Open a checkpoint and check it; show it after each."""
    from shardviz.checkpoint.findings import check_checkpoint

    try:
        document = StoredDocument(opened())
        show(document)
        show(replace(document, report=check_checkpoint(document.checkpoint)))
    except ShardvizError as error:
        show(error)


def checked(document: Document) -> Document:
    """Return the document with its report."""
    from shardviz.check.run import report_on

    try:
        return replace(document, report=report_on(document.dump))
    except ShardvizError as error:
        return replace(document, failed=error.message)
