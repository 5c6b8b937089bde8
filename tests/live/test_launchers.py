"""Scripts that launch ranks: their `__main__`, stdout and signals are theirs, and nothing is left when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardviz.cli import main
from shardviz.errors import EXIT_USAGE, ShardvizError
from shardviz.live.world import torchrun_world
from tests.lanes import at_night, nightly
from tests.live.run.ranks import free_port
from tests.live.worlds import (
    OF_WORLDS,
    PATIENCE,
    ROOT,
    assert_nothing_runs_below,
    children,
    is_running,
    run,
    script,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = OF_WORLDS


def test_what_a_rank_started_ends_with_it() -> None:
    pids = run("leave_a_child")
    wait_until(lambda: not any(map(is_running, pids)))
    assert_nothing_runs_below(os.getpid())


USED = """
import os, resource, signal, sys
from multiprocessing import forkserver
from tests.live.worlds import is_running, wait_until
prepare()
print("main")
print(launch("tests.live.world_tasks:talk", num_ranks=2), "torch" in sys.modules)
def attempt(*task, **ranks):
    try:
        launch(*task, **ranks)
    except Exception as error:
        print(error)
class Mine: pass
attempt("tests.live.world_tasks:echo", (Mine(),), num_ranks=1)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, limits[1]))
attempt("tests.live.world_tasks:add_up", num_ranks=64)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
pid = forkserver._forkserver._forkserver_pid
os.kill(pid, signal.SIGKILL)
wait_until(lambda: not is_running(pid))
print(launch("tests.live.world_tasks:echo", (5,), num_ranks=2))
"""


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Launch ranks in many ways from one script, and return the lines of its stdout.

    Its temporary folder has a long path, and its working folder has files with names of torch's modules.
    """
    top = tmp_path_factory.mktemp("used")
    folder, temporary = top / "work", top / ("long" * 25)
    folder.mkdir()
    temporary.mkdir()
    for name in ("random", "cuda", "sympy"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} is not meant for torch')")
    environ = {"TMPDIR": str(temporary)}
    stdout, stderr = script(top, USED, cwd=folder, environ=environ).communicate(timeout=PATIENCE)
    assert stderr == ""
    return stdout.splitlines()


def test_the_launcher_imports_no_torch_runs_no_main_twice_and_keeps_its_stdout(used: list[str]) -> None:
    assert used[:2] == ["main", "[None, None] False"]
    assert used.count("main") == 1


def test_what_ranks_cannot_import_is_one_clear_line(used: list[str]) -> None:
    assert "arguments of tests.live.world_tasks:echo cannot be unpickled in a rank" in used[2]
    assert any("do not import the script that launches them" in line for line in used)


def test_more_ranks_than_the_machine_can_start_is_one_clear_line(used: list[str]) -> None:
    line, hint = used[-3:-1]
    assert line.startswith("the machine refused rank ")
    assert "of 64: Too many open files (limits: 40 open files" in line
    assert hint.startswith("Hint: use a mesh of fewer ranks, or raise the limits")


def test_a_server_that_was_killed_is_replaced(used: list[str]) -> None:
    """That of this process has imported every test for ranks; without it each later rank would import its own."""
    assert used[-1] == "[5, 5]"


ECHO = """
try:
    print(launch("tests.live.world_tasks:echo", (5,), num_ranks=2))
except Exception as error:
    print(error)
"""


def test_an_exception_while_torch_is_imported_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "sympy.py").write_text("raise RuntimeError('a broken install')")
    limit = (
        "from shardviz.live.world import launching; launching.GRACE = 60.0\n"  # it ends with the last rank that raises
    )
    ended = script(tmp_path, limit + ECHO, environ={"PYTHONPATH": f"{ROOT}:{folder}"})
    stdout, stderr = ended.communicate(timeout=PATIENCE)
    assert stderr == ""
    assert stdout.startswith("rank 0 raised RuntimeError: a broken install, and 1 other rank the same\n")
    assert f'File "{folder}/sympy.py", line 1' in stdout


def test_an_import_that_never_ends_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "sympy.py").write_text("import time; time.sleep(1000)")
    limit = "from shardviz.live.world import starting; starting.IMPORT_LIMIT = 1.0\n"
    stdout, stderr = script(tmp_path, limit + ECHO, environ={"PYTHONPATH": f"{ROOT}:{folder}"}).communicate(
        timeout=PATIENCE
    )
    assert stderr == ""
    line, hint = stdout.splitlines()
    assert line == "importing torch did not finish in 1 s"
    assert hint.startswith("Hint: run `python -X importtime")


@pytest.mark.parametrize("number", [signal.SIGKILL, *at_night([signal.SIGINT, signal.SIGTERM])])
def test_a_launcher_that_is_stopped_leaves_nothing_running(tmp_path: Path, number: int) -> None:
    note = tmp_path / "note"
    launcher = script(tmp_path, f"launch('tests.live.world_tasks:sleep_with_a_child', ({str(note)!r},), num_ranks=2)")
    wait_until(lambda: len(list(tmp_path.glob("note.*.done"))) == 2)
    pids = [int(pid) for file in tmp_path.glob("note.*.done") for pid in file.read_text().split()]
    assert all(map(is_running, pids))
    if number == signal.SIGINT:
        os.killpg(launcher.pid, number)  # as a terminal does
    else:
        os.kill(launcher.pid, number)
    stderr = launcher.communicate(timeout=PATIENCE)[1]
    wait_until(lambda: not any(map(is_running, pids)))
    wait_until(lambda: not list((tmp_path / "tmp").glob("shardviz-*")))
    assert stderr.count("Traceback") == stderr.count("KeyboardInterrupt") == (number == signal.SIGINT)


