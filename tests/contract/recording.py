"""A pytest plugin that records what tests judge: `pytest -p tests.contract.recording --contract ROOM`.

It stands in front of the functions that judge, before anything else imports them, and keeps the files that they read.
"""

from __future__ import annotations

import os
import re
import tempfile
import tracemalloc
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shardviz.checkpoint.maps.language as language
from shardviz.errors import ShardvizError
from tests.contract.store import RECORDED, Room, files_of, load, read_verdicts, rooms, write_verdicts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.contract.judge import Rows

MAX_BYTES = 1 << 22
"""Inputs that are larger than this are not kept."""

SMALL = 1 << 19
"""A case of more bytes is kept only if it has a cause that no smaller case has, of any room."""

MAX_OF_TEST = 24
"""Of one test so many cases: hypothesis makes hundreds."""

RAW = ("trace/", "unsharded/")
"""The raw values of a step beside a dump, which `check` does not read."""

UNSHARDED = "unsharded"
MAP = "my.map"

room: Room | None = None
"""Where cases go; None if nothing is recorded, as in every other run of the tests."""

_lines: dict[int, tuple[Any, str]] = {}


def is_on() -> bool:
    """Whether cases are recorded now."""
    return room is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--contract", metavar="ROOM", help="record what is judged as the cases of a room of the contract")
    parser.addoption("--contract-into", metavar="FOLDER", help="write the room there, and not into the contract")


