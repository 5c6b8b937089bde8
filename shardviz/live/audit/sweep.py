"""The sweep: every case on every rank, in as few worlds as it takes.

Where torch gets sizes wrong, gloo aborts the whole process. So each rank notes which case it is in before it begins;
when a world dies the case it died in is a finding, and the next world goes on after it.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import RankError
from shardviz.live import world as worlds
from shardviz.live.audit.cases import Case, all_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.layout.mesh import Mesh
    from shardviz.live.world import World

TASK = "shardviz.live.audit.sweep:run_cases"
MAX_DEATHS = 64
"""Worlds that may die before the sweep gives up: each costs a start."""

Seen = dict[int, list[int] | str]
"""A rank's results of the cases that went wrong there: ids in memory order, or the error."""


@dataclass(frozen=True)
class Disagreement:
    """A class of cases in which torch and the oracle differ.

    Attributes:
        case: The smallest of them.
        count: How many cases of the class were tried and went wrong.
        got: What each rank had that had something else than wanted: ids in memory order, or the error.
    """

    case: Case
    count: int
    got: dict[int, list[int] | str]


@dataclass(frozen=True)
class Audit:
    """The result of a sweep.

    Attributes:
        num_cases: Cases tried.
        num_wrong: Cases that went wrong.
        disagreements: One a class, most cases first.
        not_tried: Cases left out after too many worlds died.
    """

    num_cases: int
    num_wrong: int
    disagreements: list[Disagreement]
    not_tried: int = 0


def audit(mesh: Mesh, max_size: int, *, on_progress: Callable[[int, int], None] | None = None) -> Audit:
    """Try every case on this machine's torch.

    Args:
        mesh: The mesh to try on.
        max_size: The longest vector.
        on_progress: Called with the number of cases done and the number of all, whenever a world ends.
    """
    cases = all_cases(mesh, max_size)
    wrong: dict[int, dict[int, list[int] | str]] = {}
    start = deaths = 0
    while start < len(cases) and deaths < MAX_DEATHS:
        seen_by_rank, stopped, why = _run_world(mesh, max_size, start, len(cases))
        for rank, of_rank in enumerate(seen_by_rank):
            for index, got in of_rank.items():
                wrong.setdefault(index, {})[rank] = got
        if why:
            wrong[stopped] = {0: why}
            deaths += 1
        start = stopped + 1
        if on_progress:
            on_progress(min(start, len(cases)), len(cases))
    return Audit(min(start, len(cases)), len(wrong), _classes(cases, wrong), max(len(cases) - start, 0))


def _run_world(mesh: Mesh, max_size: int, start: int, end: int) -> tuple[list[Seen], int, str]:
    """Run cases to the end or a death; return ranks' results, the last case begun and the cause."""
    with tempfile.TemporaryDirectory(prefix="shardviz-audit-") as folder:
        try:
            worlds.launch(TASK, (mesh, max_size, start, folder), num_ranks=mesh.size, timeout=600)
        except RankError as error:
            logs = [_read_log(folder, rank) for rank in range(mesh.size)]
            return [seen for seen, _ in logs], max(begun for _, begun in logs), _cause_of_death(error)
        return [_read_log(folder, rank)[0] for rank in range(mesh.size)], end, ""


def _cause_of_death(error: RankError) -> str:
    """Return the line that says why a world died: the one from gloo, or else the first."""
    lines = [line.strip() for line in str(error).splitlines() if "what():" in line]
    return lines[0] if lines else error.message.partition("\n")[0]


def _read_log(folder: str, rank: int) -> tuple[Seen, int]:
    """Read a rank's log: a line for every case begun, and one for each that went wrong."""
    ids_by_case: Seen = {}
    begun = 0
    for line in (Path(folder) / f"{rank}.log").read_text().splitlines():
        begun, *got = json.loads(line)
        if got:
            ids_by_case[begun] = got[0]
    return ids_by_case, begun


def run_cases(world: World, mesh: Mesh, max_size: int, start: int, folder: str) -> None:
    """Try the cases from `start` on, on this rank, and log them."""
    from shardviz.live.audit.operations import Meshes, perform

    meshes: Meshes = {}
    with (Path(folder) / f"{world.rank}.log").open("w", buffering=1) as log:
        for index, case in enumerate(all_cases(mesh, max_size)[start:], start):
            print(json.dumps([index]), file=log)
            try:
                local = perform(case, meshes)
            except Exception as error:
                line = str(error).strip().partition("\n")[0]
                print(json.dumps([index, f"{type(error).__name__}: {line}"]), file=log)
                continue
            ids = [int(value) for value in local.flatten().tolist()]
            if not _is_right(case, world.rank, tuple(local.shape), ids):
                print(json.dumps([index, ids]), file=log)


def _is_right(case: Case, rank: int, shape: tuple[int, ...], ids: list[int]) -> bool:
    """Whether a rank has the right ids; an empty shard only has to be empty."""
    expected = case.wanted(rank)
    if not expected.size:
        return not ids
    return shape == expected.shape and ids == case.ids(expected)


def _classes(cases: list[Case], wrong: dict[int, dict[int, list[int] | str]]) -> list[Disagreement]:
    families: dict[tuple[object, ...], list[int]] = {}
    for index in sorted(wrong):
        families.setdefault(cases[index].family, []).append(index)
    disagreements = [Disagreement(cases[of[0]], len(of), wrong[of[0]]) for of in families.values()]
    return sorted(disagreements, key=lambda disagreement: -disagreement.count)
