"""Runs the contract, the demos and the probes, and lists what of `shardviz/` and `tui/` none of them entered."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz import probe_files
from tests.gauges.tree import HOUSE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.gauges.tree import Source

DONE = ".done"
"""How folders end that have the notes of a whole run."""


def commands(dumps: Path) -> Iterator[Sequence[str]]:
    """Yield what is run: the contract, the pages of the demos, every probe, and every recreated bug."""
    yield "-m", "tests.contract", "compare"
    for lane in ("default", "nightly"):
        yield "-m", "pytest", "-q", "-n", "0", "tests/demos", "--lane", lane
    for name in (probe.name for probe in probe_files.shipped()):
        if name.startswith("plans/"):
            yield "-m", "shardviz", "plan", name, "-o", str(dumps / f"{name}.shardviz")
        elif "/" not in name:
            yield "-m", "shardviz", "probe", name, "-o", str(dumps / f"{name}.shardviz"), "--force"
    yield "-m", "shardviz", "probes", "--bugs"


def entered_by(runs: Iterable[Sequence[str]], folder: Path) -> frozenset[tuple[str, int]]:
    """Run Python with several arguments; return file and first line of each function that any process entered.

    What fails is printed and passed by: what it entered counts. Runs whose notes are in the folder are not run again.
    """
    for arguments in runs:
        notes = folder / (re.sub(r"\W+", "-", " ".join(arguments))[-80:] + DONE)
        if not notes.is_dir():
            _run(arguments, notes)
    lines = [line for file in folder.glob(f"*{DONE}/*") for line in file.read_text(encoding="utf-8").splitlines()]
    return frozenset((path, int(number)) for path, _, number in (line.rpartition(":") for line in lines))


def _run(arguments: Sequence[str], notes: Path) -> None:
    unfinished = notes.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(HOUSE), os.environ.get("PYTHONPATH", "")]),
        "SHARDVIZ_REACH_ROOT": str(HOUSE),
        "SHARDVIZ_REACH_FOLDER": str(unfinished.resolve()),
    }
    done = subprocess.run([sys.executable, *arguments], cwd=HOUSE, env=environment, capture_output=True, text=True)
    print(f"reach: {' '.join(arguments)}: exit code {done.returncode}", file=sys.stderr, flush=True)
    unfinished.rename(notes)


def not_entered(files: Iterable[Source], entered: frozenset[tuple[str, int]]) -> list[str]:
    """Return the functions of files that were not entered, with where they stand."""
    return [
        f"{file.path}:{first} {function.name}"
        for file in files
        for function in file.functions
        if (str(file.path), first := min([function.lineno, *(one.lineno for one in function.decorator_list)]))
        not in entered
    ]


def unreached(files: Sequence[Source], folder: Path) -> list[str]:
    """Return the functions of `shardviz/` and `tui/` that no process entered; what ran before is noted in a folder."""
    dumps = folder.resolve() / "dumps"
    dumps.mkdir(parents=True, exist_ok=True)
    entered = entered_by(commands(dumps), folder)
    return not_entered([file for file in files if file.path.parts[0] in ("shardviz", "tui")], entered)
