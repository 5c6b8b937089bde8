"""`shardviz probe --watch`: what is saved is run, whatever was saved before, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from shardviz.cli import main
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.notation import write
from tests.lanes import nightly
from tests.live.worlds import OF_WORLDS, PATIENCE, children, is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = OF_WORLDS

PROBE = """\
from torch import nn
from helper import cut
AXES = ("tp",)
def build(): return nn.Linear(4, 4, bias=False)
def parallelize(model, mesh): cut(model, mesh)
"""
HELPER = """\
from torch.distributed.tensor import Shard, distribute_tensor
from torch import nn
def cut(model, mesh):
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0)]))
"""


class Watching:
    """A command that watches a probe in a folder, and what it has printed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.printed = folder, folder / "printed.txt"
        command = [sys.executable, "-m", "shardviz", "probe", "mine.py", "--watch", *options]
        self.saved = int(time.time())
        self.save("mine.py", PROBE)
        self.save("helper.py", HELPER)
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                command, cwd=folder, env=ours, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
            )

    def save(self, name: str, text: str) -> None:
        """Save a file as an editor does, under a new name first; always in the same second, as quick hands may."""
        new = self.folder / f".{name}.swp"
        new.write_text(text)
        os.utime(new, (self.saved, self.saved))
        new.replace(self.folder / name)

    def next(self, num_runs: int) -> str:
        """Wait for the end of a run, and return what it printed."""
        wait_until(lambda: self._runs().count("\nwatching ") == num_runs or self.process.poll() is not None)
        assert self.process.poll() is None, self._runs()
        return self._runs().split("\nwatching ")[-2]

    def _runs(self) -> str:
        return self.printed.read_text()

    def layout(self) -> str:
        """Return what the dump that was written last says of the weight."""
        (tensor,) = dump_of(read_files(self.folder / "mine-2.shardviz")).at("stamped")
        assert tensor.claimed is not None
        return write(tensor.claimed)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    folder = tmp_path / "work"
    folder.mkdir()
    found = Watching(folder, "--mesh", "2")
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


@nightly
def test_a_run_is_overtaken_where_interrupts_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a background job of a script has it
    try:
        watching = Watching(folder, "--mesh", "2")
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        watching.next(1)
        watching.save(
            "mine.py", "import time\n" + PROBE.replace("cut(model, mesh)", "open('in', 'w'), time.sleep(600)")
        )
        wait_until((folder / "in").exists)
        watching.process.send_signal(signal.SIGINT)  # which is still ignored
        watching.save("mine.py", PROBE)
        assert "✓ the tensor is in order" in watching.next(2)
    finally:
        watching.process.kill()
        watching.process.wait()


def test_every_save_of_the_probe_and_of_what_it_imports_is_run_until_ctrl_c(watching: Watching) -> None:
    assert "✓ the tensor is in order on 2 ranks" in watching.next(1)
    assert watching.layout() == "[4/tp, 4]"

    watching.save("helper.py", HELPER.replace("Shard(0)", "Shard(1)"))  # of the same size
    assert "helper.py changed" in watching.next(2)
    assert watching.layout() == "[4, 4/tp]"

    watching.save("helper.py", HELPER + "def broken(:\n")
    said = watching.next(3)
    assert "raised SyntaxError: invalid syntax (helper.py, line 5)" in said
    assert "noting.py" not in said

    watching.save("helper.py", HELPER)
    assert "✓ the tensor is in order" in watching.next(4)
    assert watching.layout() == "[4/tp, 4]"

    watching.save("mine.py", PROBE.replace("helper", "halper"))
    assert "No module named 'halper'" in watching.next(5)
    watching.save("halper.py", HELPER.replace("Shard(0)", "Shard(1)"))
    assert "halper.py changed" in watching.next(6)
    assert watching.layout() == "[4, 4/tp]"

    watching.save("mine.py", "def build(:\n")
    assert "mine.py is not Python: invalid syntax (mine.py, line 1)" in watching.next(7)
    (watching.folder / "mine.py").unlink()
    assert "cannot read probe" in watching.next(8)
    watching.save("mine.py", "import time\n" + PROBE.replace("cut(model, mesh)", "open('in', 'w'), time.sleep(600)"))
    wait_until((watching.folder / "in").exists)  # this run would never end by itself
    watching.save("mine.py", PROBE)
    assert "✓ the tensor is in order" in watching.next(9)

    below = children(watching.process.pid)
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(PATIENCE) == 130
    wait_until(lambda: not any(map(is_running, below)))
    assert watching.printed.read_text().endswith("Ctrl-C ends\nshardviz: interrupted\n")
    assert "Traceback" not in watching.printed.read_text().rpartition("changed")[2]
    left = {path.name for path in watching.folder.iterdir()}
    assert left == {"mine.py", "helper.py", "halper.py", "in", "mine-2.shardviz", "printed.txt"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "cannot read probe"),
        (["tp_fdsp"], "unknown probe 'tp_fdsp'"),
        (["mine.py", "--save-test", "t.py"], "--save-test writes a test once, --watch runs a probe often"),
        (["mine.py", "-o", "."], ". exists and is not a dump"),
    ],
)
def test_what_no_save_can_mend_ends_it(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROBE)
    assert main(["probe", *words, "--watch"]) == 2
    assert said in capsys.readouterr().err


def test_under_torchrun_nothing_is_watched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shardviz.live.world.is_first_to_report", lambda _: True)
    assert main(["probe", "tp", "--watch"]) == 2
    assert "Hint: leave torchrun out" in capsys.readouterr().err
