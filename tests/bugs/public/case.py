"""A public bug: where it was reported, a case of it with a right twin, and how the tool does on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.bugs.case import Bug

Score = Literal["named", "misnamed", "missed"]


@dataclass(frozen=True)
class Command:
    """A bug of files or of a job, seen by a command of shardviz.

    Attributes:
        name: What is wrong, in a few words.
        make: Writes what the command reads into a folder: the bug, or with `True` its right twin.
        command: The command's words after `shardviz`, with paths relative to that folder.
        words: Each must stand in what the command prints, `a|b` where either will do.
        never: What it may not print: causes that are not true, fixes that do not mend it.
    """

    name: str
    make: Callable[[Path, bool], None]
    command: tuple[str, ...]
    words: tuple[str, ...]
    never: tuple[str, ...] = ()


@dataclass(frozen=True)
class Public:
    """A bug that people reported.

    Attributes:
        reference: The issue or pull request.
        case: The bug and its twin. Its words say what a right diagnosis is.
        score: How the tool does on it today.
        known_gap: If it is missed or misnamed: what is not seen.
        known_alarm: If the right twin has a finding: what is wrongly said of it.
    """

    reference: str
    case: Bug | Command
    score: Score = "named"
    known_gap: str = ""
    known_alarm: str = ""
