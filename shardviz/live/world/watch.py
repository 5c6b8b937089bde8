"""Watching a world until all of its ranks have finished, one has failed, or the time is up."""

from __future__ import annotations

import pickle
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from shardviz.live.world.failures import failure, hang
from shardviz.live.world.protocol import Died, Done, Failed, Ready, Started
from shardviz.live.world.starting import kill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.live.world.protocol import Job, Message, Outcome
    from shardviz.live.world.starting import Member

GRACE = 0.5
"""Seconds after the first failure in which others may fail too, to be counted, or turn out to be first."""
ECHO_GRACE = 2.0
"""The same while all failures look like echoes of one that has not been seen yet."""
START_LIMIT = 240.0
"""Seconds without news, beyond the timeout, that ranks have for importing torch and meeting."""


class Watch:
    """The state of a world as its launcher sees it."""

    def __init__(self, members: Sequence[Member], job: Job, coords: Sequence[str]) -> None:
        self._members = members
        self._job = job
        self._coords = coords
        self._heard_at = time.monotonic()
        self._failed_at: float | None = None

    def results(self) -> list[bytes]:
        """Wait for each rank's pickled result.

        Raises:
            ShardvizError: A rank raised it.
            RankFailedError: A rank raised something else, died, or did not finish in time.
        """
        while self._running() and time.monotonic() < self._deadline():
            self._listen(max(0.0, self._deadline() - time.monotonic()))
        outcomes = {member.rank: member.outcome for member in self._members if member.outcome is not None}
        if self._failed_at is not None:
            waiting = hang.places_text(self._members, self._coords, self._job.folder)
            raise failure.explain(outcomes, self._coords, self._job.folder, waiting)
        if self._running():
            raise hang.explain(self._members, self._job.timeout, self._coords, self._job.folder)
        return [outcome.value for outcome in outcomes.values() if isinstance(outcome, Done)]

    def _running(self) -> list[Member]:
        return [member for member in self._members if member.outcome is None]

    def _deadline(self) -> float:
        if self._failed_at is not None:
            return self._failed_at + (GRACE if self._cause_is_known() else ECHO_GRACE)
        if all(member.ready for member in self._members):
            return self._heard_at + self._job.timeout
        return self._heard_at + self._job.timeout + START_LIMIT

    def _cause_is_known(self) -> bool:
        bad = [member.outcome for member in self._members if isinstance(member.outcome, Failed | Died)]
        return not all(failure.is_echo(outcome) for outcome in bad)

    def _listen(self, seconds: float) -> None:
        running = self._running()
        news = wait([*(member.line for member in running), *(member.process.sentinel for member in running)], seconds)
        for member in running:
            if member.line in news:
                self._receive(member)
        for member in running:
            while member.process.sentinel in news and member.outcome is None:
                if member.line.poll():  # its last words, or the end of the line
                    self._receive(member)
                else:
                    self._bury(member)

    def _receive(self, member: Member) -> None:
        try:
            message: Message = pickle.loads(member.line.recv_bytes())
        except (EOFError, OSError):
            self._bury(member)
            return
        if isinstance(message, Started):
            member.thread = message.thread
        elif isinstance(message, Ready):
            member.ready = True
        else:
            self._settle(member, message)
        if not isinstance(message, Done):
            self._heard_at = time.monotonic()

    def _bury(self, member: Member) -> None:
        """Note a rank whose process has ended, or cannot be reached any more."""
        member.process.join(GRACE)
        if member.process.exitcode is None:
            kill(member.process)
            member.process.join()
        self._settle(member, Died(member.process.exitcode or 0, time.monotonic()))

    def _settle(self, member: Member, outcome: Outcome) -> None:
        member.outcome = outcome
        if self._failed_at is None and not isinstance(outcome, Done):
            self._failed_at = time.monotonic()
