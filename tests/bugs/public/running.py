"""Run a public bug and its twin, and score what the tool says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.bugs.case import Bug
from tests.bugs.running import judged, lines_of, report_of
from tests.live.run.jobs import environment, without_aborts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bugs.public.case import Command, Score

FOUND = 1
"""The exit code of `check`, `diff` and `run` if something is wrong."""


@dataclass(frozen=True)
class Outcome:
    """What the tool said.

    Attributes:
        score: How good that is, for the bug.
        is_quiet: Whether nothing was found, for the twin.
        complaints: What is wrong with how the bug is named.
        text: All that was said.
    """

    score: Score
    is_quiet: bool
    complaints: tuple[str, ...]
    text: str


def outcomes_of(case: Bug | Command, folder: Path) -> tuple[Outcome, Outcome]:
    """Run a bug and its right twin. A bug of which the same is said as of the twin is missed."""
    for which in ("bug", "twin"):
        (folder / which).mkdir()
    bug, twin = (_outcome_of(case, folder / which, right=which == "twin") for which in ("bug", "twin"))
    return (replace(bug, score="missed") if bug.text == twin.text else bug), twin


def _outcome_of(case: Bug | Command, folder: Path, *, right: bool) -> Outcome:
    return _of_probe(case, folder, right) if isinstance(case, Bug) else _of_command(case, folder, right)


def _of_probe(bug: Bug, folder: Path, right: bool) -> Outcome:
    report = report_of(bug.right if right else bug.wrong, bug.mesh, folder, with_lines=not right)
    verdict = judged(bug, report)
    text = "\n".join(line for line in lines_of(report) if line)
    assert verdict.is_silent, text
    return Outcome(_score(verdict.is_found, verdict.complaints), not verdict.is_found, verdict.complaints, text)


def _of_command(case: Command, folder: Path, right: bool) -> Outcome:
    case.make(folder, right)
    words = (sys.executable, "-m", "shardviz", *case.command)
    done = without_aborts(
        lambda: subprocess.run(
            words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
        ),
        folder,
    )
    said = " ".join(done.stdout.split()).lower()
    lacking = [word for word in case.words if not any(choice.lower() in said for choice in word.split("|"))]
    complaints = [f"says nothing of {' or '.join(word.split('|'))}" for word in lacking]
    complaints += [f"says {word!r}, which is not so" for word in case.never if word.lower() in said]
    text = f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return Outcome(_score(done.returncode == FOUND, complaints), done.returncode == 0, tuple(complaints), text)


def _score(is_found: bool, complaints: tuple[str, ...] | list[str]) -> Score:
    if not is_found:
        return "missed"
    return "misnamed" if complaints else "named"
