"""Launching ranks: what a user gets back, and that no rank is left running, however it ends."""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.errors import EXIT_RANK_FAILED, EXIT_USAGE, MeshError, RankError, ShardvizError
from shardviz.live.world import RankFailedError, World, failures, launch, launching, prepare, stacks
from shardviz.live.world.torchrun import variables
from tests.lanes import at_night
from tests.live.worlds import OF_WORLDS, PATIENCE, ROOT, assert_nothing_runs_below, run

if TYPE_CHECKING:
    from pathlib import Path

SOON = PATIENCE
"""Seconds within which a failure ends a world: a quarter of the timeout, for which it must not wait."""
pytestmark = OF_WORLDS


def failure(name: str, *args: Any, **options: Any) -> RankFailedError:
    started, timeout = time.monotonic(), options.pop("timeout", 4 * SOON)
    with pytest.raises(RankFailedError) as caught:
        run(name, *args, timeout=timeout, **options)
    assert time.monotonic() - started < (timeout if timeout < SOON else 0) + SOON
    assert_nothing_runs_below(os.getpid())
    return caught.value


def usage_error(name: str, *args: Any, **options: Any) -> ShardvizError:
    with pytest.raises(ShardvizError) as caught:
        run(name, *args, **options)
    assert not isinstance(caught.value, RankError)
    assert caught.value.exit_code == EXIT_USAGE
    return caught.value


# What comes back


@pytest.mark.parametrize("method", ["fork", *at_night(["spawn"])])
def test_every_rank_returns_its_result_in_rank_order(method: str) -> None:
    num_ranks = 2 if method == "spawn" else 8
    results = run("add_up", 10, num_ranks=num_ranks, method=method)
    assert [result["world"] for result in results] == [
        World(rank, num_ranks, "gloo", "cpu") for rank in range(num_ranks)
    ]
    assert {result["total"] for result in results} == {10 * num_ranks + sum(range(num_ranks))}


def test_one_rank_is_a_world_too() -> None:
    assert run("add_up", num_ranks=1)[0]["total"] == 0


def test_the_groups_of_a_mesh_work() -> None:
    assert run("mesh_of_two_axes") == [[1, 1], [1, 1], [5, 5], [5, 5]]


def test_ranks_may_finish_at_different_times() -> None:
    assert run("finish_at_different_times") == [0, 1, 2, 3]


def test_ranks_start_alike_and_as_the_launcher_is_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare()
    monkeypatch.setenv("SHARDVIZ_TEST_SETTING", "set after the server started")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    seen = run("look_around")
    assert {look["setting"] for look in seen} == {"set after the server started"}
    assert {look["cwd"] for look in seen} == {str(tmp_path)}
    assert {(look["threads"], look["omp"]) for look in seen} == {(1, "1")}
    assert len({look["draws"] for look in seen}) == 1
    assert [look["of torchrun"] for look in seen] == [variables(rank, 4, 4) for rank in range(4)]
    assert len({look["group"] for look in seen} - {os.getpgrp()}) == 4


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_do_not_run_the_launchers_main(method: str) -> None:
    assert {look["main"] for look in run("look_around", num_ranks=1, method=method)} == {None}


def test_gloo_uses_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert {look["interface"] for look in run("look_around", num_ranks=2)} == {"lo"}


def test_gloo_uses_the_interface_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert "nosuch0" in str(failure("look_around", num_ranks=2))


def test_several_worlds_at_once_do_not_meet() -> None:
    totals: dict[int, set[int]] = {}

    def world(start: int) -> None:
        totals[start] = {result["total"] for result in run("add_up", start, num_ranks=3)}

    launchers = [threading.Thread(target=world, args=(start,)) for start in (0, 100, 200)]
    for launcher in launchers:
        launcher.start()
    for launcher in launchers:
        launcher.join()
    assert totals == {0: {3}, 100: {303}, 200: {603}}


# What ranks print


