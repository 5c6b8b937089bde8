"""What an optimizer's states show by a few of their numbers: steps of two saves or none, moments that cannot be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.checkpoint.optimizer import state_of
from shardviz.errors import DumpError
from shardviz.explain.states import (
    EmptyMoments,
    LostStepCounter,
    MixedStepFiles,
    NegativeSquares,
    NotFiniteState,
)
from shardviz.relate.casts import cast, is_whole
from shardviz.text import counted, folded_names, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Checkpoint, Saved
    from shardviz.explain.finding import Finding

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_avg_sq_row", "exp_avg_sq_col")
"""States that are means of squares."""

MOMENTS = (*SQUARES, "exp_avg", "momentum_buffer")

SAMPLES = 1024
"""Numbers of a state that are looked at."""

MAX_NAMES = 3

FEWEST = 2
"""Steps in one file that must be others than everywhere else: a single one may be of a parameter that began later.

After so many steps squares are not zero: torch takes one without gradients to make states that it saves or loads into.
"""


@dataclass(slots=True)
class _Known:
    """What is known of one parameter's state.

    Attributes:
        step: Its number of steps, and the tensor that says so; None if none does.
        squares: Its squares, and whether any of the numbers that were looked at is not zero.
    """

    step: tuple[float, Saved] | None = None
    squares: tuple[Saved, bool] | None = None


def check_states(checkpoint: Checkpoint) -> Iterator[Finding | NotChecked]:
    """Yield moments that cannot be, steps that were lost, and the file whose steps are others than everywhere else."""
    known: dict[str, _Known] = {}
    for name, tensor in checkpoint.tensors.items():
        parts = state_of(name)
        if parts is None or not tensor.size or not tensor.chunks:
            continue
        key = parts[1]
        state = known.setdefault(_without(name, key), _Known())
        is_step = key == "step" and tensor.size == 1 and tensor.files
        is_moment = key in MOMENTS and not is_whole(tensor.dtype)  # codes of 8 bits may be negative
        values = _some(tensor) if is_step or is_moment else None
        if values is None or not len(values):
            continue
        if is_step:
            state.step = float(values[0]), tensor
        else:
            yield from _wrong_numbers(name, key, values)
            state.squares = (tensor, bool(values.any())) if key in SQUARES else state.squares
    yield from _steps([(one.step[1].files[0], one.step[0]) for one in known.values() if one.step])
    yield from _beside_steps(list(known.values()))


def _without(name: str, key: str) -> str:
    """Return a state's name without its key, which torch writes last and Megatron before the parameter."""
    return name.removesuffix(f".{key}") if name.endswith(f".{key}") else name.replace(f".{key}.", ".", 1)


def _some(tensor: Saved) -> NDArray[np.float64] | None:
    """Return the first numbers of a tensor's first chunk; None if they cannot be read."""
    try:
        bits: NDArray[Any] = tensor.chunk_bits(tensor.chunks[0])
    except (DumpError, OSError):
        return None  # reported where chunks are looked at
    found = cast(np.array(bits.ravel()[:SAMPLES]), tensor.dtype, "float64")
    return None if found is None else found.view(np.float64)


def _wrong_numbers(name: str, key: str, values: NDArray[np.float64]) -> Iterator[Finding]:
    of_all = f"of the {len(values):,} values that were looked at are"
    if count := int((~np.isfinite(values)).sum()):
        text = f"{count:,} {of_all} nan or infinite: they stay so in every later step, and its weights become nan"
        yield NotFiniteState().finding(name, (), text)
    if count := int((values < 0).sum()) if key in SQUARES else 0:
        text = f"{count:,} {of_all} negative, and it is a mean of squares"
        yield NegativeSquares().finding(name, (), text)


def _beside_steps(known: list[_Known]) -> Iterator[Finding | NotChecked]:
    """Yield squares that were kept without their steps, and those that are zero after several steps."""
    both = [(*one.step, *one.squares) for one in known if one.step and one.squares]
    for step, counter, _, is_some in both:
        if step == 0 and is_some:
            text = "the optimizer has taken 0 steps of this parameter, and its squares are not zero"
            yield LostStepCounter().finding(counter.name, (), text)
    trained = [(step, squares, is_some) for step, _, squares, is_some in both if step >= FEWEST]
    zero = [squares.name for _, squares, is_some in trained if not is_some and _is_zero(squares)]
    if zero and len(zero) == len(trained) >= FEWEST:
        text = f"the squares of all {len(zero):,} parameters are zero, after up to {max(one[0] for one in trained):g} "
        yield EmptyMoments().finding(zero[0], (), f"{text}steps", severity="warning")
    elif zero:
        names = printable(folded_names(zero, MAX_NAMES))
        whose = counted(len(zero), "parameter")
        why = f"whether the moments of {whose} were lost, or gradients were all zero: {names}, whose squares are zero"
        yield NotChecked("", why, "run")


def _is_zero(tensor: Saved) -> bool:
    """Whether all of a tensor is zero."""
    try:
        return not any(tensor.chunk_bits(chunk).any() for chunk in tensor.chunks)
    except (DumpError, OSError):
        return False


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
    return MixedStepFiles().finding("", (), text, severity="warning")
