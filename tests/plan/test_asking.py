"""Ranks are asked side by side: on many cores as on one, whatever becomes of a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from shardviz.commands.probe import ending_at_signals
from shardviz.errors import RankError
from shardviz.live.plan import forks
from shardviz.live.plan.forks import answers, ask
from tests.lanes import at_night
from tests.live.worlds import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

CORES = [1, 2, *at_night([5])]


@pytest.fixture(params=CORES)
def on_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(forks, "cores", lambda: request.param)
    monkeypatch.setattr(forks, "free_memory", lambda: 1 << 60)
    number: int = request.param
    return number


def hang(folder: Path) -> None:
    """Write down who this is, and wait to be ended; go on after a minute, so that a test that fails ends."""
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_asleep(pid: int) -> bool:
    """Whether a process waits: an exception in the middle of a weak reference's callback would only be printed."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "S"


def waits(folder: Path, name: str) -> None:
    """Wait for a file, which another rank writes."""
    for _ in range(6000):
        if (folder / name).exists():
            return
        time.sleep(0.01)
    raise TimeoutError(name)


def test_every_rank_answers_for_itself(on_cores: int) -> None:
    assert ask([4, 7, 1], lambda rank: rank * 10) == {4: 40, 7: 70, 1: 10}
    assert ask([], lambda rank: rank) == {}


def test_a_rank_is_asked_once_however_often_it_is_named(on_cores: int) -> None:
    assert ask([3, 3, 1], lambda rank: rank) == {3: 3, 1: 1}


def test_no_more_ranks_run_at_a_time_than_there_are_cores(on_cores: int, tmp_path: Path) -> None:
    def work(rank: int) -> int:
        own = tmp_path / f"{os.getpid()}"
        own.touch()
        running = len(list(tmp_path.iterdir()))
        time.sleep(0.05)
        own.unlink()
        return running

    most = max(ask(range(9), work).values())
    assert most <= on_cores
    assert on_cores > 1 or most == 1
    assert max(ask(range(3), work, most=1).values()) == 1


def test_ranks_run_side_by_side_on_two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forks, "cores", lambda: 2)
    monkeypatch.setattr(forks, "free_memory", lambda: 1 << 60)

    def work(rank: int) -> int:
        (tmp_path / str(rank)).touch()
        waits(tmp_path, str(1 - rank))  # in vain, if the second one began only after the first
        return rank

    assert ask([0, 1], work) == {0: 0, 1: 1}


def test_a_rank_may_ask_others(on_cores: int) -> None:
    assert ask([1, 2], lambda rank: sum(ask([rank, rank + 1], lambda other: other * 10).values())) == {1: 30, 2: 50}


