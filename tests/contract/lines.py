"""`python -m tests.contract.lines FILE FOLDER ...`: which lines run when every case is judged, one a line of FILE."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

ROOT = str(Path(__file__).parents[2]) + os.sep


def tracer(prefixes: tuple[str, ...], seen: set[tuple[str, int]]) -> Callable[..., Any]:
    """Return a trace function that notes each line below some folders the first time."""

    def each_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return each_line

    def each_call(frame: FrameType, _event: str, _: Any) -> Any:
        return each_line if frame.f_code.co_filename.startswith(prefixes) else None

    return each_call


def main(target: str, *folders: str) -> None:
    """Judge all rooms in this process, and write the lines."""
    from tests.contract import judge, store

    seen: set[tuple[str, int]] = set()
    sys.settrace(tracer(tuple(ROOT + folder for folder in folders), seen))
    for room in store.rooms():
        judge.judge_room(room, processes=0)
    sys.settrace(None)
    rows = sorted(f"{file.removeprefix(ROOT)}:{line}" for file, line in seen)
    Path(target).write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
