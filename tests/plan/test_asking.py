"""Programs ask ranks side by side: on many cores as on one, whatever becomes of a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from shardviz.commands.probe import ending_at_signals
from shardviz.errors import RankError, ShardvizError
from shardviz.live.plan import asking
from shardviz.live.plan.asking import Request, ask, together
from tests.lanes import at_night, nightly
from tests.live.worlds import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.live.plan.asking import Program

CORES = [1, 2, *at_night([5])]


@pytest.fixture(params=CORES)
def on_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(asking, "cores", lambda: request.param)
    monkeypatch.setattr(asking, "free_memory", lambda: 1 << 60)
    number: int = request.param
    return number


def asks(*questions: list[int], work: Callable[[int], int] = lambda rank: rank * 10) -> Program[list[dict[int, int]]]:
    """Ask some ranks, then others; return all answers, or what was raised."""
    found = []
    for ranks in questions:
        try:
            found.append((yield Request(ranks, work)))
        except RankError as error:
            found.append({0: len(str(error))})
    return found


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


def test_every_program_gets_the_answers_of_its_own_ranks_in_turn(on_cores: int) -> None:
    programs = [asks([number, 7], [], [number + 1]) for number in range(5)]
    assert dict(together(programs)) == {
        number: [{number: number * 10, 7: 70}, {}, {number + 1: number * 10 + 10}] for number in range(5)
    }


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

    found = dict(together([asks([0, 1, 2], work=work) for _ in range(3)]))
    most = max(running for answers in found.values() for running in answers[0].values())
    assert most <= on_cores
    assert on_cores > 1 or most == 1


def test_programs_run_side_by_side_where_there_are_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(asking, "cores", lambda: 2)
    monkeypatch.setattr(asking, "free_memory", lambda: 1 << 60)

    def first(_: int) -> int:
        waits(tmp_path, "second")  # in vain, if the second program began only after this one
        return 1

    def second(_: int) -> int:
        (tmp_path / "second").touch()
        return 2

    assert dict(together([asks([0], work=first), asks([0], work=second)])) == {0: [{0: 1}], 1: [{0: 2}]}


@nightly
def test_on_one_core_programs_end_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "cores", lambda: 1)
    assert [number for number, _ in together([asks([0, 1], [2]) for _ in range(4)])] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("free", "known", "most"),
    [(0, True, 1), (2.5, True, 2), (3.5, True, 3), (99, True, 4), (99, False, 2), (None, True, 2)],
)
def test_as_many_ranks_are_asked_at_a_time_as_memory_suffices_for(
    free: float | None, known: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = 1 << 30
    monkeypatch.setattr(asking, "cores", lambda: 4)
    monkeypatch.setattr(asking, "memory_used", lambda: used)
    monkeypatch.setattr(asking, "free_memory", lambda: None if free is None else int(free * used))
    begun = []

    def counted(rank: int, work: Callable[[int], object], before=asking.begin) -> object:  # type: ignore[no-untyped-def]
        begun.append(rank)
        return before(rank, work)

    monkeypatch.setattr(asking, "begin", counted)
    turns = asking._Turns([asks([0, 1, 2, 3, 4])])
    turns._has_answers = known
    try:
        assert list(turns._fill()) == []
    finally:
        turns.stop()
    assert len(begun) == most


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
    monkeypatch.setattr(asking, "cores", lambda: 2)
    monkeypatch.setattr(asking, "free_memory", lambda: 1 << 60)

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
    running = [0]

    def short(rank: int, work: Callable[[int], object], before=asking.begin) -> object:  # type: ignore[no-untyped-def]
        if len(turns[0]._open[0].running) > 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        running[0] += 1
        return before(rank, work)

    monkeypatch.setattr(asking, "begin", short)
    turns = [asking._Turns([asks([0, 1, 2])])]
    assert list(turns[0].run()) == [(0, [{0: 0, 1: 10, 2: 20}])]
    assert running == [3]


def test_where_no_process_can_begin_the_error_says_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(rank: int, work: object) -> object:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asking, "begin", short)
    with pytest.raises(RankError, match="rank 3 cannot be asked: Too many open files") as raised:
        ask([3], lambda rank: rank)
    assert "ulimit -n" in str(raised.value.hint)


class Odd(BaseException):
    """No Exception, like torch's CheckpointException."""


def raises_odd(_: int) -> None:
    raise Odd("from torch")


@pytest.mark.parametrize(
    ("work", "said"), [(raises_odd, "rank 3: Odd: from torch"), (lambda _: lambda: 1, "rank 3: .*pickle")]
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

    monkeypatch.setattr(asking, "WAIT", 4.0)
    monkeypatch.setattr(asking, "TICK", 0.5)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        code = 1
        try:
            code = ask([0], work)[0]
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
def test_a_rank_that_fails_ends_its_own_program_and_no_other(
    fails: Callable[[], object], said: str, on_cores: int
) -> None:
    def work(rank: int) -> int:
        return fails() is None if rank == 1 else rank

    raised: list[str] = []

    def failing() -> Program[str]:
        try:
            yield Request([0, 1, 2], work)
        except RankError as error:
            raised.append(str(error))
            again = yield Request([2], work)  # a program may go on
            return f"went on with {again}"
        return "not reached"

    found = dict(together([asks([0], work=work), failing(), asks([0, 2], work=work)]))
    assert found == {0: [{0: 0}], 1: "went on with {2: 2}", 2: [{0: 0, 2: 2}]}
    assert len(raised) == 1
    assert said in raised[0]


def test_a_rank_that_hangs_is_ended_and_named(on_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WAIT", 0.5)

    def hangs(rank: int) -> int:
        if rank == 3:
            hang(tmp_path)
        return rank

    with pytest.raises(RankError, match=r"rank 3 did not answer for 0\.5 s"):
        ask([3], hangs)
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


def test_what_a_program_raises_ends_all_of_them(on_cores: int, tmp_path: Path) -> None:
    def hangs(_: int) -> int:
        hang(tmp_path)
        return 0

    def raises() -> Program[None]:
        yield Request([0], lambda _: 0)
        raise ShardvizError("too many ranks differ")

    programs = [raises(), asks([0, 1], work=hangs)]
    with pytest.raises(ShardvizError, match="too many"):
        list(together(programs))
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
            list(together([asks([0], work=work), asks([1], work=work)]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir())
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


def test_a_rank_waits_for_no_thread_of_the_process_that_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WAIT", 20.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 22).exp_()  # from now on this process has threads, and a fork of it has none
        assert ask([0], lambda _: torch.ones(1 << 22).exp_().numel()) == {0: 1 << 22}
    finally:
        torch.set_num_threads(before)
