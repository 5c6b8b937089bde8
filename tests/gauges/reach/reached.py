"""Runs the contract, the demos and the probes, and lists what of `shardviz/` and `tui/` none of them entered."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz import probe_files
from tests.gauges.tree import HOUSE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.gauges.tree import Source

CONTRACT = "tests.contract"


def commands(probes_in: Path) -> Iterator[Sequence[str]]:
    """Yield what is run: the contract if there is one, the pages of the demos, every probe, every recreated bug."""
    if find_spec(CONTRACT) is not None:
        yield "-m", CONTRACT, "compare"
    yield "-m", "pytest", "-q", "-n", "0", "tests/demos", "--lane", "default"
    yield "-m", "pytest", "-q", "-n", "0", "tests/demos", "--lane", "nightly"
    for probe in probe_files.shipped():
        yield "-m", "shardviz", "probe", probe.name, "-o", str(probes_in / f"{probe.path.stem}.shardviz")
    yield "-m", "shardviz", "probes", "--bugs"


def entered_by(runs: Iterable[Sequence[str]]) -> frozenset[tuple[str, int]]:
    """Run Python with several arguments; return file and first line of each function that any process entered.

    What fails is printed and passed by: what it entered counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(HOUSE), os.environ.get("PYTHONPATH", "")]),
            "SHARDVIZ_REACH_ROOT": str(HOUSE),
            "SHARDVIZ_REACH_FOLDER": folder,
        }
        for arguments in runs:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=HOUSE, env=environment, capture_output=True, text=True
            )
            print(f"reach: {' '.join(arguments)}: exit code {done.returncode}", file=sys.stderr, flush=True)
        lines = [line for file in Path(folder).iterdir() for line in file.read_text(encoding="utf-8").splitlines()]
    return frozenset((path, int(number)) for path, _, number in (line.rpartition(":") for line in lines))


def not_entered(files: Iterable[Source], entered: frozenset[tuple[str, int]]) -> list[str]:
    """Return the functions of files that were not entered, with where they stand."""
    return [
        f"{file.path}:{first} {function.name}"
        for file in files
        for function in file.functions
        if (str(file.path), first := min([function.lineno, *(one.lineno for one in function.decorator_list)]))
        not in entered
    ]


def unreached(files: Sequence[Source]) -> list[str]:
    """Run everything, and return the functions of `shardviz/` and `tui/` that no process entered."""
    with tempfile.TemporaryDirectory() as folder:
        entered = entered_by(commands(Path(folder)))
    return not_entered([file for file in files if file.path.parts[0] in ("shardviz", "tui")], entered)
