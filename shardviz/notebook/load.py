"""`shardviz.load` opens what a path leads to, `shardviz.diff` compares two dumps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz.check.diff import compare
from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.notebook.dumps import DumpRun
from shardviz.notebook.runs import concise
from shardviz.notebook.saved import SavedRun
from shardviz.picture.display import HTML, Drawable, framed
from shardviz.picture.markup import element, words
from shardviz.picture.text.difference import difference_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.plan.alternatives import sizes_beside
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.text import Text

    from shardviz.check.diff import Difference


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


@concise
def diff(before: Path | str | DumpRun, after: Path | str | DumpRun) -> DifferenceOfRuns:
    """Compare two dumps as `shardviz diff` does: layouts, contents, findings and traced steps.

    Args:
        before: The dump to compare with, or what `shardviz.load` gave of it.
        after: The dump that may have changed.

    Raises:
        DumpError: One of them is not a dump.

    Example:
        >>> difference = shardviz.diff("before.shardviz", "after.shardviz")
        >>> difference
        <Difference of before.shardviz and after.shardviz: ≠ 1 change, 1 finding lost>
        >>> bool(difference), difference.to_json()["changes"][0]["tensor"]
        (True, 'weight')
    """
    sides = (side if isinstance(side, Path | str) else side.path for side in (before, after))
    paths = [Path(side).expanduser() for side in sides]
    first, second = (dump_of(read_files(path, strict=False)) for path in paths)
    names = " and ".join(path.resolve().name for path in paths)
    return DifferenceOfRuns(names, compare(first, second, plans=sizes_beside(first.files, second.files)))


class DifferenceOfRuns(Drawable):
    """What is different between two dumps; true if anything is.

    Attributes:
        names: What the dumps are called.
        judged: The difference as the comparison made it.
    """

    def __init__(self, names: str, judged: Difference) -> None:
        """Take what was compared."""
        self.names, self.judged = names, judged

    def __bool__(self) -> bool:
        return bool(self.judged)

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return f"Difference of {self.names}: {self.lines(Terminal())[-1].plain}"

    def lines(self, terminal: Terminal) -> list[Text]:
        """Return it as `shardviz diff` prints it."""
        return difference_lines(self.judged, terminal)

    def markup(self) -> Mapping[str, str]:
        """Return two jobs' steps as a page in a frame, anything else as text."""
        from shardviz.picture.html.run import difference_html

        if self.judged.step.sides is not None:
            return {HTML: framed(difference_html(self.names, self.judged.step))}
        terminal = Terminal()
        return {HTML: element("pre", words(terminal.render(self.lines(terminal))))}

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz diff --format json` prints."""
        return self.judged.to_json()
