"""CONTRIBUTING's tables are the tree: every folder has a place in them, and every file that they name is there."""

from __future__ import annotations

import re
from pathlib import Path

HOUSE = Path(__file__).parent.parent
TEXT = (HOUSE / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOMS = TEXT.partition("## The house")[2].partition("\n## ")[0]


def test_every_folder_of_code_is_in_the_table_of_rooms() -> None:
    folders = {
        path.parent.relative_to(HOUSE)
        for top in ("shardviz", "probes", "tui")
        for path in (HOUSE / top).rglob("__init__.py")
    }
    assert len(folders) > 50
    rows = {Path(name): row for name, row in re.findall(r"^\| `([\w/]+)/` (.*)$", ROOMS, re.M)}
    for folder in folders - rows.keys():
        row = next(row for room, row in rows.items() if room in folder.parents)
        assert f"`{folder.name}/`" in row or f"`{folder}/`" in row, f"{folder} is in no row of CONTRIBUTING.md"
    assert all((HOUSE / room).is_dir() for room in rows)


def test_every_file_that_the_tables_send_to_is_there() -> None:
    files = re.findall(r"`([\w/]+/[\w/]+\.\w+)`", ROOMS)
    assert len(files) > 10
    assert [name for name in files if not (HOUSE / name).exists()] == []
