"""`python -m tests.contract.vary [ROOM ...]`: makes `varied` and `hunted` again, of cases with one change each.

`varied.txt` and `hunted.txt` list them: the room, the case, and the seed of the change. `tests.contract.hunt` adds to
the latter those that notice what no case notices.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.contract import store
from tests.contract.judge import judge_files, judge_room
from tests.contract.mutants import JUDGING
from tests.contract.reached import ROOT, Lines
from tests.contract.varied import variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.contract.judge import Rows
    from tests.contract.reached import Key
    from tests.contract.store import Room

VARIED, HUNTED = "varied", "hunted"

rooms: dict[str, Room] = {}
_lines = Lines(tuple(f"{ROOT}/{folder}" for folder in JUDGING))


@dataclass(frozen=True)
class Variant:
    """A variant that was judged.

    Attributes:
        key: The room and the case that it is of.
        seed: The seed of the change.
        rows: Its verdict.
        lines: The judging lines that it runs.
    """

    key: Key
    seed: str
    rows: Rows
    lines: frozenset[tuple[str, int]]


def load_rooms() -> None:
    """Read the rooms whose cases are varied."""
    rooms.update({name: store.load(name) for name in store.rooms() if name not in (VARIED, HUNTED)})


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
    return [Variant((name, case_name), seed, rows, lines)]


def write(made_room: str) -> None:
    """Make the room of a list, and judge it; what its case is too different for by now is left out of the list."""
    room, kept = store.Room(made_room), []
    for name, case_name, seed in listed(made_room):
        case = rooms[name].cases.get(case_name)
        made = variant(case, rooms[name].blobs, seed) if case is not None else None
        if case is not None and made is not None:
            room.add_content(f"{name}: {case_name} | {seed}: {made[0]}", case.command, made[1])
            kept.append((name, case_name, seed))
    _list(made_room, kept)
    size = room.save().stat().st_size
    store.write_verdicts(room.name, judge_room(room))
    print(f"{room.name}: {len(room.cases)} cases, {size / 1e6:.2f} MB")


def add_to_list(chosen: Iterable[tuple[str, str, str]]) -> None:
    """Add variants to the list; `write` makes them."""
    _list(HUNTED, {*listed(HUNTED), *chosen})


def _list(made_room: str, chosen: Iterable[tuple[str, str, str]]) -> None:
    lines = (f"{json.dumps(one, ensure_ascii=False)}\n" for one in sorted(chosen))
    (store.HERE / f"{made_room}.txt").write_text("".join(lines))


def listed(made_room: str) -> Iterator[tuple[str, str, str]]:
    """Yield the variants of a room's list: the room of their case, the case and the seed."""
    for line in (store.HERE / f"{made_room}.txt").read_text().splitlines():
        yield tuple(json.loads(line))


if __name__ == "__main__":
    load_rooms()
    for each in sys.argv[1:] or (VARIED, HUNTED):
        write(each)
