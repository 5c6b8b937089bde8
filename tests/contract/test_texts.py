"""What is printed of cases whose tests are gone is what was read: `compare` looks, too.

`SHARDVIZ_GOLDEN=write pytest tests/contract/test_texts.py` writes `texts/` anew: read it as a diff.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contract import store, texts
from tests.contract.__main__ import ROOMS
from tests.contract.judge import IN_MEMORY, text_of
from tests.lanes import at_night

if TYPE_CHECKING:
    from collections.abc import Iterable

IS_WRITTEN = os.environ.get("SHARDVIZ_GOLDEN") == "write"


@pytest.mark.parametrize("name", ROOMS if IS_WRITTEN else at_night(ROOMS))
def test_what_is_printed_of_a_case_is_what_was_read(name: str) -> None:
    path, names = texts.FOLDER / f"{name}.txt", texts.kept({room: store.read_verdicts(room) for room in ROOMS})[name]
    now = printed(name, names) if names else {}
    if IS_WRITTEN and now:
        texts.write(path, now)
    before = texts.read(path)
    assert before.keys() == names, "other cases than these are kept; SHARDVIZ_GOLDEN=write writes their texts"
    rows = [row for case, text in now.items() for row in texts.differences(case, before[case], text)]
    assert not rows, "\n".join(["the text differs; SHARDVIZ_GOLDEN=write keeps it", *rows[:100]])


def printed(name: str, names: Iterable[str]) -> dict[str, str]:
    """Return what is printed of some cases of a room, by their names."""
    room = store.load(name)
    room.keep(names)
    with tempfile.TemporaryDirectory(prefix="texts-", dir=IN_MEMORY) as made:
        folder, found = Path(made), {}
        store.lay_out(room, folder / "files")
        for case in room.cases.values():  # each in a folder that is alone: what stands beside a checkpoint is read, too
            with tempfile.TemporaryDirectory(prefix="case_", dir=folder) as own:
                found[case.name] = text_of(case, store.place(case, folder / "files", Path(own)))
        return found
