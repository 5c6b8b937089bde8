"""The messages between a launcher and its ranks: the job goes out, reports come back.

Plain data only, and nothing here imports torch: the launcher reads all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from signal import Signals
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class World:
    """A rank's place in its world: the first argument of every task.

    Attributes:
        rank: The global rank, from 0.
        backend: The process group's backend: "gloo", "nccl" or "mpi".
        device_type: Where tensors of this backend live: "cpu" or "cuda".
    """

    rank: int
    num_ranks: int
    backend: str
    device_type: str


@dataclass(frozen=True, slots=True)
class Job:
    """The job, the same for every rank of one world.

    Attributes:
        task: "package.module:function".
        args: The pickled arguments that follow the `World`.
        backend: The backend asked for, None to choose by the machine's GPUs.
        timeout: Seconds that the launcher waits for the task.
        folder: A private folder: the store that ranks meet in, their output, their stacks.
        environ: The launcher's environment now. A fork server still has the one of its own start.
    """

    task: str
    args: bytes
    num_ranks: int
    backend: str | None
    timeout: float
    folder: Path
    environ: dict[str, str]


@dataclass(frozen=True, slots=True)
class Started:
    """The rank's process runs; `thread` is the ident of the thread that will run its task."""

    thread: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank's process group is up; its task begins."""


@dataclass(frozen=True, slots=True)
class Done:
    """The task returned; `value` is its pickled result."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank raised.

    Attributes:
        kind: The exception's class name.
        message: Its text, possibly empty, possibly of several lines.
        traceback_text: The traceback from the task on, with the exception itself as the last lines.
        where: "file:line" of the innermost frame.
        when: `time.monotonic()` of the raise, one clock for all processes of a machine.
        usage: The pickled exception if it is a `ShardvizError`, which the launcher raises again as it is.
    """

    kind: str
    message: str
    traceback_text: str
    where: str
    when: float
    usage: bytes | None = None

    @property
    def headline(self) -> str:
        """What happened, in one line."""
        first = self.message.strip().partition("\n")[0]
        return f"raised {self.kind}: {first}" if first else f"raised {self.kind}"


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended before its task did, or the task asked for that with `sys.exit`.

    Attributes:
        exit_code: As in `multiprocessing.Process.exitcode`: minus the signal for one killed by it.
        when: `time.monotonic()` of the exit, or when the launcher saw it.
    """

    exit_code: int
    when: float

    @property
    def headline(self) -> str:
        """What happened, in one line."""
        if self.exit_code >= 0:
            return f"exited with code {self.exit_code} before it finished"
        try:
            return f"was killed by signal {-self.exit_code} ({Signals(-self.exit_code).name})"
        except ValueError:
            return f"was killed by signal {-self.exit_code}"


Outcome = Done | Failed | Died
Message = Started | Ready | Outcome
END = b"end"
"""Sent to the ranks when all have finished: they may leave."""
WHERE = b"where"
"""Sent to a rank to ask in which process groups it waits."""


def load_task(task: str) -> Callable[..., Any]:
    """Import the function that "package.module:function" names."""
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
