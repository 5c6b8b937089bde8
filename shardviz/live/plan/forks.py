"""Ask ranks one after the other: each is a fork of this process, so that none leaves anything behind for the next.

Only one thing is passed on: what operators return on tensors without values, which is the same for all ranks.
"""

from __future__ import annotations

import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from shardviz.errors import RankError, ShardvizError
from shardviz.live.compat import know_fakes, new_fakes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from types import FrameType

Answer = TypeVar("Answer")
Rank = TypeVar("Rank", int, str)
"""A rank, or what it is called where ranks of many meshes are asked."""

MOST_AT_ONCE = 2
"""Forks that run at a time, where there are as many cores: each may hold a whole model's tensors without values."""

STDLIB = sysconfig.get_paths()["stdlib"]
"""The folder of Python's own modules."""

WAIT = 600.0
"""Seconds after which no answer will come."""

KILLED = "-9 is the system's answer to too much memory: plan fewer layers, or on a larger machine"
DIED = "call build() and parallelize() by hand: python -X faulthandler shows where it ends"


@dataclass(frozen=True)
class _Fork(Generic[Answer]):
    """The process of a rank that is being asked."""

    process: BaseProcess
    answers: Connection


def ask(ranks: Iterable[Rank], work: Callable[[Rank], Answer]) -> dict[Rank, Answer]:
    """Return what `work(rank)` returns for every rank, each in a fork of its own.

    Raises:
        ShardvizError: What a rank raised; any other exception becomes a `RankError` with its last line.
    """
    waiting = list(dict.fromkeys(ranks))
    found: dict[Rank, Answer] = {}
    running: dict[Rank, _Fork[Answer]] = {}
    at_once = min(MOST_AT_ONCE, os.cpu_count() or 1)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running[waiting[0]] = _begin(waiting[0], work)
                waiting.pop(0)
            for rank in _ready(running):
                found[rank] = _answer(rank, running.pop(rank))
    finally:
        for one in running.values():
            one.process.kill()
            one.process.join()
    return found


def _begin(rank: Rank, work: Callable[[Rank], Answer]) -> _Fork[Answer]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(target=_run, args=(rank, work, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Fork(process, ours)


def _run(rank: Rank, work: Callable[[Rank], Answer], answers: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends its forks
    new_fakes()
    try:
        answer: tuple[bool, object] = True, work(rank)
    except ShardvizError as error:
        answer = False, error
    except (Exception, SystemExit) as error:
        answer = False, RankError(f"rank {rank}: {one_line(error)}", "call it by hand: its traceback shows where")
    answers.send_bytes(pickle.dumps((*answer, new_fakes())))
    answers.close()


def _ready(running: dict[Rank, _Fork[Answer]]) -> Iterator[Rank]:
    ready = wait([one.answers for one in running.values()], timeout=WAIT)
    if not ready:
        ranks = f"{'rank' if len(running) == 1 else 'ranks'} {', '.join(map(str, running))}"
        raise RankError(f"{ranks} did not answer for {WAIT:g} s", "plan a smaller model to see where it hangs")
    yield from [rank for rank, one in running.items() if one.answers in ready]


def _answer(rank: int | str, one: _Fork[Answer]) -> Answer:
    try:
        done, answer, fakes = pickle.loads(one.answers.recv_bytes())
    except EOFError:
        one.process.join()
        raise RankError(
            f"the process that planned rank {rank} died, exit code {one.process.exitcode}",
            KILLED if one.process.exitcode == -9 else DIED,
        ) from None
    one.process.join()
    know_fakes(fakes)
    if not done:
        raise answer
    found: Answer = answer
    return found


def one_line(error: BaseException) -> str:
    """Return an exception's type, the first line of what it says, and the line of the user's code that raised it.

    A first line that ends in a colon goes on with that of the exception's own cause, as of a pipeline's backward.
    """
    text = _first_line(error)
    if text.endswith(":") and error.__cause__ is not None:
        text = f"{text} {_first_line(error.__cause__)}"
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return named + where(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def where(error: BaseException) -> str:
    """Return the line of the user's code that raised an exception, in parentheses; empty where none of it did."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})" if own else ""


def own_line() -> str:
    """Return the line of the user's code that runs, in parentheses; empty where none of it does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _run.__code__ and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code is _run.__code__:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f" ({Path(file).name}, line {number}: {linecache.getline(file, number).strip()})"


def is_own(file: str) -> bool:
    """Whether a file is neither Python's nor torch's nor shardviz's, or is a probe."""
    parts = Path(file).parts
    is_python = file.startswith(STDLIB) and "site-packages" not in parts
    return "probes" in parts or not ({"torch", "shardviz"} & set(parts) or is_python or file.startswith("<"))
