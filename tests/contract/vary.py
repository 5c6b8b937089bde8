"""`python -m tests.contract.vary draw|edges|choose|write`: the room `varied`, of recorded cases with one change each.

`draw FILE NUMBER` makes variants at random and judges them; `edges FILE NUMBER` looks for the size at which a small
change begins to matter, and keeps the variants just below and just above it. `choose FILE ...` takes those that say or
run what few cases do, and writes them to `varied.txt`: the room, the case, and the seed of the change. `write` makes
the room of that list again.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.contract import store
from tests.contract.judge import PROCESSES, judge_files, record
from tests.contract.mutants import JUDGING
from tests.contract.reached import ROOT, Lines, Recorded, reached
from tests.contract.varied import EDGE, variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tests.contract.judge import Rows
    from tests.contract.reached import Key
    from tests.contract.store import Room

VARIED = "varied"
LIST = store.HERE / "varied.txt"

FEW = 10
"""What fewer cases say or run than this is wanted more often."""

LARGEST = 40_000
"""Bytes of a case that is varied, so that many are."""

SMALLEST, TRIES = 1e-13, 14
"""Where the search for an edge begins, and how often it halves what is left, on a scale of powers."""


@dataclass(frozen=True)
class Variant:
    """A variant that was judged.

    Attributes:
        key: The room and the case that it is of.
        seed: The seed of the change.
        what: What was changed.
        rows: Its verdict.
        lines: The judging lines that it runs.
    """

    key: Key
    seed: str
    what: str
    rows: Rows
    lines: frozenset[tuple[str, int]] = frozenset()


def main() -> None:
    """Do what is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("draw", "edges", "choose", "write"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=500.0)
    args = parser.parse_args()
    if args.verb == "write":
        write()
    elif args.verb == "choose":
        choose([made for file in args.files for made in pickle.loads(file.read_bytes())], args.number)
    else:
        found = _made(judged if args.verb == "draw" else edge, args.number, args.seed, args.seconds)
        args.files[0].write_bytes(pickle.dumps(found))


rooms: dict[str, Room] = {}
_lines = Lines(tuple(f"{ROOT}/{folder}" for folder in JUDGING))


def _made(
    make: Callable[[tuple[str, str, str]], list[Variant]], number: int, seed: int, seconds: float
) -> list[Variant]:
    """Make variants of cases drawn at random; every other one of a case without a finding."""
    rng, started = random.Random(seed), time.monotonic()
    load_rooms()
    small = [
        (name, case.name, store.read_verdicts(name)[case.name][0]["exit"] == 0)
        for name, room in rooms.items()
        for case in room.cases.values()
        if room.size(case.name) <= LARGEST
    ]
    by_kind: dict[tuple[str, bool], list[str]] = {}
    for name, case, is_right in small:
        by_kind.setdefault((name, is_right), []).append(case)
    kinds = sorted(by_kind)
    drawn = []
    for count in range(number):
        kind = rng.choice(kinds)
        drawn.append((kind[0], rng.choice(by_kind[kind]), f"{seed}.{count}"))
    found: list[Variant] = []
    with get_context("fork").Pool(PROCESSES) as pool:
        for made in pool.imap_unordered(make, drawn, chunksize=4):
            found += made
            if time.monotonic() - started > seconds:
                break
    print(f"{len(found)} variants in {time.monotonic() - started:.0f} s")
    return found


def load_rooms() -> None:
    """Read the rooms whose cases are varied."""
    rooms.update({name: store.load(name) for name in store.rooms() if name != VARIED})


def judged(drawn: tuple[str, str, str]) -> list[Variant]:
    """Make a variant and judge it; none if the change does not fit."""
    name, case_name, seed = drawn
    case = rooms[name].cases[case_name]
    made = variant(case, rooms[name].blobs, seed)
    if made is None:
        return []
    sys.settrace(_lines.trace)
    try:
        rows = judge_files(case, made[1])
    finally:
        sys.settrace(None)
    lines = frozenset((str(Path(file).relative_to(ROOT)), line) for file, line in _lines.taken())
    return [Variant((name, case_name), seed, made[0], rows, lines)]


