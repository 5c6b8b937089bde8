"""How much more a piece of work costs at four times the size: processor seconds and peak bytes, each in a fresh child.

A child is forked for every run, so no cache and no garbage of an earlier run helps or hinders. Inputs are doubled until
the work takes long enough to be timed. What the smallest input costs is start-up and is subtracted. Bytes are what
Python and numpy allocate, which is the same on every machine. Nothing is compared with an absolute number.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import time
import traceback
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Work = Callable[[], object]

T = TypeVar("T")

FACTOR = 4
"""How many times as large the larger input is."""
MOST_SECONDS, MOST_BYTES = 8.0, 6.0
"""The ratios above which work grows too fast: linear is 4, linear times a logarithm below 5, quadratic 16."""
RUNS = 3
"""A ratio that is too large is taken again, of the best of so many runs, before it counts."""
WARM = 8
"""The size of the smallest input, which shows what the work imports and what starting it costs."""
ENOUGH = 0.05
"""Seconds of work besides start-up that the smaller input must take."""
MOST_DOUBLINGS = 5


@dataclass(frozen=True)
class Growth:
    """What a piece of work costs at n and at four times n.

    Attributes:
        what: The input and what is done with it.
        sizes: The smallest size, n and 4 n.
        seconds: Processor seconds at these sizes.
        peaks: Peak bytes at these sizes.
    """

    what: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    peaks: tuple[int, ...]

    @property
    def ratio_of_seconds(self) -> float:
        """How many times the seconds the larger input takes."""
        return _ratio(self.sizes, self.seconds)

    @property
    def ratio_of_bytes(self) -> float:
        """How many times the bytes the larger input takes."""
        return _ratio(self.sizes, self.peaks)

    @property
    def is_too_fast(self) -> bool:
        """Whether seconds or bytes grow faster than is allowed."""
        return self.ratio_of_seconds > MOST_SECONDS or self.ratio_of_bytes > MOST_BYTES

    def __str__(self) -> str:
        seconds = ", ".join(f"{second:.3f}" for second in self.seconds)
        peaks = ", ".join(f"{peak / 2**20:.1f}" for peak in self.peaks)
        return (
            f"{self.what:<50} n = {self.sizes[1]:>6,}: x {self.ratio_of_seconds:5.2f} seconds ({seconds}), "
            f"x {self.ratio_of_bytes:5.2f} bytes ({peaks} MiB)"
        )


def _ratio(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return how many times as much four times the size costs, start-up left out: by what each more item costs."""
    each = [(cost - costs[0]) / (size - sizes[0]) for size, cost in zip(sizes[1:], costs[1:], strict=True)]
    return FACTOR * each[1] / each[0] if each[0] > 0 else 0.0


def growth_of(what: str, made: Callable[[int], Work], size: int, enough: float = ENOUGH) -> Growth:
    """Measure a piece of work at a size and at four times it.

    A ratio that is too large is taken again: of the best of several runs, then of inputs twice as large. One that noise
    or a fixed cost has made too large shrinks. One that a loop has made stays.

    Args:
        what: The name of the piece of work.
        made: Prepares an input of a size, and returns the work to do with it.
        size: The smaller size; it is doubled until the work takes long enough.
        enough: Seconds that are long enough; 0 for the size as it is.
    """
    _import_what(made(WARM))
    if enough:
        size = _long_enough(made, size, enough)
    for runs, times in ((1, 1), (RUNS, 1), (RUNS, 2)):
        growth = _measured(what, made, times * size, runs)
        if not growth.is_too_fast:
            break
    return growth


def _long_enough(made: Callable[[int], Work], size: int, enough: float) -> int:
    start = _in_a_child(seconds_of, made(WARM))
    for _ in range(MOST_DOUBLINGS):
        if _in_a_child(seconds_of, made(size)) - start >= enough:
            break
        size *= 2
    return size


def _measured(what: str, made: Callable[[int], Work], size: int, runs: int) -> Growth:
    sizes = WARM, size, FACTOR * size
    works = [made(size) for size in sizes]
    rounds = [[_in_a_child(seconds_of, work) for work in works] for _ in range(runs)]
    peaks = tuple(_in_a_child(peak_of, work) for work in works)
    return Growth(what, sizes, tuple(map(min, zip(*rounds, strict=True))), peaks)


def _import_what(work: Work) -> None:
    """Import here what a piece of work imports, so that no child that is measured has to."""
    for name in _in_a_child(modules_of, work):
        if name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def modules_of(work: Work) -> list[str]:
    """Return the modules that are imported once a piece of work is done."""
    work()
    return sorted(sys.modules)


def seconds_of(work: Work) -> float:
    """Return the processor seconds of a piece of work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_of(work: Work) -> int:
    """Return the bytes that a piece of work has allocated at once."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _in_a_child(measure: Callable[[Work], T], work: Work) -> T:
    """Return a measurement that a forked process takes.

    Raises:
        RuntimeError: The work failed; the message is the child's traceback.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            try:
                result: object = measure(work)
                code = 0
            except BaseException:
                result = traceback.format_exc()
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(result, pipe)
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise RuntimeError(pickle.loads(answer) if answer else f"a measured process ended with {status}")
    return pickle.loads(answer)
