"""The job that `shardviz run` starts: its process, the signals that it gets, and what it leaves running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.live.run.options import ranks_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.live.run.options import Options

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a command is asked to end: by Ctrl-C, a scheduler or `timeout`, a terminal that closes."""

GRACE = 5.0
"""Seconds that ranks have to end by themselves, then after SIGTERM."""

PAUSE = 0.1


def run_job(job: Sequence[str], options: Options) -> int:
    """Run the job to its end; what ends this command ends the job first.

    Returns:
        The job's exit code; if it is not 0 and this command was asked to end, minus the signal's number.
    """
    sys.stderr.flush()
    try:
        process = subprocess.Popen(job, env=os.environ | options.environment(), stdout=sys.stderr)
    except OSError as error:
        raise ShardvizError(f"cannot start {job[0]}: {error.strerror}", _how_to_start(job[0])) from error
    with _passing_on(process) as seen:
        code = process.wait()
        if code or seen:
            _end_ranks(Path(options.session))
    return -min(seen, key=ENDING.index) if code and seen else code


def _how_to_start(program: str) -> str:
    """Return what to do about a command that does not start."""
    if program.endswith(".py"):
        return f"put python or torchrun before it: shardviz run -- torchrun --nproc-per-node 2 {program}"
    return "give the path of a program, or activate the environment that has it"


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[set[int]]:
    """Let the job see the signals that this command gets, and wait for it: it has ranks to end. Gives those seen."""
    seen: set[int] = set()

    def pass_on(number: int, frame: object) -> None:
        seen.add(number)
        if process.poll() is None and (number != signal.SIGINT or not sys.stdin.isatty()):
            process.send_signal(number)  # Ctrl-C reaches a terminal's whole process group by itself

    heeded = [signum for signum in ENDING if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, pass_on) for signum in heeded}  # nohup has SIGHUP ignored, and it stays so
    try:
        yield seen
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end_ranks(session: Path) -> None:
    """End the ranks on this machine that have outlived what started them, once they had time to end by themselves."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE
        while left := [pid for pid in ranks_on(session) if _is_of(pid, session)]:
            for pid in left if number else []:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE)
        else:
            return


def _is_of(pid: int, session: Path) -> bool:
    """Whether a process is of the job: another one may have got the number of one that is gone."""
    try:
        return os.fsencode(session) in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or a system that has no /proc
        return False
