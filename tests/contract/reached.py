"""Which cases run which judging lines: one traced run of the whole contract, kept until code or cases change."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.contract import store
from tests.contract.judge import PROCESSES, judge_and_print
from tests.contract.store import place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import CodeType, FrameType

    from tests.contract.judge import Rows
    from tests.contract.store import Case

ROOT = Path(__file__).parents[2]

Key = tuple[str, str]
"""A room and the name of a case of it."""


@dataclass
class Recorded:
    """All cases with their files in place and what the contract says of them.

    Attributes:
        cases: The cases.
        known: Their verdicts.
        folder: Where cases are put; in `files` is what they read.
    """

    folder: Path
    cases: dict[Key, Case] = field(default_factory=dict)
    known: dict[Key, Rows] = field(default_factory=dict)

    @classmethod
    def in_folder(cls, folder: Path) -> Recorded:
        """Read every room, and write its files into a folder."""
        recorded = cls(folder)
        for name in store.rooms():
            room, verdicts = store.load(name), store.read_verdicts(name)
            recorded.cases |= {(name, case.name): case for case in room.cases.values()}
            store.lay_out(room, folder / "files")
            recorded.known |= {(name, case): rows for case, rows in verdicts.items()}
        return recorded

    def judge(self, key: Key) -> tuple[Rows, str]:
        """Return what the code says now of a case, and a hash of it with all sentences."""
        folder = Path(tempfile.mkdtemp(prefix="case_", dir=self.folder))
        try:
            rows, printed = judge_and_print(self.cases[key], place(self.cases[key], self.folder / "files", folder))
            return rows, hashlib.sha256(printed.encode(errors="replace")).hexdigest()[:16]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Lines:
    """Notes each line of some files that runs; a function all of whose lines have run is left alone."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self.prefixes = prefixes
        self.seen: dict[CodeType, set[int]] = {}
        self._all: dict[CodeType, int] = {}

    def trace(self, frame: FrameType, _event: str, _: Any) -> Callable[..., Any] | None:
        """Trace a call, for `sys.settrace`."""
        code = frame.f_code
        if not code.co_filename.startswith(self.prefixes):
            return None
        if code not in self._all:
            self._all[code] = len({line for _, _, line in code.co_lines() if line is not None})
        seen = self.seen.setdefault(code, set())
        if len(seen) >= self._all[code]:
            return None
        add = seen.add

        def each_line(inner: FrameType, event: str, _: Any) -> Callable[..., Any]:
            if event == "line":
                add(inner.f_lineno)
            return each_line

        return each_line

    def taken(self) -> set[tuple[str, int]]:
        """Return the files and lines since the last time."""
        lines = {(code.co_filename, line) for code, seen in self.seen.items() for line in seen}
        self.seen.clear()
        return lines


@dataclass
class Reached:
    """What judging runs and prints.

    Attributes:
        lines: Each file, from the root, with its lines and the cases that run each.
        printed: For each case a hash of all that is printed; "" if that is not the same every time.
    """

    lines: dict[str, dict[int, list[Key]]] = field(default_factory=dict)
    printed: dict[Key, str] = field(default_factory=dict)


def reached(recorded: Recorded, folders: Sequence[str]) -> Reached:
    """Return which cases run which lines below some folders of the repository, and what they print.

    Raises:
        DiffersError: A verdict is not the recorded one.
    """
    global _recorded, _prefixes
    _recorded, _prefixes = recorded, tuple(f"{ROOT}{os.sep}{folder}" for folder in folders)
    found, code = Reached(), _digest_of_code(folders)
    with get_context("fork").Pool(PROCESSES) as pool:
        for name in sorted({room for room, _ in recorded.cases}):
            keys = sorted(key for key in recorded.cases if key[0] == name)
            own = repr([(key, recorded.cases[key], recorded.known.get(key)) for key in keys])
            digest = hashlib.sha256(f"{code} {own}".encode()).hexdigest()[:20]
            kept = Path(tempfile.gettempdir(), f"shardviz-lines-{os.getuid()}-{digest}")
            if not kept.exists():
                kept.write_bytes(pickle.dumps(list(pool.imap_unordered(_lines_of, keys, chunksize=4))))
            for key, lines, printed in pickle.loads(kept.read_bytes()):
                found.printed[key] = printed
                for file, line in lines:
                    found.lines.setdefault(file, {}).setdefault(line, []).append(key)
    return found


class DiffersError(Exception):
    """A case's verdict is not the recorded one, with no mistake made."""


_recorded: Recorded
_prefixes: tuple[str, ...]
_lines: Lines | None = None


def _lines_of(key: Key) -> tuple[Key, set[tuple[str, int]], str]:
    global _lines
    _lines = _lines or Lines(_prefixes)
    rows, printed = _recorded.judge(key)  # whatever it imports is imported now
    sys.settrace(_lines.trace)
    try:
        again = _recorded.judge(key)
    finally:
        sys.settrace(None)
    if rows != _recorded.known.get(key):
        raise DiffersError(" ".join(key))
    lines = {(str(Path(file).relative_to(ROOT)), line) for file, line in _lines.taken()}
    return key, lines, printed if again == (rows, printed) else ""


def _digest_of_code(folders: Iterable[str]) -> str:
    digest = hashlib.sha256(repr((sys.version, *folders)).encode())
    for file in sorted((ROOT / "shardviz").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