def pytest_configure(config: pytest.Config) -> None:
    global room
    if config.getoption("--contract"):
        if config.getoption("collectonly") or config.getoption("keyword"):
            raise pytest.UsageError("--contract replaces a whole room: give it neither --collect-only nor -k")
        room = Room(config.getoption("--contract"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if room is not None and not exitstatus:  # half a room would replace a whole one
        from tests.contract.judge import judge_room

        if (RECORDED / f"{room.name}.tar.xz").exists():
            room.take_kept(load(room.name))
        verdicts = judge_room(room)
        room.keep(worth_keeping(room, verdicts))
        into = session.config.getoption("--contract-into")
        path = room.save(Path(into) if into else None)
        write_verdicts(room.name, {name: verdicts[name] for name in room.cases}, Path(into) if into else None)
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        session.config.pluginmanager.get_plugin("terminalreporter").write_line(
            f"{len(room.cases)} cases, {size}: {path.name}"
        )


def worth_keeping(room: Room, verdicts: Mapping[str, Rows]) -> list[str]:
    """Return the names of a room's cases without those that are large and say nothing of their own."""
    others = [read_verdicts(name) for name in rooms() if name != room.name]
    named = {row.get("cause_id") for cases in others for rows in cases.values() for row in rows}
    kept = []
    for name in sorted(room.cases, key=room.size):
        causes = {row["cause_id"] for row in verdicts[name] if row.get("cause_id")}
        if room.size(name) <= SMALL or causes - named:
            kept.append(name)
            named |= causes
    return kept


def _record(command: Sequence[str], inputs: Sequence[Mapping[str, Path]], probe: str = "") -> None:
    """Add a case, named after the running test and its probe."""
    if room is None or tracemalloc.is_tracing():  # a test that measures memory
        return
    test = re.sub(r" \(\w+\)$", "", os.environ.get("PYTEST_CURRENT_TEST", "")).removeprefix("tests/")
    name = f"{test} {probe}".strip() if probe and probe not in test else test
    num_alike = sum(case == name or case.startswith(f"{name} #") for case in room.cases)
    if num_alike < MAX_OF_TEST and all(0 < _size(files) <= MAX_BYTES for files in inputs):
        room.add(name, command, inputs)


def _size(files: Mapping[str, Path]) -> int:
    """Return the bytes of an input; 0 if it has none."""
    return sum(file.stat().st_size for file in files.values())


def _after(make: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that records what it makes."""

    @wraps(make)
    def recorded(*args: Any, **named: Any) -> Any:
        made = make(*args, **named)
        if room is not None:
            record(made)
        return made

    return recorded


def _before(judge: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that records its arguments and then judges."""

    @wraps(judge)
    def recorded(*args: Any, **named: Any) -> Any:
        if room is not None:
            record(*args, **named)
        return judge(*args, **named)

    return recorded


def _if_refused(opens: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that opens a checkpoint, and records one that it refuses."""

    @wraps(opens)
    def opened(path: Path | str) -> Any:
        try:
            return opens(path)
        except ShardvizError:
            if Path(path).exists():
                mark = f"{{0}}{Path(path).suffix if Path(path).is_file() else ''}"
                _record(("check", mark), (files_of(Path(path)),))
            raise

    return opened


def _dump(dump: Any) -> None:
    path = dump.files.path
    probe = Path(dump.files.run.probe).stem.removeprefix("case")
    files = files_of(path)
    own = {name: file for name, file in files.items() if not name.startswith(RAW)}
    _record(("check", "{0}"), (own,), probe)
    if own.keys() < files.keys():
        _record(("diff", "{0}", "{1}"), (files_of(path / UNSHARDED), files), f"{probe} step".strip())


def _checkpoint(checkpoint: Any, *_: Any, **__: Any) -> None:
    _record(
        ("check", f"{{0}}{checkpoint.path.suffix if checkpoint.path.is_file() else ''}"), (files_of(checkpoint.path),)
    )


def _dumps(before: Any, after: Any, *_: Any, **__: Any) -> None:
    _record(("diff", "{0}", "{1}"), [files_of(dump.files.path) for dump in (before, after)])


def add_diff(one: Path, other: Path) -> None:
    """Record two dumps that a test compares in another process; nothing if cases are not recorded now."""
    _record(("diff", "{0}", "{1}"), [files_of(path) for path in (one, other)])


def _checkpoints(before: Any, after: Any, rules: Any = (), *_: Any, also: Sequence[Any] = (), **__: Any) -> None:
    paths = [before.path, after.path, *(other.path for other in also)]
    text = _lines.get(id(rules), (None, ""))[1]
    if rules and not text:
        return
    marks, inputs = _with_siblings(paths)
    command = ["diff", *marks[:2]]
    for mark in marks[2:]:
        command += ["--also", mark]
    if text:
        file = Path(tempfile.mkdtemp(prefix="shardviz-contract-"), MAP)
        file.write_text(text)
        command += ["--map", f"{{{len(inputs)}}}.map"]
        inputs.append(files_of(file))
    _record(command, inputs)


def _with_siblings(paths: Sequence[Path]) -> tuple[list[str], list[Mapping[str, Path]]]:
    """Return how a command names each path, and the inputs; checkpoints of other steps beside one are read too."""
    from shardviz.checkpoint.comparing.all_tensors.odd_files import siblings

    marks, inputs, folders = [], [], dict[Path, dict[str, Path]]()
    for path in map(Path.absolute, paths):
        others = siblings(path)
        folder = Path(os.path.commonpath([path.parent, *(other.parent for other in others)]))
        if not others:
            marks.append(f"{{{len(inputs)}}}{path.suffix if path.is_file() else ''}")
            inputs.append(files_of(path))
            continue
        if folder not in folders:
            folders[folder] = {}
            inputs.append(folders[folder])
        for one in (path, *others):
            of_it = {(one / name if name else one): file for name, file in files_of(one).items()}
            folders[folder] |= {name.relative_to(folder).as_posix(): file for name, file in of_it.items()}
        number = next(at for at, files in enumerate(inputs) if files is folders[folder])
        marks.append(f"{{{number}}}/{path.relative_to(folder).as_posix()}")
    return marks, inputs


def _record_refused_map(text: str) -> None:
    """Add a case with a map that nobody can read, between any two checkpoints."""
    if room is not None:
        folder = Path(tempfile.mkdtemp(prefix="shardviz-contract-"))
        (folder / MAP).write_text(text)
        header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        (folder / "any.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        files = [files_of(folder / name) for name in ("any.safetensors", "any.safetensors", MAP)]
        _record(("diff", "{0}.safetensors", "{1}.safetensors", "--map", "{2}.map"), files)


def _remembered(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a parser of maps that remembers the text of what it made."""

    @wraps(parse)
    def parsed(text: str, source: str) -> Any:
        try:
            rules = parse(text, source)
        except ShardvizError:
            _record_refused_map(text)
            raise
        _lines[id(rules)] = rules, text
        return rules

    return parsed


language.parse_rules = _remembered(language.parse_rules)

# Modules that import these functions by name do so after this one, and get the recording ones.
import shardviz.dump.dump as dumps  # noqa: E402

dumps.dump_of = _after(dumps.dump_of, _dump)  # whoever judges a part of it

import shardviz.checkpoint.findings as findings  # noqa: E402
import shardviz.checkpoint.open as opening  # noqa: E402

opening.open_checkpoint = _if_refused(opening.open_checkpoint)
findings.check_checkpoint = _before(findings.check_checkpoint, _checkpoint)

import shardviz.check.diff as diff  # noqa: E402
import shardviz.checkpoint.comparing.compare as comparing  # noqa: E402
import shardviz.checkpoint.live_job.compare as beside  # noqa: E402

diff.compare = _before(diff.compare, _dumps)
comparing.compare_checkpoints = _before(comparing.compare_checkpoints, _checkpoints)
beside.compare_with_job = _before(beside.compare_with_job, _checkpoints)
