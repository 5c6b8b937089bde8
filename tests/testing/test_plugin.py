"""The plugin as its users have it: pytest on a file of tests; under xdist, torchrun and pdb; what it costs others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardviz.errors import MeshError
from shardviz.layout.mesh import parse_mesh
from shardviz.testing import spmd
from tests.lanes import at_night, nightly
from tests.live.worlds import PATIENCE
from tests.testing.sessions import HEAD, ROOT, Run, execute, run, run_alone

FAILING = """
@spmd(mesh={"fsdp": 2, "tp": 2})
def test_one_rank_fails(mesh):
    print("hello from", distributed.get_rank())
    found = [1, distributed.get_rank()]
    if found[1] == 2:
        assert found == [1, 3]
    distributed.barrier()


@spmd(mesh={"x": 3})
def test_all_fail_alike(mesh):
    raise KeyError("weight")


@spmd(mesh={"x": 3})
def test_two_ranks_fail_each_in_its_own_way(mesh):
    distributed.barrier()
    if distributed.get_rank() == 1:
        raise KeyError("weight")
    time.sleep(0.3)
    raise ValueError(f"of {distributed.get_rank()}")


@spmd(mesh={"x": 2})
def test_a_rank_exits(mesh):
    if distributed.get_rank() == 1:
        os._exit(3)
    distributed.barrier()


@spmd(mesh={"x": 2})
def test_a_rank_is_killed(mesh):
    if distributed.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    distributed.barrier()


@spmd(mesh={"x": 2}, timeout=3)
def test_a_rank_hangs(mesh):
    if distributed.get_rank() == 1:
        time.sleep(60)
    distributed.barrier()


@pytest.fixture
def lock():
    import threading

    return threading.Lock()


@spmd(mesh={"x": 2})
def test_a_fixture_that_cannot_be_sent(mesh, lock): ...


@pytest.mark.mesh()
def test_no_mesh(mesh): ...


@spmd(mesh={"tp": 2})
def test_keeps_its_dump(mesh, shard_dump):
    import shardviz

    shardviz.capture(torch.nn.Linear(1, 1), shard_dump, mesh=mesh)
    raise ValueError("look at the dump")


@spmd(mesh={"tp": 2})
def test_mistakes_an_axis(mesh):
    from shardviz.testing import assert_replicated

    assert_replicated(torch.ones(2), axis="dp")


def test_takes_a_mesh_but_has_none(mesh): ...
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("failing"), FAILING)


def test_each_failure_fails_its_own_test_only(failing: Run) -> None:
    assert failing.code == 1
    assert sum(end == "FAILED" for end in failing.ends.values()) == 9
    assert failing.ends["test_takes_a_mesh_but_has_none"] == failing.ends["test_no_mesh"] == "ERROR"
    assert "mark it with @spmd(mesh=...)" in failing.text


def test_the_failing_ranks_own_line_and_values_come_first_the_others_in_a_line(failing: Run) -> None:
    told = failing.section("test_one_rank_fails")
    assert ">           assert found == [1, 3]\nE           AssertionError: assert [1, 2] == [1, 3]\n" in told
    assert re.search(
        r"-- rank 2 \(fsdp=1, tp=0\) --+\nranks 0-1, 3: waiting in barrier over all ranks\nseed 0 on every rank\n", told
    )
    assert "site-packages" not in told
    assert "shardviz/testing" not in told


def test_what_each_rank_printed_is_reported_by_rank(failing: Run) -> None:
    told = failing.section("test_one_rank_fails")
    assert "Captured output of rank 3 (fsdp=1, tp=1), call" in told
    assert re.findall("^hello from ([0-9])", told, flags=re.M) == ["0", "1", "2", "3"]


def test_the_same_failure_on_all_ranks_is_reported_once(failing: Run) -> None:
    told = failing.section("test_all_fail_alike")
    assert told.count("KeyError: 'weight'") == 1
    assert "ranks 1-2: the same\n" in told
    assert "test_it.py::test_all_fail_alike - rank 0 (x=0): KeyError: 'weight'" in failing.text


def test_the_earliest_failure_is_reported_and_the_others_summed_up(failing: Run) -> None:
    told = failing.section("test_two_ranks_fail_each_in_its_own_way")
    assert "-- rank 1 (x=1) --" in told
    assert "E           KeyError: 'weight'" in told
    assert "rank 0: of 0\nrank 2: of 2\n" in told


def test_a_rank_that_exits_dies_or_hangs_is_named_in_seconds(failing: Run) -> None:
    assert "rank 1 (x=1) exited with code 3 before it finished" in failing.section("test_a_rank_exits")
    assert "rank 0 (x=0) was killed by signal 11 (SIGSEGV)" in failing.section("test_a_rank_is_killed")
    told = failing.section("test_a_rank_hangs")
    assert (
        "ranks 0-1 did not finish in 3 s: rank 0 waiting in barrier over x; rank 1 in test_a_rank_hangs (test_it.py:"
        in told
    )


