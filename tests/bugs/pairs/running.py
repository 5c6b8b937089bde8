"""Run many programs in one world of ranks, so that ranks start once, and check what each wrote."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz import probe_files
from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.write import prepare_folder
from shardviz.errors import ShardvizError
from shardviz.layout.mesh import parse_mesh
from shardviz.live import world
from shardviz.live.job import VALUES_LIMIT, ProbeJob
from tests.bugs.running import attempted
from tests.contract import recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.report import Report
    from shardviz.live.world import World

    Numbered = tuple[int, str, str, str]

TASK = "tests.bugs.pairs.running:run_all"
TIMEOUT = 900.0
IN_A_WORLD = 8


def run_all(on: World, jobs: Sequence[ProbeJob]) -> None:
    """Run probes one after the other on this rank."""
    from shardviz.live.probe import run_probe

    for job in jobs:
        run_probe(on, job)


def reports_on(programs: Sequence[tuple[str, str]], names: Sequence[str] = ()) -> Iterator[tuple[int, Report | str]]:
    """Run programs, given by source and mesh, and yield the number of each with its report, or the error it ends in.

    Args:
        programs: The programs.
        names: What they are called; by their numbers if not given.
    """
    by_size: dict[int, list[Numbered]] = {}
    for number, (source, mesh) in enumerate(programs):
        name = re.sub(r"\W+", "_", names[number]) if names else f"program_{number}"
        by_size.setdefault(_num_ranks(mesh), []).append((number, source, mesh, name))
    for size, alike in sorted(by_size.items()):
        for start in range(0, len(alike), IN_A_WORLD):
            yield from _in_one_world(alike[start : start + IN_A_WORLD], size)


def _num_ranks(mesh: str) -> int:
    return math.prod(int(axis.partition("=")[2]) for axis in mesh.split(","))


def _in_one_world(programs: Sequence[Numbered], size: int) -> Iterator[tuple[int, Report | str]]:
    """Run programs in one world; where one of them ends it, each in a world of its own."""
    with tempfile.TemporaryDirectory(prefix="shardviz-pairs-") as made:
        try:
            jobs = [_job(program, Path(made)) for program in programs]
            world.prepare("fork", also=("shardviz.live.probe",))
            world.launch(TASK, (jobs,), num_ranks=size, method="fork", timeout=TIMEOUT)
            found: list[tuple[int, Report | str]] = [
                (program[0], report_on(dump_of(read_files(job.folder))))
                for program, job in zip(programs, jobs, strict=True)
            ]
        except ShardvizError:
            found = [(number, attempted(source, mesh)) for number, source, mesh, _ in programs]
    yield from found


def _job(program: Numbered, folder: Path) -> ProbeJob:
    _, source, mesh, name = program
    file = folder / f"{name}.py"
    file.write_text(source)
    probe = probe_files.find(str(file))
    job = ProbeJob(probe, parse_mesh(mesh, probe.axes), prepare_folder(folder / file.stem), (), VALUES_LIMIT)
    return replace(job, keeps_evidence=recording.is_on())
