"""What is printed of cases whose tests are gone: each word that those tests looked for, and all the others.

`SHARDVIZ_GOLDEN=write pytest tests/contract/test_texts.py` writes `texts/` anew: read it as a diff.
"""

from __future__ import annotations

import os
import re
import tempfile
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contract import store
from tests.contract.__main__ import ROOMS
from tests.contract.judge import IN_MEMORY, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MARK = "== "
"""What stands before the name of a case; cases of one text stand above it, one below the other."""


@pytest.mark.parametrize("name", ROOMS)
def test_what_is_printed_of_a_case_is_what_was_read(name: str) -> None:
    path, names = store.HERE / "texts" / f"{name}.txt", kept(name)
    now = printed(name, names) if names else {}
    if os.environ.get("SHARDVIZ_GOLDEN") == "write" and now:
        write(path, now)
    before = read(path)
    assert before.keys() == names, "other cases than these are kept; SHARDVIZ_GOLDEN=write writes their texts"
    rows = [row for case, text in now.items() for row in differences(case, before[case], text)]
    assert not rows, "\n".join(["the text differs; SHARDVIZ_GOLDEN=write keeps it", *rows[:100]])


def kept(name: str) -> set[str]:
    """Return the cases of a room that no test makes any more, without those that an earlier room has too."""
    earlier = [*ROOMS][: [*ROOMS].index(name)]
    made_before = {case for other in earlier for case in store.read_verdicts(other)}
    return {case for case in store.read_verdicts(name) if store.is_kept(case)} - made_before


def printed(name: str, names: Iterable[str]) -> dict[str, str]:
    """Return what is printed of some cases of a room, by their names."""
    room = store.load(name)
    room.keep(names)
    with tempfile.TemporaryDirectory(prefix="texts-", dir=IN_MEMORY) as made:
        folder, texts = Path(made), {}
        store.lay_out(room, folder / "files")
        for case in room.cases.values():  # each in a folder that is alone: what stands beside a checkpoint is read, too
            with tempfile.TemporaryDirectory(prefix="case_", dir=folder) as own:
                texts[case.name] = text_of(case, store.place(case, folder / "files", Path(own))).rstrip()
        return texts


def differences(name: str, before: str, now: str) -> list[str]:
    """Return the lines of a difference between two texts of a case; none if they are equal."""
    return [*unified_diff(before.splitlines(), now.splitlines(), name, name, lineterm="", n=2)]


def read(path: Path) -> dict[str, str]:
    """Return the texts of a file by the names of their cases; none if there is no such file."""
    if not path.exists():
        return {}
    found = {}
    for block in re.split(rf"\n\n(?={MARK})", path.read_text(encoding="utf-8").rstrip()):
        lines = block.splitlines()
        names = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
        found.update(dict.fromkeys(names, "\n".join(lines[len(names) :])))
    return found


def write(path: Path, texts: Mapping[str, str]) -> None:
    """Write texts, those that are equal once."""
    alike: dict[str, list[str]] = {}
    for name, text in sorted(texts.items()):
        alike.setdefault(text, []).append(name)
    blocks = ("\n".join([*(f"{MARK}{name}" for name in names), text]) for text, names in alike.items())
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
