"""pytest on a file of tests: in this process, whose fork server has imported torch, or in one of its own."""

from __future__ import annotations

import gc
import importlib
import io
import os
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
WITHIN_ANOTHER = ["-p", "no:faulthandler", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
"""Options of a session in another's process, where shardviz is imported already: pytest 9.2 warns of that."""

HEAD = """
import asyncio, os, signal, time, warnings
import pytest, torch
from torch import distributed
from shardviz.testing import spmd
"""


@dataclass(frozen=True)
class Run:
    """What pytest did: its exit code, all that it printed, and each test's word for how it ended."""

    code: int
    text: str
    ends: dict[str, str]

    def section(self, test: str) -> str:
        """The part of the report that is about one failed test."""
        return re.split(r"^_{3,} .* _{3,}$|^={3,} .* ={3,}$", self.text.partition(f" {test} __")[2], flags=re.M)[0]


def run(folder: Path, body: str, *options: str) -> Run:
    """Run tests in a session within this one; it shares its plugins and its ranks' fork server, and nothing else."""
    code, text = main(folder, _arguments(folder, body, *options))
    return _run(code, text)


def run_alone(folder: Path, body: str, *options: str) -> Run:
    """Run tests as a user does, by a command."""
    done = execute([sys.executable, "-m", "pytest", *_arguments(folder, body, *options)], folder)
    return _run(done.returncode, done.stdout + done.stderr)


def main(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run pytest in this process, in a folder.

    Returns:
        Its exit code, and all that it printed.
    """
    printed = io.StringIO()
    gc.freeze()  # a session collects garbage as it ends, among all that the tests before it have left
    with _as_in_a_process_of_its_own(folder), redirect_stdout(printed), redirect_stderr(printed):
        code = pytest.main([*WITHIN_ANOTHER, *arguments])
    return int(code), printed.getvalue()


def only_in(folder: Path) -> list[str]:
    """Return options that keep pytest from making a node of each folder of each other test, all of them beside this."""
    return ["--confcutdir", str(folder)]


def execute(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    pipes = {"capture_output": True, "text": True, "timeout": 240}
    return subprocess.run(command, cwd=folder, env=_environ(), check=False, **pipes)


def _arguments(folder: Path, body: str, *options: str) -> list[str]:
    (folder / "test_it.py").write_text(HEAD + body)
    settings = ["-v", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), *only_in(folder)]
    return [*settings, *options, str(folder)]


def _run(code: int, text: str) -> Run:
    return Run(code, text, dict(re.findall(r"::(\S+) (PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)", text)))


def _environ() -> dict[str, str]:
    """Return this environment without what this session of pytest has put there; under CI it tells more."""
    ours = ("CI", "BUILD_NUMBER", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    return environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def _as_in_a_process_of_its_own(folder: Path) -> Iterator[None]:
    """Put back what a session changes for all: the working folder, where modules are found, and which are imported."""
    environ, path, before = dict(os.environ), list(sys.path), Path.cwd()
    os.environ.clear()
    os.environ.update(_environ())
    os.chdir(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
                del sys.modules[name]