def test_a_fixture_that_cannot_be_sent_is_named(failing: Run) -> None:
    told = failing.section("test_a_fixture_that_cannot_be_sent")
    assert "fixture 'lock' gave a lock, which cannot be sent to ranks" in told
    assert "Hint: make it in the test" in told


def test_a_mistake_in_a_test_is_shown_on_its_own_line(failing: Run) -> None:
    told = failing.section("test_mistakes_an_axis")
    assert '>       assert_replicated(torch.ones(2), axis="dp")\nE       shardviz.errors.MeshError: mesh (tp=2)' in told
    assert "/mesh.py" not in told


def test_a_marker_without_axes_says_how_to_write_one(failing: Run) -> None:
    assert failing.text.count("write pytest.mark.mesh(fsdp=2, tp=4)") == 1


def test_a_mesh_of_sizes_alone_has_axes_called_as_on_the_command_line() -> None:
    (mark,) = spmd((2, 4)).mark.args
    assert mark.mesh == parse_mesh("2,4")
    with pytest.raises(MeshError, match=r"names no axes\n.*fsdp=2,tp=4"):
        spmd([])


def test_a_failed_tests_dump_is_kept_and_how_to_view_it_is_shown(failing: Run) -> None:
    found = re.search(r"shardviz view (\S+)", failing.section("test_keeps_its_dump"))
    assert found
    assert (Path(found[1]) / "run.json").is_file()


PASSING = """
@pytest.fixture
def number(mesh):
    return mesh.size


@spmd(mesh="fsdp=2,tp=2")
def test_mesh(mesh, number, tmp_path):
    assert mesh.mesh_dim_names == ("fsdp", "tp") and number == distributed.get_world_size() == 4
    (tmp_path / str(distributed.get_rank())).touch()
    distributed.barrier()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.mesh(tp=2)
@pytest.mark.parametrize(("function", "dtype"), [(lambda x: x + 1, torch.float32), pytest.param(abs, torch.int8)])
def test_parameters(mesh, function, dtype):
    assert function(torch.ones(1, dtype=dtype)).dtype == dtype


@spmd(mesh={"tp": 2})
def test_skip(mesh):
    if distributed.get_rank() == 1:
        pytest.skip("not today")
    distributed.barrier()


@spmd(mesh={"tp": 2})
def test_importorskip(mesh):
    pytest.importorskip("a_module_that_nobody_has")


@spmd(mesh={"tp": 2})
def test_xfail(mesh):
    pytest.xfail("known")


@pytest.mark.xfail(raises=KeyError)
@spmd(mesh={"tp": 2})
def test_xfail_raises(mesh):
    raise KeyError("weight")


@spmd(mesh={"tp": 2})
async def test_async(mesh):
    await asyncio.sleep(0)
    with pytest.raises(ValueError):
        raise ValueError


@spmd(mesh={"tp": 2})
def test_warns(mesh):
    warnings.warn("mind the gap")


@pytest.mark.filterwarnings("error")
@pytest.mark.xfail(raises=UserWarning)
@spmd(mesh={"tp": 2})
def test_warnings_as_errors(mesh):
    warnings.warn("mind the gap")


@spmd(mesh={"tp": 2})
class TestClass:
    def setup_method(self):
        self.number = 3

    def test_method(self, mesh, monkeypatch):
        monkeypatch.setenv("SHARDVIZ_X", "1")
        assert self.number == 3 and os.environ["SHARDVIZ_X"] == "1"


class TestOuter:
    @spmd(mesh={"tp": 2})
    class TestInner:
        def test_inner(self): ...


state = []


@spmd(mesh={"tp": 2})
@pytest.mark.parametrize("turn", [1, 2])
def test_state_is_fresh(turn):
    assert state == [] and torch.initial_seed() == 0
    state.append(turn)


@spmd(mesh={"tp": 8})
def test_large(mesh): ...
"""


def test_everything_of_pytest_that_tests_use_works_on_ranks(tmp_path: Path) -> None:
    seen = run(tmp_path, PASSING, "--shardviz-ranks=4", "-rs")
    ends = {"test_skip": "SKIPPED", "test_importorskip": "SKIPPED", "test_large": "SKIPPED"}
    ends |= dict.fromkeys(["test_xfail", "test_xfail_raises", "test_warnings_as_errors"], "XFAIL")
    assert {name: end for name, end in seen.ends.items() if end != "PASSED"} == ends, seen.text
    assert len(seen.ends) == 15
    assert re.search(r"test_it.py:\d+: not today", seen.text)
    assert "mesh (tp=8) has 8 ranks, --shardviz-ranks allows 4" in seen.text
    assert seen.text.count("UserWarning: mind the gap") == 1