def test_ctrl_c_while_torch_is_still_being_imported_says_one_thing(tmp_path: Path) -> None:
    launcher = script(tmp_path, "launch('tests.live.world_tasks:add_up', num_ranks=2)")
    wait_until(lambda: len(children(launcher.pid)) >= 2)
    pids = list(children(launcher.pid))
    os.killpg(launcher.pid, signal.SIGINT)
    stderr = launcher.communicate(timeout=PATIENCE)[1]
    assert stderr.count("KeyboardInterrupt") == 1
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_server_that_was_prepared_in_vain_ends_with_its_launcher(tmp_path: Path) -> None:
    """As after a mesh that does not fit: the server, still importing torch, would work on for seconds."""
    show = "from multiprocessing import forkserver; print(forkserver._forkserver._forkserver_pid)"
    stdout, stderr = script(tmp_path, f"prepare(); {show}").communicate(timeout=PATIENCE)
    assert (stderr, is_running(int(stdout))) == ("", False)


def test_ctrl_c_while_ranks_hang_says_where_they_are_and_leaves_nothing_running(tmp_path: Path) -> None:
    note = tmp_path / "note"
    soon = "from shardviz.live.world import launching; launching.LONG = 0.0\n"
    task = f"launch('tests.live.world_tasks:sleep_with_a_child', ({str(note)!r},), num_ranks=2)"
    launcher = script(tmp_path, soon + task)
    wait_until(lambda: len(list(tmp_path.glob("note.*.done"))) == 2)
    pids = [int(pid) for file in tmp_path.glob("note.*.done") for pid in file.read_text().split()]
    os.killpg(launcher.pid, signal.SIGINT)
    stderr = launcher.communicate(timeout=PATIENCE)[1]
    wait_until(lambda: not any(map(is_running, pids)))
    wait_until(lambda: not list((tmp_path / "tmp").glob("shardviz-*")))
    assert stderr.count("Traceback") == stderr.count("KeyboardInterrupt") == 1
    assert "KeyboardInterrupt: ranks 0-1: in sleep_with_a_child (world_tasks.py:" in stderr


# Under torchrun


JOB = """
import os, sys
import shardviz.live.world.group  # torch, once for both ranks
rank = int(bool(os.fork()))
os.environ['RANK'] = str(rank)
sys.stdout = open(f'{sys.argv[0]}.{rank}', 'w')
print(run_joined('tests.live.world_tasks:add_up', (5,))['total'])
os.environ['MASTER_PORT'] = os.environ['NEXT_PORT']  # a rank could meet the store of the first job, not closed yet
try:
    run_joined('tests.live.world_tasks:fail_everywhere', coords=['tp=0', 'tp=1'])
except Exception as error:
    print(str(error).splitlines()[0])
sys.stdout.flush()
if rank:
    os.wait()
"""


def test_ranks_of_a_torchrun_job_join_it_and_leave_it(tmp_path: Path) -> None:
    ports = {"MASTER_PORT": free_port(), "NEXT_PORT": free_port()}
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **ports}
    script(tmp_path, JOB, environ=environ).communicate(timeout=PATIENCE)
    for rank in range(2):
        lines = (tmp_path / f"script.py.{rank}").read_text().splitlines()
        joined, failed = [line for line in lines if not line.startswith("[Gloo]")]  # which torch 2.9 prints
        assert (joined, failed) == ("11", f"rank {rank} (tp={rank}) raised KeyError: 'missing on {rank}'")


def test_ranks_of_a_torchrun_job_print_the_error_they_share_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed import TCPStore

    launchers = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launchers.port)}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["probe", "fsdp", "--mesh", "3"]) == EXIT_USAGE
    assert capsys.readouterr().err == (
        "shardviz: error: fsdp(3) = 3 != WORLD_SIZE(2)\nHint: start 3 ranks, or give --mesh\n"
    )
    assert main(["probe", "fsdp", "--mesh", "5"]) == EXIT_USAGE
    assert "fsdp(5) = 5 != WORLD_SIZE(2)" in capsys.readouterr().err


def test_a_rank_whose_job_has_no_store_prints_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "none"}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert main(["probe", "fsdp", "--mesh", "3"]) == EXIT_USAGE
    assert "fsdp(3) = 3 != WORLD_SIZE(2)" in capsys.readouterr().err


@nightly
def test_a_wrong_mesh_under_torchrun_is_one_error(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "shardviz", "probe", "fsdp", "--mesh", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode != 0
    assert done.stderr.count("shardviz: error: fsdp(3) = 3 != WORLD_SIZE(2)") == 1


def test_without_torchrun_there_is_no_job_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert torchrun_world() is None


def test_torchruns_variables_must_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ShardvizError, match="RANK='two' is not a number"):
        torchrun_world()
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ShardvizError, match="RANK=2 is not below WORLD_SIZE=2"):
        torchrun_world()
