"""Golden pictures: text compared with a file that was looked at. `SHARDVIZ_GOLDEN=write pytest` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).with_name("golden")


def check_golden(name: str, text: str, ending: str = "txt") -> None:
    path = FOLDER / f"{name}.{ending}"
    if os.environ.get("SHARDVIZ_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"there is no {path}: write it with SHARDVIZ_GOLDEN=write, and look at it"
    assert text == path.read_text(encoding="utf-8")
