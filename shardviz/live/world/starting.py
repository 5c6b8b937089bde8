"""Starting and ending rank processes: the fork server, fresh interpreters, refusals.

Built on the standard library's `multiprocessing`, with three of its habits turned off: ranks do not run the
launcher's `__main__` again (tasks are named by string), they never see Ctrl-C, and they keep no terminal.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from shardviz.errors import ShardvizError
from shardviz.live.world import preload, rank
from shardviz.live.world.protocol import END, Job, Outcome
from shardviz.live.world.torchrun import with_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess


Method = Literal["fork", "spawn"]
LEAVING_LIMIT = 5.0
"""Seconds that ranks have for shutting their process group down once all have finished."""
DYING_LIMIT = 0.3
"""Seconds that a fork server takes to be gone once it failed; the next world then starts another."""
SOCKET_ADDRESS = 103
"""Bytes of a path that the address of a socket takes on macOS; Linux takes 107."""
SOCKET_NAME = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Bytes that multiprocessing adds to the temporary folder."""
SHORT_FOLDER = "/tmp"
IMPORT_LIMIT = 240.0
"""Seconds that the fork server has for importing torch."""
LEAVE_OUT_FOLDER = "import sys; sys.path = [*filter(None, sys.path)]; "
"""The beginning of a program without the folder in which it runs on its path."""
_main_lock = threading.Lock()
_server_lock = threading.Lock()
_also: list[str] = []
_used_servers: set[int | None] = set()
"""Fork servers that ranks were asked of."""


@dataclass(slots=True)
class Member:
    """A rank as its launcher sees it.

    Attributes:
        line: The launcher's end of the line to it.
        thread: The ident of the thread that runs its task, None until it is heard of.
        ready: Whether its process group is up.
        outcome: How its task ended, None while it runs.
    """

    rank: int
    process: BaseProcess
    line: Connection[bytes, bytes]
    thread: int | None = None
    ready: bool = False
    outcome: Outcome | None = None


def prepare(method: Method = "fork", also: Sequence[str] = ()) -> None:
    """Begin what `launch(method=method)` will need, in the background, and return at once.

    For "fork" a server process starts to import torch, which takes seconds; the launcher can do
    something else meanwhile. Calling it again is free.

    Args:
        method: As for `launch`.
        also: Further modules for the server to import once it has torch; heeded before the server starts.
    """
    _also.extend(name for name in also if name not in _also)
    if _has_server(method):
        multiprocessing.get_context("forkserver").set_forkserver_preload([preload.__name__])
        resource_tracker.ensure_running()  # first: it lets SIGINT through again on its way
        with interrupts_held(), _server_environment():
            _make_room_for_sockets()
            is_running = _server_pid() is not None
            forkserver.ensure_running()
            if not is_running:
                atexit.register(_end_unused_server, _server_pid(), os.getpid())