@pytest.fixture(params=[*at_night(["SIGINT"]), "SIGKILL"])
def ends_all(request: pytest.FixtureRequest) -> signal.Signals:
    """How a command ends whose ranks have asked others."""
    return signal.Signals[request.param]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_ranks_that_were_asked_by_a_rank_end_with_it(ends_all: signal.Signals, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(BaseException):
            ask([0], lambda _: len(ask([1], lambda _: hang(tmp_path))))
        os._exit(0)
    wait_until(lambda: any(tmp_path.iterdir()))
    os.kill(pid, ends_all)
    os.waitpid(pid, 0)
    (rank,) = (int(path.name) for path in tmp_path.iterdir())
    wait_until(lambda: not is_alive(rank))


def test_as_many_ranks_are_asked_at_a_time_as_memory_suffices_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(free: float | None, used: int = 1 << 30) -> int:
        monkeypatch.setattr(forks, "memory_used", lambda: used)
        monkeypatch.setattr(forks, "free_memory", lambda: None if free is None else int(free * (1 << 30)))
        running = 0
        while forks._has_room(running, 4):
            running += 1
        return running

    assert [most(free) for free in (0, 2.5, 3.5, 99, None)] == [1, 2, 3, 4, 2]
    assert most(99, used=0) == 2, "no rank has answered yet"


def test_a_rank_that_the_system_kills_beside_others_is_asked_again_alone(on_cores: int, tmp_path: Path) -> None:
    def work(rank: int) -> int:
        own = tmp_path / f"{os.getpid()}"
        own.touch()
        time.sleep(0.1)
        if rank == 2 and len(list(tmp_path.iterdir())) > 1:
            own.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        own.unlink()
        return rank

    assert ask(range(6), work) == {rank: rank for rank in range(6)}


def test_a_rank_killed_beside_another_is_asked_again_where_the_other_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(forks, "cores", lambda: 2)
    monkeypatch.setattr(forks, "free_memory", lambda: 1 << 60)

    def work(rank: int) -> int:
        (tmp_path / f"begun-{rank}").touch()
        waits(tmp_path, "begun-1")
        if rank == 0 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            time.sleep(0.5)  # until the other's answer has been taken
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    assert ask([0, 1], work) == {0: 0, 1: 1}


def test_a_rank_for_which_there_is_no_process_is_asked_later(on_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def short(rank: int, work: Callable[[int], object], before=forks.begin) -> object:  # type: ignore[no-untyped-def]
        begun.append(rank)
        if begun.count(rank) == 1 and rank > 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return before(rank, work)

    monkeypatch.setattr(forks, "begin", short)
    if on_cores == 1:
        monkeypatch.setattr(forks, "_has_room", lambda running, most: running < 2)
    assert ask([0, 1], lambda rank: rank * 10) == {0: 0, 1: 10}
    assert begun == [0, 1, 1]


def test_where_no_process_can_begin_the_error_says_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(rank: int, work: object) -> object:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(forks, "begin", short)
    with pytest.raises(RankError, match="rank 3 cannot be asked: Too many open files") as raised:
        ask([3], lambda rank: rank)
    assert "ulimit -n" in str(raised.value.hint)


class Odd(BaseException):
    """No Exception, like torch's CheckpointException."""


def raises_odd(_: int) -> None:
    raise Odd("from torch")


@pytest.mark.parametrize(
    ("work", "said"),
    [(raises_odd, "rank 3: Odd: from torch"), (lambda _: lambda: 1, "rank 3: .*(pickle|local object)")],
)
def test_what_is_no_exception_and_what_cannot_be_pickled_is_said(work: Callable[[int], object], said: str) -> None:
    with pytest.raises(RankError, match=said):
        ask([3], work)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_another_program_ends_is_not_an_error_of_the_probe(number: signal.Signals) -> None:
    def ends(_: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    before = signal.getsignal(number)
    try:
        signal.signal(number, signal.SIG_DFL)
        with ending_at_signals(), pytest.raises(RankError, match=f"rank 3 died, exit code -{number:d}") as raised:
            ask([3], ends)
    finally:
        signal.signal(number, before)
    assert "another program has ended it" in str(raised.value.hint)


def test_ranks_end_when_the_process_that_asks_them_is_killed(tmp_path: Path) -> None:
    def work(rank: int) -> bytes:
        (tmp_path / str(os.getpid())).touch()
        waits(tmp_path, "killed")
        return b"x" * (1 << 20)  # more than a pipe holds

    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            ask([0, 1], work)
        os._exit(0)
    try:
        wait_until(lambda: any(tmp_path.iterdir()))
        time.sleep(0.1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    (tmp_path / "killed").touch()
    assert ranks
    wait_until(lambda: not any(map(is_alive, ranks)))


def test_time_in_which_all_is_stopped_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_rank: int) -> int:
        for number in range(14):
            (tmp_path / f"at work {number}").touch()
            time.sleep(0.1)
        return 0

    monkeypatch.setattr(forks, "TICK", 0.5)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        code = 1
        try:
            code = dict(answers([0], work, patience=4.0))[0]
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    # Once the rank has worked for a while, what asks it is waiting.
    wait_until((tmp_path / "at work 5").exists)
    os.killpg(pid, signal.SIGSTOP)
    time.sleep(4.5)
    os.killpg(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: os._exit(3), "rank 1 died, exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 died, exit code -9"),
        (lambda: [][0], "rank 1: IndexError: list index out of range"),
    ],
)
def test_a_rank_that_fails_is_named(fails: Callable[[], object], said: str, on_cores: int) -> None:
    with pytest.raises(RankError, match=said):
        ask([0, 1, 2], lambda rank: fails() if rank == 1 else rank)


def test_a_rank_that_hangs_is_ended_and_named(on_cores: int, tmp_path: Path) -> None:
    def hangs(rank: int) -> int:
        if rank == 3:
            hang(tmp_path)
        return rank

    with pytest.raises(RankError, match=r"rank 3 did not answer for 0\.5 s"):
        dict(answers([3], hangs, patience=0.5))
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


def test_who_takes_no_more_answers_ends_all_ranks(on_cores: int, tmp_path: Path) -> None:
    def work(rank: int) -> int:
        if rank:
            hang(tmp_path)
        return rank

    for rank, _ in answers([0, 1, 2], work):
        assert rank == 0
        break
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


def test_ctrl_c_leaves_no_rank_running(on_cores: int, tmp_path: Path) -> None:
    def work(rank: int) -> int:
        (tmp_path / str(os.getpid())).touch()
        if rank == 0:
            wait_until(lambda: len(list(tmp_path.iterdir())) == min(on_cores, 2) and is_asleep(os.getppid()))
            os.kill(os.getppid(), signal.SIGINT)
        hang(tmp_path)
        return rank

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            ask([0, 1], work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir())
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


def test_a_rank_waits_for_no_thread_of_the_process_that_asks_it() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 22).exp_()  # from now on this process has threads, and a fork of it has none
        asked = answers([0], lambda _: torch.ones(1 << 22).exp_().numel(), patience=20.0)
        assert dict(asked) == {0: 1 << 22}
    finally:
        torch.set_num_threads(before)
