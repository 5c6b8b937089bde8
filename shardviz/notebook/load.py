"""`shardviz.load`: open what a path leads to."""

from __future__ import annotations

import warnings
from pathlib import Path

from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.notebook.dumps import DumpRun
from shardviz.notebook.runs import concise
from shardviz.notebook.saved import SavedRun
from shardviz.text import counted, printable

MOST_WARNINGS = 8
"""Damaged files that are named one by one."""


@concise
def load(path: Path | str) -> DumpRun | SavedRun:
    """Open a dump, a plan or a checkpoint, for a notebook or a script.

    Values are read when they are asked for. A rank's file that is damaged gives a warning, and the rest is read.

    Args:
        path: What `shardviz check` and `shardviz show` take: the folder that a probe, a job or a plan wrote, or a
            checkpoint of any format.

    Raises:
        DumpError: Nothing is there, or it is no dump and no checkpoint, or cannot be read.

    Example:
        >>> run = shardviz.load("before.shardviz")
        >>> run
        <Run before.shardviz: 1 tensor on 4 ranks, mesh (fsdp=2, tp=2)>
        >>> weight = run["weight"]
        >>> weight.layout, weight.held
        ('[12/fsdp/tp, 12]', {0: [0:3, 0:12], 1: [6:9, 0:12], 2: [3:6, 0:12], 3: [9:12, 0:12]})
        >>> weight.full().shape
        (12, 12)
        >>> run.check().clean
        False
    """
    folder = Path(path).expanduser()
    if is_checkpoint(folder):
        return SavedRun(open_checkpoint(folder))
    files = read_files(folder, strict=False)
    _warn_of(list(files.damaged.values()))
    return DumpRun(dump_of(files))


def _warn_of(damaged: list[str]) -> None:
    """Warn at the line that called `load`, as the commands do on stderr."""
    for message in damaged[:MOST_WARNINGS]:
        warnings.warn(printable(message), stacklevel=4)
    if (left := len(damaged) - MOST_WARNINGS) > 0:
        warnings.warn(f"{counted(left, 'more file')} of ranks cannot be read", stacklevel=4)
