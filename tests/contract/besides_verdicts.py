"""What `compare` asks of recorded cases besides their verdicts, while their files are in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.contract import mutants, places, store, texts, vary
from tests.contract.judge import text_of
from tests.contract.varied import variant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.contract.store import Case, Room

SURVIVORS = store.HERE / "survivors.txt"
ONE_IN = 40
"""Of the variants that are recorded, one in so many is made again."""

_texts: dict[tuple[str, str], str] = {}
_places: set[tuple[str, str]] = set()


def prepare(rooms: Sequence[Room]) -> None:
    """Read what processes that judge are to compare with, before they are forked."""
    for room in rooms:
        _texts.update({(room.name, case): text for case, text in texts.read(texts.FOLDER / f"{room.name}.txt").items()})
        _places.update((room.name, case) for case in places.cases_of(room, 0))


def asked(room: str, case: Case, inputs: Sequence[Path]) -> list[str]:
    """Return how the text of a case differs from the one that is kept, and which of its places have a wrong state."""
    rows, text = [], _texts.get((room, case.name))
    if text is not None:
        rows += texts.differences(case.name, text, text_of(case, inputs))
    if (room, case.name) in _places:
        rows += [f"{case.name}: {mistake}" for mistake in places.mistakes_in(inputs[0])]
    return rows


def wrong_files(rooms: Sequence[Room], known: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Yield what is wrong with the files that stand beside the cases."""
    for room, names in texts.kept(known).items():
        listed = {case for own, case in _texts if own == room}
        yield from (f"texts: - {name}" for name in sorted(listed - names))
        yield from (f"texts: + {name}" for name in sorted(names - listed))
    yield from gone()
    vary.rooms.update({room.name: room for room in rooms})
    for made_room in (vary.VARIED, vary.HUNTED):
        yield from (f"{made_room}: not made as it is recorded: {one}" for one in not_made_again(made_room))


def not_made_again(made_room: str) -> Iterator[str]:
    """Yield variants of which others are recorded than the script makes."""
    room = vary.rooms[made_room]
    recorded = {(case.command, *map(_entries, case.inputs)) for case in room.cases.values()}
    for name, case_name, seed in [*vary.listed(made_room)][::ONE_IN]:
        case = vary.rooms[name].cases[case_name]
        made = variant(case, vary.rooms[name].blobs, seed)
        files = [{path: store.digest_of(content) for path, content in one.items()} for one in made[1]] if made else []
        if (case.command, *map(_entries, files)) not in recorded:
            yield f"{name}: {case_name} | {seed}"


def _entries(files: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(files.items()))


def gone() -> Iterator[str]:
    """Yield the mutants that survived and that cannot be made any more."""
    made = dict[str, set[str]]()
    for line in SURVIVORS.read_text().splitlines():
        row, bar, _ = line.partition(" | ")
        file, _, what = row.partition(" ")
        if bar and file not in made:
            made[file] = mutants.mistakes_of(file)
        if bar and what not in made[file]:
            yield f"gone from {SURVIVORS.name}: {row}"
