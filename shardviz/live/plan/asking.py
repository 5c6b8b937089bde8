"""Programs that ask ranks, run side by side: as many at a time as this process may use cores, and as memory suffices.

How much memory a rank needs is known when the first has answered: until then, and where nobody says how much is free,
two are asked at a time. Where the system kills one, it is asked again, beside half as many.

A program is a generator: it yields whom it asks, gets their answers, and returns what it is about. What it asks first
it gets first, so that one program alone is as fast as it can be, and of many the first ones end first.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardviz.errors import RankError, ShardvizError
from shardviz.live.plan.forks import Fork, answer_of, begin, end, interrupted_later, memory_used
from shardviz.machine import cores, free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

Answer = TypeVar("Answer")
Result = TypeVar("Result")

WAIT = 600.0
"""Seconds without an answer to a program after which none will come."""

TICK = 1.0
"""Seconds to wait at a time. Much more has passed only where this process was stopped, as by Ctrl-Z."""

UNKNOWN = 2
"""Ranks that are asked at a time where nobody knows how much memory they need, or how much is free."""


@dataclass(frozen=True)
class Request(Generic[Answer]):
    """What a program asks, and whom.

    Attributes:
        ranks: The ranks.
        work: Returns the answer of a rank, in a fork of its own.
    """

    ranks: Sequence[int]
    work: Callable[[int], Answer]


if TYPE_CHECKING:
    Program = Generator[Request[Any], dict[int, Any], Result]


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
        """Ask the next rank.

        Raises:
            OSError: The system has no process for it, or no file.
        """
        with interrupted_later():
            self.running[self.waiting[0]] = begin(self.waiting[0], self.work)
        del self.waiting[0]
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
        return (yield Request(tuple(ranks), work))

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
        self._most = cores()
        self._has_answers = False

    @property
    def _running(self) -> int:
        return sum(len(one.running) for one in self._open)

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
                try:
                    one.ask()
                except OSError as error:
                    if self._running:
                        return
                    yield from self._go_on(one, _not_begun(one.waiting[0], error))
                self._count()
                continue
            number, program = next(self._coming, (-1, None))
            if program is None:
                return
            self._open.append(_Open(number, program))
            yield from self._go_on(self._open[-1])

    def _count(self) -> None:
        """Write down for every rank how many run beside it: those may have ended when it is known to be killed."""
        running = self._running
        for fork in (fork for one in self._open for fork in one.running.values()):
            fork.most = max(fork.most, running)

    def _has_room(self) -> bool:
        running = self._running
        if not running or running >= self._most:
            return not running
        free = free_memory()
        if running >= UNKNOWN and (free is None or not self._has_answers):
            return False
        return free is None or free > memory_used() * (running + 1)

    def _answered(self) -> Iterator[tuple[_Open[Result], ShardvizError | None]]:
        """Wait for answers, and return the programs that have all of theirs, or an error instead."""
        oldest = min((one for one in self._open if one.running), key=lambda one: one.since)
        ready = self._ready(max(0.0, min(TICK, oldest.since + WAIT - time.monotonic())))
        if not ready and time.monotonic() >= oldest.since + WAIT:
            yield oldest, _silent(oldest.running)
        for one in [one for one in self._open if ready]:
            error = self._take(one, ready)
            if error is not None or not (one.waiting or one.running):
                yield one, error

    def _ready(self, timeout: float) -> Sequence[object]:
        """Wait for answers; time in which this process was stopped is not counted as a rank's."""
        begun = time.monotonic()
        ready = wait([fork.answers for one in self._open for fork in one.running.values()], timeout)
        stopped = time.monotonic() - begun - timeout
        for one in [one for one in self._open if stopped > TICK]:
            one.since += stopped
        return ready

    def _take(self, one: _Open[Result], ready: Sequence[object]) -> ShardvizError | None:
        """Take the answers of a program's ranks that are there; return the first error among them."""
        for rank in [rank for rank, fork in one.running.items() if fork.answers in ready]:
            one.since = time.monotonic()
            try:
                one.found[rank] = answer_of(rank, one.running[rank])
                self._has_answers = True
            except ShardvizError as error:
                fork = one.running[rank]
                if fork.most == 1 or fork.process.exitcode != -signal.SIGKILL:
                    return error
                self._most = min(self._most, fork.most // 2)
                one.waiting.insert(0, rank)
            del one.running[rank]
        return None

    def _go_on(self, one: _Open[Result], error: ShardvizError | None = None) -> Iterator[tuple[int, Result]]:
        """Give a program its answers, or an error, and see whom it asks next; yield its result if that is nobody."""
        found, one.found = one.found, {}
        try:
            if error is not None:
                one.stop()
                request = one.program.throw(error)
            else:
                request = one.program.send(found) if one.since else next(one.program)
            while not request.ranks:
                request = one.program.send({})
        except StopIteration as done:
            self._open.remove(one)
            yield one.number, done.value
            return
        one.work, one.waiting, one.since = request.work, list(dict.fromkeys(request.ranks)), time.monotonic()


def _silent(running: Iterable[int]) -> RankError:
    numbers = list(running)
    ranks = f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
    return RankError(f"{ranks} did not answer for {WAIT:g} s", "plan a smaller model to see where it hangs")


def _not_begun(rank: int, error: OSError) -> RankError:
    return RankError(
        f"rank {rank} cannot be asked: {error.strerror}",
        "end other programs, or raise their limit: ulimit -n, ulimit -u",
    )
