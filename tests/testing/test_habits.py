"""What users of pytest do out of habit, on ranks: its own fixtures, setup methods, exits, results, exceptions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.testing.sessions import Run, run

if TYPE_CHECKING:
    from pathlib import Path

PASSING = """
import logging, sys


@spmd(mesh={"tp": 2})
def test_capsys(mesh, capsys):
    print("hello")
    with capsys.disabled():
        print("seen")
    assert capsys.readouterr().out == "hello\\n"


@spmd(mesh={"tp": 2})
def test_capfd(mesh, capfd):
    logging.warning("to the report")
    os.write(2, b"hello\\n")
    assert capfd.readouterr().err == "hello\\n"


@spmd(mesh={"tp": 2})
def test_caplog(mesh, caplog):
    with caplog.at_level(logging.INFO):
        logging.getLogger("mine").info("rank %d", distributed.get_rank())
    assert caplog.messages == [f"rank {distributed.get_rank()}"]


@spmd(mesh={"tp": 2})
def test_recwarn(mesh, recwarn):
    warnings.warn("mind the gap")
    assert str(recwarn.pop().message) == "mind the gap"


@pytest.fixture
def moved(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDVIZ_X", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@spmd(mesh={"tp": 2})
def test_monkeypatch(mesh, monkeypatch, moved):
    assert os.environ["SHARDVIZ_X"] == "1" and os.getcwd() == str(moved)
    monkeypatch.setattr(os, "getcwd", lambda: "elsewhere")
    assert os.getcwd() == "elsewhere"


number = None


def setup_module(module):
    global number
    number = 3


@pytest.fixture(scope="class")
def attribute(request):
    request.cls.attribute = 5


@spmd(mesh={"tp": 2})
class TestSetUp:
    @classmethod
    def setup_class(cls):
        cls.kind = "sharded"

    def setup_method(self, method):
        self.method = method.__name__

    @pytest.mark.usefixtures("attribute")
    def test_what_was_set_up_is_there(self, mesh):
        assert (number, self.kind, self.method, self.attribute) == (3, "sharded", "test_what_was_set_up_is_there", 5)


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(first)


@pytest.mark.xfail(raises=Odd)
@spmd(mesh={"tp": 2})
def test_odd_exception(mesh):
    raise Odd("of two arguments", 2)


@spmd(mesh={"tp": 2})
def test_returns(mesh):
    return mesh.size() == 2


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.mesh(x=2)), pytest.param(3, marks=spmd("x=3"))])
def test_mesh_by_parameter(mesh, size):
    assert mesh.size() == size
"""


def test_own_fixtures_and_what_was_set_up_are_on_the_ranks(tmp_path: Path) -> None:
    seen = run(tmp_path, PASSING, "-rA")
    ends = {name: end for name, end in seen.ends.items() if end != "PASSED"}
    assert ends == {"test_odd_exception": "XFAIL"}, seen.text
    assert len(seen.ends) == 10
    assert "WARNING  root:test_it.py:" in seen.section("test_capfd")
    assert "seen" in seen.section("test_capsys")
    assert seen.text.count("PytestReturnNotNoneWarning: test_returns returned <class 'bool'>") == 1


REFUSED = """
import threading, unittest


@spmd(mesh={"tp": 2})
def test_request(mesh, request): ...


@spmd(mesh={"tp": 2})
@spmd(mesh={"tp": 4})
def test_two_meshes(mesh): ...


@spmd(mesh={"tp": 2})
class TestLock:
    @classmethod
    def setup_class(cls):
        cls.lock = threading.Lock()

    def test_lock(self): ...


class TestOld(unittest.TestCase):
    @spmd(mesh={"tp": 2})
    def test_method(self): ...


@spmd(mesh={"tp": 2})
class TestOldClass(unittest.TestCase):
    def test_of_class(self): ...
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("refused"), REFUSED)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("fixture 'request' is pytest's own and stays in its process: it cannot be sent", "take request in a fixture"),
        ("test_two_meshes is marked with more than one mesh", "a test runs on one mesh"),
        ("TestLock.lock, which is set before the test, cannot be sent to ranks: cannot pickle", "make it in the test"),
        ("TestOld.test_method is a method of a unittest.TestCase, which cannot run on ranks", "let TestOld be a plain"),
        ("TestOldClass.test_of_class is a method of a unittest.TestCase", "let TestOldClass be a plain class"),
    ],
)
def test_what_cannot_run_on_ranks_says_why_and_what_to_do(refused: Run, line: str, hint: str) -> None:
    assert set(refused.ends.values()) <= {"FAILED", "ERROR"}
    assert re.search(rf"{re.escape(line)}.*\n.*Hint: .*{re.escape(hint)}", refused.text), refused.text


STOPPED = """
@spmd(mesh={"tp": 2})
def test_stops(mesh):
    pytest.exit("no use")


def test_never_comes(): ...
"""


def test_pytest_exit_on_a_rank_ends_the_session(tmp_path: Path) -> None:
    seen = run(tmp_path, STOPPED)
    assert "Exit: no use" in seen.text
    assert "test_never_comes" not in seen.ends


LIMITED = """
@pytest.mark.timeout(2)
@spmd(mesh={"tp": 2})
def test_hangs(mesh):
    if distributed.get_rank() == 0:
        distributed.barrier()
"""


def test_the_limit_of_pytest_timeout_is_kept_with_ranks_that_say_where_they_are(tmp_path: Path) -> None:
    seen = run(tmp_path, LIMITED)
    assert "rank 0 (tp=0) did not finish in 1.4 s: waiting in barrier over tp" in seen.section("test_hangs")