def test_what_ranks_print_comes_back_by_rank_without_torchs_chatter(capfd: pytest.CaptureFixture[str]) -> None:
    printed: dict[int, str] = {}
    run("talk", on_output=printed.__setitem__)
    assert sorted(printed) == [0, 1, 2, 3]
    assert all(f"hello from {rank}\n" in printed[rank] for rank in range(4))
    assert all("and to stderr\n" in text for text in printed.values())
    assert not any("[Gloo]" in text for text in printed.values())
    assert capfd.readouterr() == ("", "")
    assert all("from C\n" in text and "a warning" in text for text in printed.values())


def test_of_very_long_output_the_end_is_kept() -> None:
    printed: dict[int, str] = {}
    run("shout", num_ranks=1, on_output=printed.__setitem__)
    assert printed[0].endswith("x\nthe end\n")
    assert printed[0].startswith(("[1,048,585 bytes ", "[1,048,676 bytes "))  # gloo of torch 2.9 prints a line, too
    assert " bytes before this were dropped]\n" in printed[0]


def test_output_comes_back_from_a_world_that_fails() -> None:
    printed: dict[int, str] = {}
    error = failure("die", 1, "_exit", on_output=printed.__setitem__)
    assert printed[1] == error.output == "about to go\n"
    assert "Last output of rank 1:\n  about to go" in str(error)


# A rank that raises


def test_a_rank_that_raises_is_named_with_its_own_traceback() -> None:
    error = failure("fail_on", 3)
    lines = str(error).splitlines()
    assert lines[0] == "rank 3 (fsdp=1, tp=1) raised ValueError: a bad number"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].startswith(f'  File "{ROOT}/tests/live/world_tasks.py", line ')
    assert lines[-3:] == ["ValueError: a bad number", "of rank 3", "ranks 0-2: waiting in barrier over all ranks"]
    assert (error.rank, error.coord, error.exit_code) == (3, "fsdp=1, tp=1", EXIT_RANK_FAILED)


def test_messages_of_exceptions_are_cut_to_a_screen() -> None:
    error = failure("fail_at_length", num_ranks=1)
    assert error.message == "rank 0 (fsdp=0, tp=0) raised ValueError: line 0"
    lines = str(error).splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) < 600
    assert lines[-2:] == ["line 19", "... 4,980 more lines"]


def test_the_traceback_leaves_out_torchs_wrappers() -> None:
    text = failure("fail_in_a_module").traceback_text
    assert "nn/modules/linear.py" in text
    assert "_call_impl" not in text
    assert "shardviz/live" not in text


@pytest.mark.usefixtures("late_failures")
def test_ranks_that_all_raise_the_same_are_reported_once() -> None:
    error = failure("fail_everywhere")
    assert error.message == ("rank 0 (fsdp=0, tp=0) raised KeyError: 'missing on 0', and 3 other ranks the same")
    assert str(error).count("Traceback") == 1


def test_the_cause_is_reported_not_the_closed_connections_that_came_before_it() -> None:
    error = failure("close_connections_after", 2)
    assert error.message == "rank 2 (fsdp=1, tp=0) raised ValueError: the cause"
    assert "then lost the connection" in error.others
    assert "closed by peer" not in str(error)


def test_one_rank_that_raises_ends_the_others() -> None:
    assert failure("fail_beside_a_sleeper").message.endswith("raised ValueError: early")


def test_a_usage_error_of_a_rank_comes_back_as_it_is() -> None:
    error = usage_error("misuse")
    assert type(error) is MeshError
    assert str(error) == "mesh 2 x 3 has 6 ranks, not 4\nHint: use --mesh 2,2"


def test_a_failure_survives_pickling() -> None:
    error = RankFailedError("rank 1 raised", "a hint", 1, "tp=1", "Traceback", "printed", "others")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# A rank that dies


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("kill", "was killed by signal 9 (SIGKILL)"),
        ("segfault", "was killed by signal 11 (SIGSEGV)"),
        ("_exit", "exited with code 7 before it finished"),
        ("0", "exited with code 0 before it finished"),
    ],
)
def test_a_rank_that_dies_is_named_with_how(how: str, what: str) -> None:
    error = failure("die", 1, how)
    assert error.message == f"rank 1 (fsdp=0, tp=1) {what}"
    assert error.hint
    assert ("out of memory" in error.hint) == (how == "kill")
    assert ("in end_process" in error.output) == (how == "segfault")


