"""What is printed of cases whose tests are gone: each word that those tests looked for, and all the others."""

from __future__ import annotations

import re
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

from tests.contract import store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FOLDER = store.HERE / "texts"
MARK = "== "
"""What stands before the name of a case; cases of one text stand above it, one below the other."""


def kept(known: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
    """Return the cases of rooms that no test makes any more; one that several rooms have is of the first."""
    found, before = dict[str, set[str]](), set[str]()
    for room, cases in known.items():
        found[room] = {case for case in cases if store.is_kept(case)} - before
        before |= cases.keys()
    return found


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