SMALL = """
@spmd(mesh={"tp": 2})
@pytest.mark.parametrize("turn", range(4))
def test_sum(mesh, turn):
    number = torch.ones(1)
    distributed.all_reduce(number)
    assert number == 2 + (turn == 2)
"""


@pytest.mark.parametrize("option", at_night(["--shardviz-launch=spawn", "--import-mode=importlib", "--assert=plain"]))
def test_other_ways_to_launch_and_to_import(option: str, tmp_path: Path) -> None:
    seen = run(tmp_path, SMALL, option)
    assert list(seen.ends.values()) == ["PASSED", "PASSED", "FAILED", "PASSED"], seen.text
    assert "rank 0 (tp=0)" in seen.text


def test_x_stops_at_the_first_failure(tmp_path: Path) -> None:
    seen = run(tmp_path, SMALL, "-x")
    assert list(seen.ends.values()) == ["PASSED", "PASSED", "FAILED"], seen.text


PLACED = """
@spmd(mesh={"tp": 2})
def test_it(mesh):
    whole = torch.zeros(4)
    assert_same(whole + 1, whole)
"""


def test_the_line_of_a_failed_assertion_begins_with_the_rank_and_what_it_found(tmp_path: Path) -> None:
    seen = run(tmp_path, "from shardviz.testing import assert_same\n" + PLACED)
    assert "test_it.py::test_it - rank 0 (tp=0): tensor: 4 of 4 elements are" in seen.text


@nightly
def test_worlds_of_xdists_workers_do_not_collide(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    seen = run_alone(tmp_path, SMALL, "-n2")
    assert len(re.findall(r"PASSED.*test_sum", seen.text)) == 3, seen.text
    assert re.search(r"-- rank 0 \(tp=0\) --+\nrank 1: the same\n", seen.text), seen.text


JOINED = """
@spmd(mesh={"tp": 2})
def test_fits(mesh, shard_dump):
    paths = [None, None]
    distributed.all_gather_object(paths, str(shard_dump))
    assert paths[0] == paths[1] and mesh.size() == 2


@spmd(mesh={"tp": 2})
async def test_again(mesh):
    distributed.barrier()


@spmd(mesh={"tp": 4})
def test_does_not_fit(mesh): ...
"""


@nightly
def test_under_torchrun_the_ranks_that_are_there_are_used(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HEAD + JOINED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = execute([*launcher, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_it.py"], tmp_path)
    assert done.stdout.count("2 passed, 1 skipped") == 2, done.stdout + done.stderr
    assert "mesh (tp=4) has 4 ranks, this job has 2" in done.stdout


DEBUGGED = """
from shardviz.testing import spmd

@spmd(mesh={"tp": 2})
def test_stops(mesh):
    answer = 40 + 2 * mesh.get_rank()
    assert answer == 40
"""


def test_pdb_opens_in_the_rank_that_failed(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty", reason="this machine has no pseudo-terminals")
    (tmp_path / "test_it.py").write_text(DEBUGGED)  # without torch, which its ranks import: seconds less
    ours, theirs = pty.openpty()
    os.write(ours, b"p 'answer is', answer\nq\n")
    command = [sys.executable, "-m", "pytest", "--pdb", "-p", "no:cacheprovider", "-c", os.devnull, "test_it.py"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = _read_to_the_end(ours)
    assert done.wait(PATIENCE) != 0
    assert ">>> rank 1: AssertionError: assert 42 == 40" in text, text
    assert "('answer is', 42)" in text
    assert text.count("(rank 1)") == 2
    assert "(Pdb)" not in text


def _read_to_the_end(terminal: int) -> str:
    read = b""
    try:
        while part := os.read(terminal, 4096):
            read += part
    except OSError:  # how Linux says that nobody has the other end any more
        pass
    return read.decode()


HEAVY = ("torch", "numpy", "rich", "msgspec", "textual", "multiprocessing.forkserver", "shardviz.live")


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("module", ["shardviz.testing", "shardviz.testing.plugin.hooks"])
def test_it_imports_nothing_heavy(module):
    assert fresh(f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])") == "\n"


def test_a_session_without_such_a_test_imports_nothing_heavy(tmp_path):
    (tmp_path / "test_plain.py").write_text("def test_nothing(): ...\n")
    code = (
        "import sys, pytest; assert pytest.main(['-q', '-p', 'no:cacheprovider', 'test_plain.py']) == 0; "
        f"print('heavy:', *[name for name in {HEAVY} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    environ = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "shardviz.testing.plugin.hooks"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, text=True)
    assert done.stdout.endswith("heavy:\n")
