"""`python -m tests.contract.by_jobs`: the room `pairs`, of two sharded jobs' steps of one model beside each other.

Each silent bug of the room `bugs` beside its right twin, small ones, as the first of the two or as the second: neither
job is the unsharded one, so that what ranks of one have is put together before it is compared.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.contract import store
from tests.contract.judge import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LARGEST = 320_000
"""Bytes of both that are compared."""
STEP = re.compile(r"::test_a_(right|silent)\w+\[(.*)\] step")
"""The names of cases that are a step with its trace, and the unsharded model's."""


def twins(bugs: store.Room) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    """Yield each bug's name with the files of the right program and of the wrong one."""
    names: dict[str, dict[str, str]] = {}
    for name in bugs.cases:
        if (at := STEP.search(name)) is not None:
            names.setdefault(at[2], {})[at[1]] = name
    for bug, both in names.items():
        if len(both) == 2 and sum(map(bugs.size, both.values())) <= LARGEST:
            right, wrong = (bugs.cases[both[which]].inputs[1] for which in ("right", "silent"))
            yield bug, right, wrong


def main() -> None:
    """Make the room, and judge it."""
    room, bugs = store.Room("pairs"), store.load("bugs")
    for at, (bug, right, wrong) in enumerate(twins(bugs)):
        both = [{path: bugs.blobs[digest] for path, digest in files.items()} for files in (right, wrong)]
        room.add_content(bug, ("diff", "{0}", "{1}"), both[::-1] if at % 2 else both)
    record(room)


if __name__ == "__main__":
    main()
