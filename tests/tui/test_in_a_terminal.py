"""`shardviz view` as a user runs it: in a real pseudo-terminal, from the first screen to the fix and out again."""

from __future__ import annotations

import base64
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardviz.cli import main
from shardviz.commands import view
from shardviz.commands.probe import wanted
from tests.lanes import at_night, nightly
from tests.live.worlds import children, is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 120.0


class Terminal:
    """A pseudo-terminal with a program in it."""

    def __init__(self, *command: str, lines: int = 40, columns: int = 120, folder: Path | None = None) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env=environment,
            start_new_session=True,
        )
        self.output = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read until the output matches."""
        end = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.output, re.DOTALL)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.output[-2000:]!r}"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.output += os.read(self.ours, 1 << 16).decode("utf-8", "replace")
        return match

    def type(self, keys: str) -> None:
        """Press keys."""
        self.output = ""
        os.write(self.ours, keys.encode())

    def close(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal(bug: Path) -> Iterator[Terminal]:
    opened = Terminal(sys.executable, "-m", "shardviz", "view", str(bug))
    yield opened
    opened.close()


def test_from_the_first_screen_to_the_fix_on_the_clipboard_and_out(terminal: Terminal) -> None:
    terminal.wait_for("misordered")
    terminal.type("4")
    terminal.wait_for("Findings.*do not hold the elements")
    terminal.type("c")
    copied = terminal.wait_for(r"\x1b\]52;c;([A-Za-z0-9+/=]+)\x07")
    assert "_StridedShard(0, split_factor=4)" in base64.b64decode(copied[1]).decode()
    terminal.type("q")
    terminal.wait_for(r"\x1b\[\?1049l.*\x1b\[\?25h")
    assert terminal.process.wait(PATIENCE) == 0
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    assert "\x1b[?1000l" in terminal.output


@pytest.mark.parametrize("keys", ["\x03", *at_night(["\x11"])], ids=["ctrl-c", "ctrl-q"])
def test_the_keys_that_end_programs_end_this_one_and_restore_the_terminal(terminal: Terminal, keys: str) -> None:
    terminal.wait_for("misordered")
    terminal.type(keys)
    terminal.wait_for(r"\x1b\[\?1049l.*\x1b\[\?25h")
    assert terminal.process.wait(PATIENCE) == 0
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_a_viewer_that_fails_says_so_in_its_last_line_and_restores_the_terminal(bug: Path, tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text(
        "from pathlib import Path\n"
        "from shardviz.tui import app\n"
        "app.ShardvizApp.action_help = lambda self: 1 / 0\n"
        f"app.view(Path({str(bug)!r}))\n"
    )
    terminal = Terminal(sys.executable, str(failing))
    try:
        terminal.wait_for("misordered")
        terminal.type("?")
        terminal.wait_for("the viewer failed")
        assert terminal.process.wait(PATIENCE) == 1
        assert "ZeroDivisionError" in terminal.output
        assert terminal.output.rstrip().splitlines()[-1].endswith("this is a bug in shardviz")
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    finally:
        terminal.close()


def test_no_color_writes_neither_colors_nor_backgrounds_and_marks_the_cursor(
    bug: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    opened = Terminal(sys.executable, "-m", "shardviz", "view", str(bug))
    try:
        opened.wait_for("misordered")
        opened.type("4")
        opened.wait_for("do not hold the elements")
        opened.wait_for(r"\x1b\[(?:[0-9;]*;)?7(?:;[0-9;]*)?m")  # the cursor: reversed
        styles = set(re.findall(r"\x1b\[([0-9;]*)m", opened.output))
        assert not any(re.search(r"(^|;)[34]8;", style) for style in styles), styles
    finally:
        opened.close()


@nightly
def test_a_pipe_gets_the_text_instead(bug: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "shardviz", "view", str(bug)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert shown.returncode == 0
    assert "12/fsdp/tp" in shown.stdout
    assert "\x1b" not in shown.stdout


PROBE = """\
import numpy as np
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
AXES = ("tp",)
MESH = (2,)
def build(): return nn.Linear(4, 4, bias=False)
def parallelize(model, mesh):
    placed = distribute_tensor(model.weight, mesh, [Shard(0)])
    model.weight = nn.Parameter(placed)
"""
WRONG = "    model.weight = nn.Parameter(DTensor.from_local(placed.to_local().flip(0), mesh, [Shard(0)]))\n"


def test_a_probe_to_be_watched_needs_no_option_that_view_lacks(tmp_path: Path) -> None:
    probe = tmp_path / "mine.py"
    probe.write_text(PROBE)
    parser = ArgumentParser()
    view.add_arguments(parser)
    args = parser.parse_args([str(probe), "--watch", "--mesh", "2"])
    args.probe, args.output = str(probe), None
    _, mesh, folder = wanted(args)
    assert (str(mesh), folder) == ("(tp=2)", Path("mine-2.shardviz"))


@nightly
def test_the_viewer_of_a_probe_is_updated_whenever_its_file_is_saved(tmp_path: Path) -> None:
    probe = tmp_path / "mine.py"
    probe.write_text(PROBE)
    opened = Terminal(sys.executable, "-m", "shardviz", "view", "mine.py", "--watch", folder=tmp_path)
    try:
        opened.wait_for("no findings.*2 ranks")
        probe.write_text(PROBE + WRONG)
        opened.wait_for("1 finding.*misordered-within-shard")
        probe.write_text(PROBE + "    raise ValueError('mine own')\n")
        opened.wait_for("Not run.*mine own")
        below = children(opened.process.pid)
        assert len(below) > 1
        opened.type("q")
        opened.wait_for(r"\x1b\[\?1049l.*\x1b\[\?25h")
        assert opened.process.wait(PATIENCE) == 0
        wait_until(lambda: not any(map(is_running, below)))
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine.py", "--watch"], "shardviz probe mine.py --watch prints"),  # not in a terminal
        (["d.shardviz", "--watch"], "d.shardviz is a folder: --watch runs a probe"),
        (["mine.py", "--mesh", "2"], "--mesh is for the probe that --watch runs"),
    ],
)
def test_what_cannot_be_watched_says_what_can(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.shardviz").mkdir()
    assert main(["view", *words]) == 2
    assert said in capsys.readouterr().err
