"""Programs that ask ranks, run side by side: as many ranks are asked at a time as this process may use cores.

A program is a generator: it yields whom it asks, gets their answers, and returns what it is about. What it asks first
it gets first, so that one program alone is as fast as it can be, and of many the first ones end first.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardviz.errors import RankError, ShardvizError
from shardviz.live.plan.forks import Fork, answer_of, begin, end, interrupted_later, memory_used
from shardviz.live.world.launching import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

Answer = TypeVar("Answer")
Result = TypeVar("Result")

WAIT = 600.0
"""Seconds without an answer to a program after which none will come."""

UNKNOWN = 2
"""Ranks that are asked at a time where nobody says how much memory is free."""


@dataclass(frozen=True)
class Asked(Generic[Answer]):
    """Whom a program asks.

    Attributes:
        ranks: The ranks.
        work: Returns the answer of a rank, in a fork of its own.
    """

    ranks: Sequence[int]
    work: Callable[[int], Answer]


if TYPE_CHECKING:
    Program = Generator[Asked[Any], dict[int, Any], Result]


@dataclass
class _Open(Generic[Result]):
    """A program that has begun and waits for answers.

    Attributes:
        number: Which of the programs it is.
        program: The program.
        work: Returns the answer of a rank.
        waiting: Ranks that are asked later.
        running: Ranks that are being asked.
        found: Answers.
        since: When it last asked or got an answer; 0 before it has asked.
    """

    number: int
    program: Program[Result]
    work: Callable[[int], object] = lambda _: None
    waiting: list[int] = field(default_factory=list)
    running: dict[int, Fork] = field(default_factory=dict)
    found: dict[int, object] = field(default_factory=dict)
    since: float = 0.0

    def ask(self) -> None:
        """Ask the next rank."""
        rank = self.waiting.pop(0)
        with interrupted_later():
            self.running[rank] = begin(rank, self.work)
        self.since = time.monotonic()

    def stop(self) -> None:
        """Ask no more, and end those that are being asked."""
        self.waiting.clear()
        for one in self.running.values():
            end(one)
        self.running.clear()


def ask(ranks: Iterable[int], work: Callable[[int], Answer]) -> dict[int, Answer]:
    """Return what `work(rank)` returns for every rank, each in a fork of its own.

    Raises:
        ShardvizError: What a rank raised; any other exception becomes a `RankError` with its last line.
    """

    def program() -> Program[dict[int, Answer]]:
        return (yield Asked(tuple(ranks), work))

    return alone(program())


def alone(program: Program[Result]) -> Result:
    """Run one program, and return what it returns."""
    return next(result for _, result in together([program]))


def together(programs: Iterable[Program[Result]]) -> Iterator[tuple[int, Result]]:
    """Run programs side by side, and yield the number and the result of each when it ends.

    What a rank raises is raised in its program. What a program raises ends all of them, as does Ctrl-C.

    Args:
        programs: The programs; one begins when those before it leave a core idle.
    """
    turns = _Turns(programs)
    try:
        yield from turns.run()
    finally:
        turns.stop()


class _Turns(Generic[Result]):
    def __init__(self, programs: Iterable[Program[Result]]) -> None:
        self._coming = enumerate(programs)
        self._open: list[_Open[Result]] = []
        self._cores = cores()

    def run(self) -> Iterator[tuple[int, Result]]:
        """Yield what every program returns."""
        while True:
            yield from self._fill()
            if not self._open:
                return
            for one, error in self._answered():
                yield from self._go_on(one, error)

    def stop(self) -> None:
        """End everything."""
        for one in self._open:
            one.stop()

    def _fill(self) -> Iterator[tuple[int, Result]]:
        """Ask ranks until no core is idle, those of the first programs first."""
        while self._has_room():
            one = next((one for one in self._open if one.waiting), None)
            if one is not None:
                one.ask()
                continue
            number, program = next(self._coming, (-1, None))
            if program is None:
                return
            self._open.append(_Open(number, program))
            yield from self._go_on(self._open[-1])

    def _has_room(self) -> bool:
        running = sum(len(one.running) for one in self._open)
        if not running or running >= self._cores:
            return not running
        free = free_memory()
        return running < UNKNOWN if free is None else free > memory_used() * (running + 1)

    def _answered(self) -> Iterator[tuple[_Open[Result], ShardvizError | None]]:
        """Wait for answers, and return the programs that have all of theirs, or an error instead."""
        oldest = min((one for one in self._open if one.running), key=lambda one: one.since)
        ready = wait(
            [fork.answers for one in self._open for fork in one.running.values()],
            timeout=max(0.0, oldest.since + WAIT - time.monotonic()),
        )
        if not ready:
            yield oldest, _silent(oldest.running)
        for one in [one for one in self._open if ready]:
            error = _take(one, ready)
            if error is not None or not (one.waiting or one.running):
                yield one, error

    def _go_on(self, one: _Open[Result], error: ShardvizError | None = None) -> Iterator[tuple[int, Result]]:
        """Give a program its answers, or an error, and see whom it asks next; yield its result if that is nobody."""
        found, one.found = one.found, {}
        try:
            if error is not None:
                one.stop()
                asked = one.program.throw(error)
            else:
                asked = one.program.send(found) if one.since else next(one.program)
            while not asked.ranks:
                asked = one.program.send({})
        except StopIteration as done:
            self._open.remove(one)
            yield one.number, done.value
            return
        one.work, one.waiting, one.since = asked.work, list(dict.fromkeys(asked.ranks)), time.monotonic()


def _take(one: _Open[Any], ready: Sequence[object]) -> ShardvizError | None:
    """Take the answers of a program's ranks that are there; return the first error among them."""
    for rank in [rank for rank, fork in one.running.items() if fork.answers in ready]:
        one.since = time.monotonic()
        try:
            one.found[rank] = answer_of(rank, one.running[rank])
        except ShardvizError as error:
            return error
        del one.running[rank]
    return None


def _silent(running: Iterable[int]) -> RankError:
    numbers = list(running)
    ranks = f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
    return RankError(f"{ranks} did not answer for {WAIT:g} s", "plan a smaller model to see where it hangs")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
