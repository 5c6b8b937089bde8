"""Worlds for tests: launched here or from a script of a user's own, and what runs below a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.live.world import launch

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0
"""Seconds until a test gives up: far more than a loaded machine takes, as only a test that fails waits for them."""
COORDS = [f"fsdp={rank // 2}, tp={rank % 2}" for rank in range(4)]
OF_WORLDS = [
    pytest.mark.usefixtures("private_tmp"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]


def run(name: str, *args: Any, num_ranks: int = 4, **options: Any) -> list[Any]:
    return launch(f"tests.live.world_tasks:{name}", args, num_ranks=num_ranks, coords=COORDS, **options)


def children(pid: int) -> dict[int, int]:
    """Every process below `pid`, with its parent."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return {child: parents[child] for child in below - {pid}}


def assert_nothing_runs_below(pid: int) -> None:
    """Only the fork server and its kin, direct children, may be left: no child of a child."""
    wait_until(lambda: all(parent == pid for parent in children(pid).values()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def script(tmp_path: Path, text: str, **options: Any) -> subprocess.Popen[str]:
    """A user's script, without a guard for `__main__`, in an interpreter of its own."""
    file = tmp_path / "script.py"
    file.write_text("from shardviz.live.world import *\n" + text)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    environ |= options.pop("environ", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(file)], env=environ, start_new_session=True, **pipes, **options)
