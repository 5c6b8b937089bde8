"""Ask ranks, each in a fork: as many at a time as cores and memory allow.

A fork leaves nothing behind for the next, except for what operators return on tensors without values: that is the same
on all ranks. How much memory a rank needs is known once the first one has answered.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import linecache
import os
import pickle
import resource
import signal
import sys
import sysconfig
import traceback
from itertools import takewhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardviz.errors import RankError, ShardvizError
from shardviz.live.compat.fakes import know_fakes, new_fakes
from shardviz.live.world.failures import is_of_shardviz
from shardviz.machine import cores, free_memory
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

Answer = TypeVar("Answer")

STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
"""The folder of Python's own modules."""

TORCH = str(Path(torch.__file__).parent) + os.sep
"""The folder of torch."""

WAIT = 600.0
"""Seconds without an answer after which none will come."""

TICK = 1.0
"""Seconds to wait at a time: no more are counted if this process was stopped in between, as by Ctrl-Z."""

UNKNOWN = 2
"""Ranks that are asked at a time if nobody knows how much memory they need, or how much is free."""

PR_SET_PDEATHSIG = 1
"""The option of Linux' `prctl` that ends a process with its parent."""

ENDED = "another program has ended it: plan again"
HINTS = {
    -signal.SIGKILL: "-9 is the system's answer to too much memory: plan fewer layers, or on a larger machine",
    -signal.SIGTERM: ENDED,
    -signal.SIGHUP: ENDED,
}
DIED = "call build() and parallelize() by hand: python -X faulthandler shows where it ends"
SHORT = "end other programs, or raise their limit: ulimit -n, ulimit -u"
HANGS = "plan a smaller model to see where it hangs"


class KilledError(RankError):
    """The system has killed a rank, as it does if memory runs out."""


def ask(ranks: Iterable[int], work: Callable[[int], Answer], most: int = 0) -> dict[int, Answer]:
    """Return by rank what `work(rank)` returns in a fork, asked as by `answers`.

    Raises:
        ShardvizError: What a rank raised; any other exception becomes a `RankError` with its last line.
    """
    by_rank: dict[int, Answer] = {}
    for rank, answer in answers(ranks, work, most):
        if isinstance(answer, ShardvizError):
            raise answer
        by_rank[rank] = answer
    return by_rank


def answers(
    ranks: Iterable[int], work: Callable[[int], Answer], most: int = 0, patience: float = WAIT
) -> Iterator[tuple[int, Answer | ShardvizError]]:
    """Yield each rank with what `work(rank)` returns or raises in a fork, as the answers come.

    At most so many are asked at a time, or one on each core. If the system kills one of several, it is asked again, and
    from then on one at a time. All forks end with the iterator.

    Raises:
        RankError: The ranks that are left do not answer, or none can be asked.
    """
    waiting = list(dict.fromkeys(ranks))
    running: dict[Connection, tuple[int, int]] = {}  # a rank and its process, by the pipe that it answers through
    most, silent = min(most or cores(), len(waiting)), 0.0
    try:
        while waiting or running:
            while waiting and _has_room(len(running), most):
                try:
                    pipe, pid = begin(waiting[0], work)
                except OSError as error:
                    if not running:
                        raise RankError(f"rank {waiting[0]} cannot be asked: {error.strerror}", SHORT) from None
                    break
                running[pipe] = waiting.pop(0), pid
            ready = wait([*running], min(TICK, patience))
            silent = 0.0 if ready else silent + TICK
            if silent >= patience:
                names = named_ranks([rank for rank, _ in running.values()])
                raise RankError(f"{names} did not answer for {patience:g} s", HANGS)
            for pipe in [pipe for pipe in running if pipe in ready]:
                rank, pid = running.pop(pipe)
                answer = _answer_of(rank, pid, pipe)
                if isinstance(answer, KilledError) and most > 1:
                    most = 1
                    waiting.insert(0, rank)
                else:
                    yield rank, answer
    finally:
        for _, pid in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _has_room(running: int, most: int) -> bool:
    """Whether one more rank may be asked."""
    if not running or running >= most:
        return not running
    free, used = free_memory(), memory_used()
    if free is None or not used:
        return running < UNKNOWN
    return free > used * (running + 1)


def memory_used() -> int:
    """Return the most bytes that this process or a rank used; 0 before any rank has ended."""
    of_ranks, of_this = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    return (1 if sys.platform == "darwin" else 1024) * max(of_ranks, of_this) if of_ranks else 0


def begin(rank: int, work: Callable[[int], object]) -> tuple[Connection, int]:
    """Begin to ask a rank; return the pipe that its answer comes through, and its process.

    Raises:
        OSError: The system has no process for it, or no file.
    """
    parent_end, child_end = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            parent_end.close()  # a rank whose parent was killed would wait for itself to read its answer
            _run(rank, work, child_end)
        finally:
            os._exit(0)
    child_end.close()
    return parent_end, pid


def _run(rank: int, work: Callable[[int], object], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends its forks
    for number in (signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):  # the command's: it exits as if the probe did
            signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
    gc.freeze()  # what it shares with its parent would be looked through again and again, and copied
    new_fakes()
    try:
        answer = pickle.dumps((work(rank), new_fakes()))
    except ShardvizError as error:
        answer = pickle.dumps((error, new_fakes()))
    except BaseException as error:  # torch has some that do not derive from Exception
        raised = RankError(f"rank {rank}: {one_line(error)}", "call it by hand: its traceback shows where")
        answer = pickle.dumps((raised, new_fakes()))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(BrokenPipeError):  # nobody is left to read it
        pipe.send_bytes(answer)


def _answer_of(rank: int, pid: int, pipe: Connection) -> Any:
    """Return a rank's answer or error: `RankError` if it died, `KilledError` if it was killed."""
    try:
        answer, fakes = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # it died before its answer, or within it
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kind = KilledError if code == -signal.SIGKILL else RankError
        return kind(f"the process that planned rank {rank} died, exit code {code}", HINTS.get(code, DIED))
    os.waitpid(pid, 0)
    know_fakes(fakes)
    return answer


def one_line(error: BaseException) -> str:
    """Return an exception's type, its first line, and the line of user code that raised it.

    A first line that ends in a colon goes on with that of the exception's own cause, as of a pipeline's backward.
    """
    text, cause = (str(raised or "").strip().partition("\n")[0].rstrip(".") for raised in (error, error.__cause__))
    text = f"{text} {cause}" if text.endswith(":") and cause else text
    return f"{type(error).__name__}{': ' if text else ''}{text}{where(error)}"


def where(error: BaseException) -> str:
    """Return the user's line that raised an exception, in parentheses; empty if none did."""
    return _first_own_line(reversed([*traceback.walk_tb(error.__traceback__)]))


def own_line() -> str:
    """Return the line of the user's code that runs, in parentheses; empty if none of it does."""
    frames = traceback.walk_stack(sys._getframe(1))
    return _first_own_line(takewhile(lambda frame: frame[0].f_code is not _run.__code__, frames))


def _first_own_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    lines = ((frame.f_code.co_filename, number) for frame, number in frames)
    file, number = next((line for line in lines if is_own(line[0])), ("", 0))
    return f" ({Path(file).name}, line {number}: {linecache.getline(file, number).strip()})" if file else ""


def is_own(file: str) -> bool:
    """Whether a file is neither Python's nor torch's nor shardviz's, except for its recipes."""
    is_python = file.startswith(STDLIB) and "site-packages" not in Path(file).parts
    return not (is_python or file.startswith((TORCH, "<")) or is_of_shardviz(file))
