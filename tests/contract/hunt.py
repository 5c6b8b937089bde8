"""`python -m tests.contract.hunt [NUMBER] [--seed S ...] [--branches]`: variants that notice what no case notices.

For each mutant that survives (`tests.contract.mutants`), variants of the small cases that run its line are judged with
the mistake and without it. The first ones that differ are added to `hunted.txt`; `vary hunted` makes the room of it. A
mutant for which nothing is found is printed: a kind of case is missing that no small change makes, or the line does
nothing. Seeds that were hunted say nothing about the contract afterwards: measure it with others.

With `--branches` the mistakes are not drawn: each branch that no case takes is dropped, and variants that take it are
looked for, NUMBER for each.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import random
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from tests.contract import mutants, vary
from tests.contract.gaps import GAP
from tests.contract.judge import IN_MEMORY, PROCESSES, judge_files
from tests.contract.mutants import JUDGING, Mutant
from tests.contract.reached import ROOT, Recorded, reached
from tests.contract.varied import EDGE, variant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.contract.reached import Key, Reached

    Drawn = tuple[str, str, str]

TRIES = 60
"""Variants that are judged for a mutant."""
KEPT = 2
"""Variants that are kept of those that notice it."""
MOST_TAKERS = 6
"""Variants that take a branch, of which one may depend on it."""
SMALLEST = 30
"""Cases of which one is varied for a branch."""
LARGEST = 120_000
"""Bytes of a case that is varied."""


def main() -> None:
    """Hunt the survivors of each seed, and add what was found to the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=50)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--branches", action="store_true", help="hunt the branches that no case takes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardviz-hunt-", dir=IN_MEMORY) as made:
        recorded = Recorded.in_folder(Path(made))
        run = reached(recorded, JUDGING)
        mutants.prepare(run)
        vary.load_rooms()
        for seed in args.seed:
            if args.branches:
                hunt_branches(run, args.number, seed)
                continue
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


Untaken = dict[tuple[str, int], Mutant]
"""By the file and the line that a branch begins with: the mistake that drops it."""


def untaken(run: Reached) -> Untaken:
    """Return the branches that no case takes, of conditions that some case comes to."""
    found: Untaken = {}
    for file, lines in run.lines.items():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.If) and node.lineno in lines and node.body[0].lineno not in lines:
                (mutant,) = (one for one in mutants.mutants_of(file, {node.lineno}) if one.what == _dropped(node))
                found[file, node.body[0].lineno] = mutant
    return found


def _dropped(node: ast.If) -> str:
    return f"branch dropped: if {ast.unparse(node.test)}"


def hunt_branches(run: Reached, number: int, seed: int) -> None:
    """Look for variants that take the branches which no case takes, and keep those whose verdict depends on that."""
    branches = untaken(run)
    drawn = [one for mutant in branches.values() for one in _gaps(run, mutant, seed, number)]
    takers: dict[tuple[str, int], list[vary.Variant]] = {}
    with get_context("fork").Pool(PROCESSES) as pool:
        for found in pool.imap_unordered(_judged, drawn, chunksize=8):
            for variant_ in found:
                for branch in variant_.lines & branches.keys():
                    takers.setdefault(branch, []).append(variant_)
    tried = [
        (branch, sorted(found, key=lambda one: _size(one.key))[:MOST_TAKERS])
        for branch, found in sorted(takers.items())
    ]
    jobs = [(branches[branch], [(*one.key, one.seed) for one in found]) for branch, found in tried]
    with get_context("fork").Pool(PROCESSES, maxtasksperchild=1) as pool:
        for (branch, found), wrong in zip(tried, pool.imap(_verdicts, jobs), strict=True):
            noticed = [one for one, rows in zip(found, wrong, strict=True) if rows != one.rows]
            text = f"{len(noticed)} of {len(found)} notice, {len(takers[branch])} take"
            print(f"{seed}: {text} {branches[branch].file}:{branches[branch].line} {branches[branch].what}", flush=True)
            vary.add_to_list((*one.key, one.seed) for one in noticed[:1])
    for branch in sorted(branches.keys() - takers.keys()):
        print(f"{seed}: no variant takes {branches[branch].file}:{branches[branch].line} {branches[branch].what}")


def _judged(drawn: Drawn) -> list[vary.Variant]:
    """Judge a variant; none where judging it ends in an error or takes too long."""
    with contextlib.suppress(Exception, mutants.TimeIsUp), mutants.within_seconds():
        return vary.judged(drawn)
    return []


def _size(key: Key) -> int:
    return vary.rooms[key[0]].size(key[1])


def _survivors(recorded: Recorded, run: Reached, number: int, seed: int) -> Iterator[Mutant]:
    drawn = mutants.draw({file: set(lines) for file, lines in run.lines.items()}, random.Random(seed))[:number]
    for mutant, (state, _) in zip(drawn, mutants.fates(recorded, run, drawn, seed), strict=True):
        if state == "SURVIVED":
            yield mutant


def _gaps(run: Reached, mutant: Mutant, seed: int, tries: int) -> Iterator[Drawn]:
    """Yield variants of the smallest cases that run a mutant's line: two gaps, then any other change."""
    rng = random.Random(f"{seed} {mutant.file} {mutant.line}")
    keys = sorted(filter(_is_small, run.lines[mutant.file][mutant.line]), key=lambda key: (_size(key), key))
    for number in range(tries if keys else 0):
        room, case = rng.choice(keys[:SMALLEST])
        text = f"{seed}.{mutant.line}.{number}"
        yield room, case, text if number % 3 == 2 else f"{GAP}{text}"


def _drawn(run: Reached, mutant: Mutant, seed: int) -> Iterator[Drawn]:
    """Yield variants of cases that run a mutant's line: a small change, a gap and any other in turn."""
    rng = random.Random(f"{seed} {mutant.file} {mutant.line}")
    keys = [key for key in run.lines[mutant.file][mutant.line] if _is_small(key)]
    for number in range(TRIES if keys else 0):
        room, case = rng.choice(sorted(keys))
        text = f"{seed}.{mutant.line}.{number}"
        edge = f"{text}{EDGE}{10 ** rng.uniform(-12, 0):.3g}"
        yield room, case, (edge, f"{GAP}{text}", text)[number % 3]


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
