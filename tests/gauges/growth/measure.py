"""How much more a piece of work costs at four times the size: processor seconds and peak bytes, each in a fresh child.

A child is forked for every run, so that no cache and no garbage of a run before it helps or hinders. Seconds are of the
processor, of all threads, and the best of three, taken at both sizes in turn; bytes are what Python and numpy allocate,
which is the same on every machine. Nothing is compared with an absolute number.
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
    from collections.abc import Callable

    Work = Callable[[], object]

T = TypeVar("T")

FACTOR = 4
"""How many times as large the larger input is."""
MOST_SECONDS, MOST_BYTES = 8.0, 6.0
"""The ratios above which work grows too fast: linear is 4, linear times a logarithm below 5, quadratic 16."""
RUNS = 3
WARM = 8
"""The size at which it is found out what a piece of work imports."""
DOUBLINGS = 2
"""How often a ratio that is too large is taken again, each time of inputs twice as large, before it counts."""


@dataclass(frozen=True)
class Growth:
    """What a piece of work costs at n and at four times n.

    Attributes:
        what: The input and what is done with it.
        size: The smaller size.
        seconds: Processor seconds at both sizes.
        peaks: Peak bytes at both sizes.
    """

    what: str
    size: int
    seconds: tuple[float, float]
    peaks: tuple[int, int]

    @property
    def ratio_of_seconds(self) -> float:
        """How many times the seconds the larger input takes."""
        return self.seconds[1] / max(self.seconds[0], 1e-9)

    @property
    def ratio_of_bytes(self) -> float:
        """How many times the bytes the larger input takes."""
        return self.peaks[1] / max(self.peaks[0], 1)

    @property
    def is_too_fast(self) -> bool:
        """Whether seconds or bytes grow faster than is allowed."""
        return self.ratio_of_seconds > MOST_SECONDS or self.ratio_of_bytes > MOST_BYTES

    def __str__(self) -> str:
        seconds, peaks = self.seconds, [peak / 2**20 for peak in self.peaks]
        return (
            f"{self.what:<50} n = {self.size:>6,}: x {self.ratio_of_seconds:5.2f} seconds ({seconds[0]:.3f} to "
            f"{seconds[1]:.3f}), x {self.ratio_of_bytes:5.2f} bytes ({peaks[0]:.1f} to {peaks[1]:.1f} MiB)"
        )


def growth_of(what: str, made: Callable[[int], Work], size: int, runs: int = RUNS) -> Growth:
    """Measure a piece of work at a size and at four times it; at larger sizes again, if it grows too fast.

    A ratio that noise or a fixed cost has made too large shrinks at a larger size. One that a loop has made stays.

    Args:
        what: The name of the piece of work.
        made: Prepares an input of a size, and returns the work to do with it.
        size: The smaller size.
        runs: Of how many runs the best counts.
    """
    growth = _measured(what, made, size, runs)
    for _ in range(DOUBLINGS):
        if not growth.is_too_fast:
            break
        size *= 2
        growth = _measured(what, made, size, runs)
    return growth


def _measured(what: str, made: Callable[[int], Work], size: int, runs: int) -> Growth:
    _import_what(made(WARM))
    small, large = made(size), made(FACTOR * size)
    pairs = [(_in_a_child(seconds_of, small), _in_a_child(seconds_of, large)) for _ in range(runs)]
    best = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    return Growth(what, size, best, (_in_a_child(peak_of, small), _in_a_child(peak_of, large)))


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