# A rank that hangs


def test_ranks_that_wait_for_one_that_never_comes_name_the_collective() -> None:
    error = failure("skip_the_collective", 0, timeout=3)
    assert error.message == "ranks 1-3 did not finish in 3 s: waiting in all_gather_into_tensor over all ranks"
    assert "in skip_the_collective\n    dist.all_gather_into_tensor(" in error.traceback_text
    assert error.traceback_text.count("skip_the_collective") == 1
    assert error.others == "rank 0 had finished"
    assert "a collective that not every rank" in error.hint


def test_a_rank_that_is_elsewhere_is_distinguished() -> None:
    error = failure("sleep_on", 2, timeout=3)
    assert "ranks 0-1, 3 waiting in all_reduce over all ranks; rank 2 in sleep_on (world_tasks.py:" in error.message
    assert "time.sleep(100)" in error.traceback_text


def test_ranks_that_wait_name_the_axis_whose_group_they_wait_in() -> None:
    error = failure("skip_the_axis", 3, timeout=3)
    assert re.fullmatch(
        r"ranks 0-2 did not finish in 3 s: ranks 0-1 waiting in (full|all_gather)_tensor over fsdp; "
        r"rank 2 waiting in all_gather over tp",
        error.message,
    )


def test_one_rank_that_hangs_is_named_with_its_coordinate() -> None:
    error = failure("sleep_on", 0, num_ranks=1, timeout=0.5)
    assert error.message.startswith("rank 0 (fsdp=0, tp=0) did not finish in 0.5 s: in sleep_on")
    assert "collective" not in error.hint


def test_a_stack_begins_at_the_users_own_code_and_what_shardviz_calls_says_so() -> None:
    mine, probe, gather = (stacks.Frame(file, 1, "f") for file in ("/mine.py", failures.__file__, launching.__file__))
    assert failures._shown_frames((probe, mine, gather)) == (mine, gather)
    assert failures._shown_frames((probe, gather)) == (gather,)


# Jobs that cannot be


def test_arguments_and_results_that_cannot_travel_are_named() -> None:
    assert "arguments of tests.live.world_tasks:echo cannot be pickled" in str(usage_error("echo", lambda: None))
    assert "returned a function that cannot be sent" in str(usage_error("return_a_lambda"))


def test_jobs_that_make_no_sense_are_refused_before_anything_starts() -> None:
    with pytest.raises(ShardvizError, match=r"'tests\.live\.world_tasks' does not name a task"):
        launch("tests.live.world_tasks", num_ranks=1)
    assert "cannot launch 0 ranks: a world has at least 1" in str(usage_error("add_up", num_ranks=0))
    error = usage_error("add_up", method="threads")
    assert str(error) == "unknown launch method 'threads'\nHint: use fork or spawn"


@pytest.mark.usefixtures("late_failures")
def test_a_task_that_is_not_there_is_named() -> None:
    assert "has no attribute 'nope', and 3 other ranks the same" in failure("nope").message


@pytest.mark.parametrize("backend", ["nosuch", "cpu:gloo,cuda:nosuch"])
def test_a_backend_that_torch_lacks_is_named_with_those_it_has(backend: str) -> None:
    error = usage_error("add_up", backend=backend)
    assert "has no process group backend 'nosuch'" in error.message
    assert "gloo" in error.hint


def test_a_backend_of_another_build_of_torch_says_which_build_has_it() -> None:
    error = usage_error("add_up", backend="mpi")
    assert error.message.endswith("has no process group backend 'mpi'")
    assert error.hint.startswith("mpi needs a torch that was built from source on a machine with MPI; this one has ")


def test_a_named_backend_is_used() -> None:
    assert {result["world"].backend for result in run("add_up", backend="gloo")} == {"gloo"}
