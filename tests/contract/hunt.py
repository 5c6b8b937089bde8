"""`python -m tests.contract.hunt [NUMBER] [--seed S ...]`: look for variants that notice what no case notices.

For each mutant that survives (`tests.contract.mutants`), variants of the small cases that run its line are judged with
the mistake and without it. The first ones that differ are added to `varied.txt`; `vary write` makes the room of it. A
mutant for which nothing is found is printed: a kind of case is missing that no small change makes, or the line does
nothing. Seeds that were hunted say nothing about the contract afterwards: measure it with others.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from tests.contract import mutants, vary
from tests.contract.judge import IN_MEMORY, PROCESSES, judge_files
from tests.contract.mutants import JUDGING, Mutant
from tests.contract.reached import Recorded, reached
from tests.contract.varied import EDGE, variant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.contract.reached import Key, Reached

    Drawn = tuple[str, str, str]

TRIES = 60
"""Variants that are judged for a mutant."""
KEPT = 2
"""Variants that are kept of those that notice it."""
LARGEST = 120_000
"""Bytes of a case that is varied."""


def main() -> None:
    """Hunt the survivors of each seed, and add what was found to the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=50)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardviz-hunt-", dir=IN_MEMORY) as made:
        recorded = Recorded.in_folder(Path(made))
        run = reached(recorded, JUDGING)
        mutants.prepare(run)
        vary.load_rooms()
        for seed in args.seed:
            survivors = list(_survivors(recorded, run, args.number, seed))
            hunted = [(mutant, list(_drawn(run, mutant, seed))) for mutant in survivors]
            jobs = [(judged, drawn) for mutant, drawn in hunted for judged in (None, mutant)]
            with get_context("fork").Pool(PROCESSES, maxtasksperchild=1) as pool:
                verdicts = pool.imap(_verdicts, jobs)
                for mutant, drawn in hunted:
                    pairs = zip(drawn, next(verdicts), next(verdicts), strict=True)
                    noticed = [one for one, right, wrong in pairs if right is not None and right != wrong]
                    counts = f"{len(noticed)} of {len(drawn)}"
                    print(f"{seed}: {counts} {mutant.file}:{mutant.line} {mutant.what}", flush=True)
                    vary.add_to_list(noticed[:KEPT])


def _survivors(recorded: Recorded, run: Reached, number: int, seed: int) -> Iterator[Mutant]:
    drawn = mutants.draw({file: set(lines) for file, lines in run.lines.items()}, random.Random(seed))[:number]
    for mutant, (state, _) in zip(drawn, mutants.fates(recorded, run, drawn, seed), strict=True):
        if state == "SURVIVED":
            yield mutant


def _drawn(run: Reached, mutant: Mutant, seed: int) -> Iterator[Drawn]:
    """Yield variants of cases that run a mutant's line; every third is a small change."""
    rng = random.Random(f"{seed} {mutant.file} {mutant.line}")
    keys = [key for key in run.lines[mutant.file][mutant.line] if _is_small(key)]
    for number in range(TRIES if keys else 0):
        room, case = rng.choice(sorted(keys))
        text = f"{seed}.{mutant.line}.{number}"
        yield room, case, f"{text}{EDGE}{10 ** rng.uniform(-12, 0):.3g}" if number % 3 == 2 else text


def _is_small(key: Key) -> bool:
    room = vary.rooms.get(key[0])
    return room is not None and room.size(key[1]) <= LARGEST


def _verdicts(job: tuple[Mutant | None, Sequence[Drawn]]) -> list[object]:
    """Return what becomes of variants with a mistake or without. Runs in a process that has imported no judge yet."""
    mutant, drawn = job
    if mutant is not None:
        mutants.replace_source(mutant)
    return [_verdict(*one) for one in drawn]


def _verdict(room: str, name: str, seed: str) -> object:
    case = vary.rooms[room].cases[name]
    made = variant(case, vary.rooms[room].blobs, seed)
    if made is None:
        return None
    try:
        with mutants.within_seconds():
            return judge_files(case, made[1])
    except (Exception, mutants.TimeIsUp) as error:  # a mistake may raise anything
        return type(error).__name__


if __name__ == "__main__":
    main()
