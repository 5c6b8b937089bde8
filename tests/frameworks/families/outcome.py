"""What became of a family: read offline from the folders that its ranks wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.check.run import check_dump
from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.open import open_checkpoint
from shardviz.errors import ShardvizError
from shardviz.live.world import launch
from shardviz.text import fold

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

RANKS = (2, 4)
LIMIT = 120.0
"""Seconds for one world."""

MOST = 300
"""Characters of what a rank raised."""

BEFORE, ALONE, AFTER, DUMP = "before", "alone", "after", "loaded.shardviz"
_TASKS = "tests.frameworks.families.trip:"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a family.

    Attributes:
        name: Its configuration's class.
        lines: What is not as it was, a line each; none where every tensor is equal and every element in its place.
        compared: How many tensors were compared.
    """

    name: str
    lines: tuple[str, ...]
    compared: int = 0


def outcome_of(name: str, folder: Path, ranks: Iterable[int] = RANKS) -> Outcome:
    """Take a family there and back on each number of ranks, and say what is not as it was."""
    folder.mkdir(parents=True)
    if error := _crash("build", name, folder, 1):
        return Outcome(name, (f"not built: {error}",))
    compared, lines = _changes(folder / BEFORE, folder / ALONE, "on one rank: ")
    for count in ranks:
        own = folder / str(count)
        if error := _crash("load", name, folder, count):
            lines.append(f"{count} ranks: {error}")
            continue
        number, changes = _changes(folder / BEFORE, own / AFTER, f"{count} ranks: ")
        compared += number
        lines += [*changes, *_misplaced(own / DUMP, count)]
    return Outcome(name, tuple(lines), compared)


def _crash(task: str, name: str, folder: Path, ranks: int) -> str:
    """Run a task; return the first line of what its first rank raised, empty where none did."""
    args = (name, str(folder)) if task == "build" else (name, str(folder), str(ranks))
    try:
        launch(f"{_TASKS}{task}", args, num_ranks=ranks, timeout=LIMIT)
    except ShardvizError as error:
        return str(error).strip().splitlines()[0][:MOST]
    return ""


def _changes(before: Path, after: Path, where: str) -> tuple[int, list[str]]:
    """Compare two checkpoints; return how many tensors were compared, and those that are not equal."""
    found = compare_checkpoints(open_checkpoint(before), open_checkpoint(after))
    changed = ((one.name, (one.verdict, one.why)) for one in found.outcomes if one.verdict != "equal")
    return found.compared, [f"{where}{verdict} {names}: {why}" for names, (verdict, why) in fold(changed)]


def _misplaced(dump: Path, ranks: int) -> list[str]:
    """Return what a check of the loaded model finds."""
    report = check_dump(dump)
    found = [f"{ranks} ranks: {one.kind} {one.tensor}: {one.claimed}, held {one.held}" for one in report.findings]
    return found + [f"{ranks} ranks: not checked {one.tensor}: {one.why}" for one in report.not_checked]
