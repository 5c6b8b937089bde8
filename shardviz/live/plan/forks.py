"""A rank that is asked: a fork of this process, so that it leaves nothing behind for the next.

Only one thing is passed on: what operators return on tensors without values, which is the same for all ranks.
"""

from __future__ import annotations

import contextlib
import linecache
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardviz.errors import RankError, ShardvizError
from shardviz.live.compat import know_fakes, new_fakes
from shardviz.live.world.failures.raised import is_of_shardviz

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from types import FrameType

STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
"""The folder of Python's own modules."""

TORCH = str(Path(torch.__file__).parent) + os.sep
"""The folder of torch."""

KILLED = "-9 is the system's answer to too much memory: plan fewer layers, or on a larger machine"
ENDED = "another program has ended it: plan again"
HINTS = {-signal.SIGKILL: KILLED, -signal.SIGTERM: ENDED, -signal.SIGHUP: ENDED}
DIED = "call build() and parallelize() by hand: python -X faulthandler shows where it ends"


@dataclass
class Fork:
    """The process of a rank that is being asked.

    Attributes:
        process: The process.
        answers: Where its answer is read.
        most: The most ranks, itself included, that ran at a time since it began.
    """

    process: BaseProcess
    answers: Connection
    most: int = 1


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """Let Ctrl-C and what ends the command wait for what is done inside: a fork that has begun is to be ended, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    came: list[int] = []
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for first in came[:1]:
        signal.raise_signal(first)


def begin(rank: int, work: Callable[[int], object]) -> Fork:
    """Begin to ask a rank."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(target=_run, args=(rank, work, theirs, ours), daemon=True)
    process.start()
    theirs.close()
    return Fork(process, ours)


def end(one: Fork) -> None:
    """End the process of a rank, whatever it does."""
    one.process.kill()
    one.process.join()


def _run(rank: int, work: Callable[[int], object], answers: Connection, read: Connection) -> None:
    read.close()  # a rank whose parent was killed would wait for itself to read its answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends its forks
    for number in (signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):  # the command's: it exits as if the probe did
            signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
    new_fakes()
    try:
        answer = pickle.dumps((True, work(rank), new_fakes()))
    except ShardvizError as error:
        answer = pickle.dumps((False, error, new_fakes()))
    except BaseException as error:  # torch has some that do not derive from Exception
        raised = RankError(f"rank {rank}: {one_line(error)}", "call it by hand: its traceback shows where")
        answer = pickle.dumps((False, raised, new_fakes()))
    with contextlib.suppress(BrokenPipeError):  # nobody is left to read it
        answers.send_bytes(answer)
    answers.close()


def answer_of(rank: int, one: Fork) -> object:
    """Return what a rank has answered.

    Raises:
        ShardvizError: What it raised; a `RankError` of any other exception, or where its process has died.
    """
    try:
        done, answer, fakes = pickle.loads(one.answers.recv_bytes())
    except EOFError:
        one.process.join()
        code = one.process.exitcode or 0
        raise RankError(f"the process that planned rank {rank} died, exit code {code}", HINTS.get(code, DIED)) from None
    one.process.join()
    know_fakes(fakes)
    if not done:
        raise answer
    return answer


def memory_used() -> int:
    """Return the most bytes that this process or a rank has used, with what they share."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


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
    """Whether a file is neither Python's nor torch's nor shardviz's, except for its recipes."""
    is_python = file.startswith(STDLIB) and "site-packages" not in Path(file).parts
    return not (is_python or file.startswith((TORCH, "<")) or is_of_shardviz(file))