def _server_pid() -> int | None:
    """Return the process of the fork server, if one was started: multiprocessing keeps it to itself."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return pid


def _end_unused_server(pid: int | None, launcher: int) -> None:
    """End a fork server that no rank came from: it would see the end of its launcher after seconds of imports."""
    is_own = os.getpid() == launcher  # a forked child ends, too
    if is_own and pid is not None and pid == _server_pid() and pid not in _used_servers:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _server_environment() -> Iterator[None]:
    """Set the environment for a server that starts now: modules to import, a safe path.

    Even `multiprocessing` would import a `random.py` there, before anything of shardviz runs. Python 3.10 knows
    no `PYTHONSAFEPATH`, so there the program that the server runs begins by leaving its folder out.
    """
    start_interpreter = util.spawnv_passfds

    def start_safely(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        at = list(args).index("-c") + 1
        return start_interpreter(path, [*args[:at], LEAVE_OUT_FOLDER + args[at], *args[at + 1 :]], passfds)

    with _server_lock, with_environment({preload.ALSO: ",".join(_also), "PYTHONSAFEPATH": "1"}):
        if sys.version_info < (3, 11):
            util.spawnv_passfds = start_safely
        try:
            yield
        finally:
            util.spawnv_passfds = start_interpreter


def _make_room_for_sockets() -> None:
    """Keep multiprocessing's folder off a temporary path too long for a socket's address.

    A job's own `TMPDIR` on a cluster is often that long. Each process makes the folder once, and keeps it.
    """
    if len(os.fsencode(tempfile.gettempdir())) + SOCKET_NAME <= SOCKET_ADDRESS:
        return
    usual, tempfile.tempdir = tempfile.tempdir, SHORT_FOLDER
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


def start(members: list[Member], job: Job, method: Method) -> None:
    """Start a world's processes, appending each to `members` so that a caller can end it.

    Raises:
        ShardvizError: The machine refused a process, memory or file descriptors.
    """
    try:
        _start_first(members, job, method)
        for number in range(1, job.num_ranks):
            _start_process(members, job, number, method)
    except (OSError, EOFError) as error:
        raise _refusal(len(members), job.num_ranks, error) from None


def _start_first(members: list[Member], job: Job, method: Method) -> None:
    """Start the first process, whose fork server may be importing torch or have died."""
    prepare(method)
    _used_servers.add(_server_pid())
    if not _has_server(method):
        _start_process(members, job, 0, method)
        return
    try:
        with _import_time_limit():
            _start_process(members, job, 0, method)
    except (EOFError, ConnectionError):
        time.sleep(DYING_LIMIT)
        prepare(method)
        with _import_time_limit():
            _start_process(members, job, 0, method)


@contextmanager
def _import_time_limit() -> Iterator[None]:
    """End a fork server that does not finish its imports: nothing else wakes the launcher.

    Raises:
        ShardvizError: The server was ended.
    """
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        with suppress(OSError, TypeError):  # it may have ended by itself
            os.kill(_server_pid(), signal.SIGKILL)  # type: ignore[arg-type]

    timer = threading.Timer(IMPORT_LIMIT, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, EOFError):
        if expired.is_set():
            hint = "run `python -X importtime -c 'import torch'` to see which import does not return"
            raise ShardvizError(f"importing torch did not finish in {IMPORT_LIMIT:g} s", hint) from None
        raise
    finally:
        timer.cancel()


def end(members: list[Member], *, finished: bool) -> None:
    """See every process of a world to its end: politely if all have `finished`, else at once."""
    with interrupts_held():
        if finished:
            _release(members)
        for member in members:
            if member.process.exitcode is None or not finished:
                kill(member.process)
        for member in members:
            member.process.join(LEAVING_LIMIT)
            with suppress(ValueError):  # unkillable, in the kernel's hands
                member.process.close()
            member.line.close()


def kill(process: BaseProcess) -> None:
    """Kill a rank's process and what it started (it leads a process group of its own)."""
    if process.pid is None:
        return
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.exitcode is None:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back, also in processes started meanwhile, which inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_process(members: list[Member], job: Job, number: int, method: Method) -> None:
    parent_end, child_end = multiprocessing.Pipe()
    process = _context(method).Process(target=rank.main, args=(job, number, child_end))
    try:
        resource_tracker.ensure_running()
        with _no_main(), nullcontext() if _has_server(method) else interrupts_held():
            process.start()
    except BaseException:
        parent_end.close()  # a process that did start after all ends itself now
        raise
    finally:
        child_end.close()
    members.append(Member(number, process, parent_end))


def _release(members: list[Member]) -> None:
    for member in members:
        with suppress(OSError):
            member.line.send_bytes(END)
    deadline = time.monotonic() + LEAVING_LIMIT
    for member in members:
        member.process.join(max(0.0, deadline - time.monotonic()))


def _has_server(method: Method) -> bool:
    return method != "spawn" and "forkserver" in multiprocessing.get_all_start_methods()


def _context(method: Method) -> ForkServerContext | SpawnContext:
    if _has_server(method):
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


@contextmanager
def _no_main() -> Iterator[None]:
    """Keep `multiprocessing` from telling a new process to run this one's `__main__` again.

    A script without an `if __name__ == "__main__"` guard would launch ranks from its ranks.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _refusal(num_started: int, num_ranks: int, error: OSError | EOFError) -> ShardvizError:
    files, processes = (_limit(name) for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC"))
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "it cannot fork another"
    return ShardvizError(
        f"the machine refused rank {num_started} of {num_ranks}: {reason} "
        f"(limits: {files} open files, {processes} processes)",
        hint="use a mesh of fewer ranks, or raise the limits (ulimit -n, ulimit -u, memory); "
        f"the {num_started} ranks that had started were ended",
    )


def _limit(name: str) -> str:
    soft, _ = resource.getrlimit(getattr(resource, name))
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