def edge(drawn: tuple[str, str, str]) -> list[Variant]:
    """Return the two variants between which a small change begins to matter; none where it never does."""
    name, case_name, seed = drawn
    room = rooms[name]

    def at(power: float) -> Variant | None:
        made = variant(room.cases[case_name], room.blobs, f"{seed}{EDGE}{10**power:.3g}")
        if made is None:
            return None
        rows = judge_files(room.cases[case_name], made[1])
        return Variant((name, case_name), f"{seed}{EDGE}{10**power:.3g}", made[0], rows)

    below, above = at(-13.0), at(0.3)
    if below is None or above is None or below.rows == above.rows:
        return []
    low, high = -13.0, 0.3
    for _ in range(TRIES):
        if high - low < 0.15:
            break
        middle = at((low + high) / 2)
        if middle is None:
            return []
        if middle.rows == below.rows:
            low, below = (low + high) / 2, middle
        else:
            high, above = (low + high) / 2, middle
    return [below, above]


# What is kept


def choose(variants: Sequence[Variant], number: int) -> None:
    """Write to the list the variants that say or run what few cases do, then the two sides of edges, then others."""
    counts: Counter[object] = Counter()
    with TemporaryDirectory(prefix="shardviz-vary-") as made:
        recorded = Recorded.in_folder(Path(made))
        for file, lines in reached(recorded, JUDGING).lines.items():
            counts.update({(file, line): sum(room != VARIED for room, _ in keys) for line, keys in lines.items()})
        for (room, _), rows in recorded.known.items():
            counts.update(_said(rows) if room != VARIED else ())
    chosen: dict[tuple[Key, str], Variant] = {}
    load_rooms()
    variants = [one for one in variants if _is_small(one.key)]
    for one in sorted(variants, key=lambda one: (-len(one.lines), one.key, one.seed)):
        if EDGE in one.seed or any(counts[feature] < FEW for feature in {*one.lines, *_said(one.rows)}):
            chosen[one.key, one.seed] = one
            counts.update({*one.lines, *_said(one.rows)})
    first = len(chosen)
    for one in variants:
        if len(chosen) >= number:
            break
        chosen.setdefault((one.key, one.seed), one)
    print(f"{first} of {len(variants)} are new, {len(chosen)} chosen")
    _list((*key, seed) for key, seed in chosen)


def _is_small(key: Key) -> bool:
    room = rooms[key[0]]
    return key[1] in room.cases and room.size(key[1]) <= LARGEST


def _said(rows: Rows) -> set[str]:
    """Return what a verdict says, without tensors and ranks, and its rows together."""
    kept = ("in", "kind", "cause_id", "about", "verdict", "aspect", "severity", "exit")
    each = {json.dumps({key: row[key] for key in kept if key in row}, sort_keys=True) for row in rows}
    kinds = sorted({str(row.get("kind", row.get("verdict", ""))) for row in rows})
    return {*each, " ".join(kinds)}


def write() -> None:
    """Make the room of the list, and judge it; what its case is too different for by now is left out of the list."""
    load_rooms()
    room, kept = store.Room(VARIED), []
    for name, case_name, seed in listed():
        case = rooms[name].cases.get(case_name)
        made = variant(case, rooms[name].blobs, seed) if case is not None else None
        if case is not None and made is not None:
            room.add_content(f"{name}: {case_name} | {seed}: {made[0]}", case.command, made[1])
            kept.append((name, case_name, seed))
    _list(kept)
    record(room)


def add_to_list(chosen: Iterable[tuple[str, str, str]]) -> None:
    """Add variants to the list; `write` makes them."""
    _list({*listed(), *chosen})


def _list(chosen: Iterable[tuple[str, str, str]]) -> None:
    LIST.write_text("".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in sorted(chosen)))


def listed() -> Iterator[tuple[str, str, str]]:
    """Yield the variants of the list: the room, the case and the seed."""
    for line in LIST.read_text().splitlines():
        yield tuple(json.loads(line))


if __name__ == "__main__":
    main()
