"""What is printed of cases whose tests are gone: each word that those tests looked for, and all the others.

`SHARDVIZ_GOLDEN=write pytest tests/contract/test_texts.py` writes `texts/` anew: read it as a diff.
"""

from __future__ import annotations

import os
import tempfile
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.contract import store
from tests.contract.__main__ import ROOMS
from tests.contract.judge import IN_MEMORY, text_of


@pytest.mark.parametrize("name", ROOMS)
def test_what_is_printed_of_a_case_is_what_was_read(name: str) -> None:
    path = store.HERE / "texts" / f"{name}.txt"
    with tempfile.TemporaryDirectory(prefix="texts-", dir=IN_MEMORY) as folder:
        now = texts(name, Path(folder))
    if os.environ.get("SHARDVIZ_GOLDEN") == "write" and now:
        path.write_text(now, encoding="utf-8")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [*unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=2)]
    assert not rows, "\n".join(["the text differs; SHARDVIZ_GOLDEN=write keeps it", *rows[:100]])


def kept(name: str) -> set[str]:
    """Return the cases of a room that no test makes any more, without those that an earlier room has too."""
    earlier = [*ROOMS][: [*ROOMS].index(name)]
    made_before = {case for other in earlier for case in store.read_verdicts(other)}
    return {case for case in store.read_verdicts(name) if store.is_kept(case)} - made_before


def texts(name: str, folder: Path) -> str:
    """Return what is printed of a room's cases that no test makes any more; cases of one text stand above it."""
    names = kept(name)
    if not names:
        return ""
    room = store.load(name)
    room.keep(names)
    store.lay_out(room, folder / "files")
    alike: dict[str, list[str]] = {}
    for number, case in enumerate(sorted(room.cases.values(), key=lambda case: case.name)):
        text = text_of(case, store.place(case, folder / "files", folder / str(number)))
        alike.setdefault(text.rstrip(), []).append(case.name)
    return "\n\n".join("\n".join([*(f"== {case}" for case in names), text]) for text, names in alike.items()) + "\n"
