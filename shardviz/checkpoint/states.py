"""What an optimizer's states show by a few of their numbers: steps of two saves, and squares that are negative."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.finding import Finding
from shardviz.checkpoint.comparing.casts import cast, is_whole
from shardviz.checkpoint.optimizer import state_of
from shardviz.errors import DumpError
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Checkpoint, Saved

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_avg_sq_row", "exp_avg_sq_col")
"""States that are means of squares."""

SAMPLES = 1024
"""Numbers of a state that are looked at."""

FEWEST = 2
"""Steps in one file that must be others than everywhere else: a single one may be of a parameter that began later."""


def check_states(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield squares that are negative, and the file whose optimizer steps are others than those of all other files."""
    steps: list[tuple[str, float]] = []
    for name, tensor in checkpoint.tensors.items():
        parts = state_of(name)
        if parts is None or not tensor.size or not tensor.chunks:
            continue
        if parts[1] in SQUARES and not is_whole(tensor.dtype):  # codes of 8 bits may be negative
            yield from _negative(name, tensor)
        elif parts[1] == "step" and tensor.size == 1 and tensor.files:
            values = _some(tensor)
            steps += [] if values is None or not len(values) else [(tensor.files[0], float(values[0]))]
    yield from _steps(steps)


def _some(tensor: Saved) -> NDArray[np.float64] | None:
    """Return the first numbers of a tensor's first chunk; None where they cannot be read."""
    try:
        bits: NDArray[Any] = tensor.chunk_bits(tensor.chunks[0])
    except (DumpError, OSError):
        return None  # reported where chunks are looked at
    rows = bits.reshape(-1) if bits.flags.c_contiguous else bits.ravel()
    found = cast(np.array(rows[:SAMPLES]), tensor.dtype, "float64")
    return None if found is None else found.view(np.float64)


def _negative(name: str, tensor: Saved) -> Iterator[Finding]:
    values = _some(tensor)
    count = 0 if values is None else int((values < 0).sum())
    if values is not None and count:
        text = f"{count:,} of the {len(values):,} values that were looked at are negative, and it is a mean of squares"
        cause = "First and second moments were exchanged, or another tensor was written here"
        fix = "find out which tensor it is: `shardviz diff` with the step before; do not resume from this one"
        yield Finding("wrong-value", "error", name, (), text, cause=cause, fix=fix)


def _steps(steps: list[tuple[str, float]]) -> Iterator[Finding]:
    """Yield the only file whose steps are all alike and others than those of every other file, which are alike, too."""
    by_file: dict[str, Counter[float]] = {}
    for file, value in steps:
        by_file.setdefault(file, Counter())[value] += 1
    values = {value for own in by_file.values() for value in own}
    if len(values) != 2 or len(by_file) < 2:
        return
    for value in values:
        files = [file for file, own in by_file.items() if value in own]
        if len(files) == 1 and len(by_file[files[0]]) == 1 and by_file[files[0]][value] >= FEWEST:
            (other,) = values - {value}
            yield _of_another_save(files[0], value, other, by_file)
            return


def _of_another_save(file: str, value: float, other: float, by_file: Mapping[str, Counter[float]]) -> Finding:
    rest = listed((printable(one) for one in by_file if one != file), 3)
    has = f"the {by_file[file][value]:,} optimizer steps in {printable(file)} are {value:g}"
    text = f"{has}, and all of those in {counted(len(by_file) - 1, 'other file')} ({rest}) are {other:g}"
    cause = "The file is of another save, or has a stage whose training began later"
    fix = "lay the checkpoint beside another step's: `shardviz diff` shows whether all that is odd is in this file"
    return Finding("wrong-value", "warning", "", (), text, cause=cause, fix=fix)
