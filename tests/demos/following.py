"""Follow a page as a reader would: in a folder of its own, command by command."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.cli import main
from tests.kernel import Kernel
from tests.testing import sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.demos.pages import Step

NEEDS_A_SHELL = re.compile(r"""[|&;<>$`](?=(?:[^"']|"[^"]*"|'[^']*')*$)""")
PIPED = re.compile(r"(shardviz [^|]*?)( 2> /dev/null)? \| (.*)")
"""A command of shardviz, whether its stderr is dropped, and what reads its stdout."""
TIMEOUT = 240


def follow(steps: Iterable[Step], beside: Path) -> list[str]:
    """Do what a page says in the current folder, with the Python files beside the page at hand.

    Returns:
        What each command printed, and what each file has: that beside the page, or else what the page shows.
    """
    for file in beside.glob("*.py"):
        shutil.copy(file, Path())
    if (beside / "demos").is_dir():  # the README's commands are typed at the top of the repository
        Path("demos").symlink_to(beside / "demos")
    with ExitStack() as closing:
        kernel = cache(lambda: closing.enter_context(Kernel(Path.cwd())))
        return [_done(step, kernel) for step in steps]


def _done(step: Step, kernel: Callable[[], Kernel]) -> str:
    if step.cell:
        return _tidy(kernel().run(step.code).text)
    return _run(step.command) if step.command else _file(Path(step.file), step.text)


def _file(path: Path, text: str) -> str:
    if not path.exists():
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _run(command: str) -> str:
    """Run a line; shardviz's and pytest's own in this process, whose fork server has imported torch once for all."""
    words = shlex.split(command)
    if words[0] == "pytest" and not NEEDS_A_SHELL.search(command):
        return _tidy(sessions.main(Path.cwd(), ["-p", "no:cacheprovider", *words[1:]])[1])
    if words[0] == "shardviz" and not NEEDS_A_SHELL.search(command):
        return _tidy(_run_here(words[1:])[0])
    piped = PIPED.fullmatch(command)
    if piped is not None and not NEEDS_A_SHELL.search(piped[1]):
        out, said = _run_here(shlex.split(piped[1])[1:], apart=True)
        return _tidy(("" if piped[2] else said) + _in_shell(piped[3], out))
    return _tidy(_in_shell(command))


def _in_shell(command: str, read: str = "") -> str:
    scripts = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    # Under CI pytest tells failures at greater length.
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER", "COLUMNS")}
    environ |= {"PATH": scripts, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": TIMEOUT, "input": read}
    return subprocess.run(["bash", "-c", command], env=environ, check=False, **pipes).stdout


def _run_here(words: list[str], *, apart: bool = False) -> tuple[str, str]:
    """Return what a command of shardviz prints: all of it and nothing, or on stdout and on stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[int(apart)]):
        main(words)
    out, said = (stream.buffer.getvalue().decode() for stream in streams)
    return out, said


def _tidy(text: str) -> str:
    """Return an output as a page can have it: no blanks at the ends of lines, a newline at its end."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)
