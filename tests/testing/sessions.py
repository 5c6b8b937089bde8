"""pytest in a process of its own, on a file of tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
    (folder / "test_it.py").write_text(HEAD + body)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, *options]
    done = execute([*command, "--rootdir", str(folder), str(folder)], folder)
    text = done.stdout + done.stderr
    return Run(done.returncode, text, dict(re.findall(r"::(\S+) (PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)", text)))


def execute(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # Under CI pytest tells failures at greater length.
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, cwd=folder, env=environ, check=False, **pipes)
