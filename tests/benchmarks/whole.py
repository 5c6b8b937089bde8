"""Time whole processes in turn, A B A B ..., and print the ratio of their medians: noise of the machine hits both."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TORCH_MODULES = "torch, torch.distributed.tensor.parallel, torch.distributed.fsdp, torch._dynamo"


@dataclass(frozen=True)
class Timing:
    """One command's wall seconds, run by run, and those of a processor."""

    seconds: tuple[float, ...]
    worked: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """The median of the runs."""
        return statistics.median(self.seconds)

    @property
    def work(self) -> float:
        """The least of the processor's seconds, of all threads: a busy machine only adds to them."""
        return min(self.worked)

    def __str__(self) -> str:
        return (
            f"{self.median:.3f} s (from {min(self.seconds):.3f} to {max(self.seconds):.3f}, {len(self.seconds)} runs)"
        )


def python(code: str) -> list[str]:
    """Return the command that runs `code` in a fresh interpreter."""
    return [sys.executable, "-c", code]


def compare(
    *commands: Sequence[str], runs: int = 5, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> list[Timing]:
    """Time commands in turn, after one run of each that is not counted."""
    taken: list[list[tuple[float, float]]] = [[] for _ in commands]
    for turn in range(runs + 1):
        for command, times in zip(commands, taken, strict=True):
            start, worked = time.perf_counter(), work_of_children()
            subprocess.run(command, check=True, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if turn:
                times.append((time.perf_counter() - start, work_of_children() - worked))
    return [Timing(*zip(*times, strict=True)) for times in taken]


def work_of_children() -> float:
    """Return the processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verdict(what: str, ratio: float, budget: float, *, at_least: bool = False) -> None:
    """Print a ratio beside its budget."""
    met = ratio >= budget if at_least else ratio <= budget
    relation = "at least" if at_least else "at most"
    print(f"{what}: {ratio:.2f} (budget: {relation} {budget:g}) {'met' if met else 'NOT MET'}")


def peak_memory_of_children() -> int:
    """Return the largest resident size, in bytes, of any child that has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
