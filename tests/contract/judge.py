"""Judge a case with the code as it is, and keep of what is printed all but the sentences."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from shardviz import cli
from shardviz.explain.cause import Cause
from shardviz.explain.finding import Finding
from tests.contract.store import Case, Room, lay_out, place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Rows = list[dict[str, Any]]
"""A case's verdict: its exit code, then one object for each thing that was said."""
Verdicts = dict[str, Rows]
"""The verdicts on the cases of a room, by name."""

SENTENCES = frozenset(
    {
        "summary",
        "causes",
        "cause",
        "fix",
        "why",
        "sentence",
        "details",
        "also",
        "refs",
        "notes",
        "hint",
        "look",
        "schema",
        "tensors",
    }
    | {"distance", "correlation"}
)
"""Keys of the JSON whose values are prose, that other keys say as well, or that machines round differently."""

LISTS = ("findings", "not_checked", "changes", "relaid", "gained", "lost", "not_compared", "tensors")
"""What the JSON of `check` and `diff` has lists of."""

PROCESSES = 2

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where files of cases are put: on a busy disk making and removing them takes longer than judging."""

TEXT_WIDTH = 100
MOST_WORDS = 6
"""Words of a field that may still be a name, a layout or a number with its unit."""


Asking = Callable[[str, Case, "Sequence[Path]"], list[str]]
"""Called with a room's name, a case and its inputs: returns what is wrong with the case besides its verdict."""


def judge_rooms(
    rooms: Sequence[Room], words: Sequence[str] = (), processes: int = PROCESSES, asking: Asking | None = None
) -> tuple[dict[str, Verdicts], list[str]]:
    """Return the verdicts on every case of some rooms, or on those that have one of some words in their names.

    Args:
        rooms: The rooms.
        words: The words.
        processes: How many processes judge; 0 for this one alone.
        asking: What is asked of each case after it is judged.

    Returns:
        The verdicts, and what was answered.
    """
    verdicts: dict[str, Verdicts] = {room.name: {} for room in rooms}
    answers: list[str] = []
    with tempfile.TemporaryDirectory(prefix="shardviz-contract-", dir=IN_MEMORY) as made:
        folder, jobs = Path(made), list[tuple[int, str, Case, Path, Asking | None]]()
        for room in rooms:
            lay_out(room, folder / "files")
            named = [case for case in room.cases.values() if not words or any(word in case.name for word in words)]
            jobs += [(room.size(case.name), room.name, case, folder, asking) for case in named]
        jobs.sort(key=lambda job: -job[0])  # the long ones first, so that no process waits for another at the end
        gc.freeze()  # each collection would walk through all that is imported, and copy it into the process
        workers = partial(get_context("fork").Pool, processes, gc.set_threshold, (20_000,))
        with workers() if processes else contextlib.nullcontext() as pool:
            judged = pool.imap_unordered(_judge_in, jobs, chunksize=4) if pool is not None else map(_judge_in, jobs)
            for name, case, rows, answer in judged:
                verdicts[name][case] = rows
                answers += answer
    return verdicts, answers


def judge_room(room: Room, processes: int = PROCESSES) -> Verdicts:
    """Return the verdicts on every case of a room."""
    return judge_rooms([room], processes=processes)[0][room.name]


def _judge_in(job: tuple[int, str, Case, Path, Asking | None]) -> tuple[str, str, Rows, list[str]]:
    _, room, case, folder, asking = job
    own = Path(tempfile.mkdtemp(prefix="case_", dir=folder))
    try:
        inputs = place(case, folder / "files", own)
        rows = judge(case, inputs)
        return room, case.name, rows, asking(room, case, inputs) if asking is not None else []
    finally:
        shutil.rmtree(own, ignore_errors=True)


def judge_files(case: Case, inputs: Sequence[Mapping[str, bytes]]) -> Rows:
    """Return the verdict on a case whose files are these, and not those that are recorded."""
    room = Room("made")
    with tempfile.TemporaryDirectory(prefix="shardviz-contract-", dir=IN_MEMORY) as made:
        files = [{name: room.blob(content) for name, content in one.items()} for one in inputs]
        case = Case(case.name, case.command, tuple(files))
        lay_out(room, Path(made, "files"))
        return judge(case, place(case, Path(made, "files"), Path(made, "case")))


def judge(case: Case, inputs: Sequence[Path]) -> Rows:
    """Return the verdict on a case whose inputs are in place."""
    return judge_and_print(case, inputs)[0]


def judge_and_print(case: Case, inputs: Sequence[Path]) -> tuple[Rows, str]:
    """Return the verdict on a case whose inputs are in place, and all that was printed, sentences and all."""
    with patch.object(Finding, "to_json", _with_fields):
        code, out, talk = _run(case, inputs, "json")
    where = os.path.commonpath([str(path) for path in inputs])
    return [{"exit": code}, *_rows(out, where)], f"{out}\n{talk}".replace(str(inputs[0].parent), "<in>")


def text_of(case: Case, inputs: Sequence[Path]) -> str:
    """Return what a user reads of a case, who stands in the folder that its inputs are in."""
    folder, before = inputs[0].parent, Path.cwd()
    os.chdir(folder)
    try:
        _, out, talk = _run(case, [path.relative_to(folder) for path in inputs], "text")
    finally:
        os.chdir(before)
    text = f"{out}{talk}".replace(str(folder), "<in>")
    # Where a line ends depends on how long the path is, if one is printed whole.
    return (textwrap.fill(" ".join(text.split()), TEXT_WIDTH) if "<in>" in text else text).rstrip()


def _run(case: Case, inputs: Sequence[Path], form: str) -> tuple[int, str, str]:
    """Return the exit code of a case's command, and what it prints on both streams."""
    command = [with_inputs(text, inputs) for text in case.command]
    out, talk = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk), _own_environment():
        try:
            with patch.object(cli, "parser_for", _parser_for):
                code = cli.main([*command, "--format", form])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 70
    return code, out.getvalue(), talk.getvalue()


_to_json = Finding.to_json
_parser_for = cache(cli.parser_for)
"""The parsers of verbs: making one takes longer than judging a small case."""


def _with_fields(finding: Finding) -> dict[str, Any]:
    """Return a finding as it is printed, and the fields of its cause: the data that its sentences are made of."""
    return _to_json(finding) | {"fields": _data(finding.explanation)}


def _data(value: Any) -> Any:
    """Return a value as JSON has it; words that make a sentence are left out, as None."""
    if isinstance(value, Cause):
        own = {name: _data(getattr(value, name)) for name in sorted(item.name for item in fields(value))}
        return {name: found for name, found in own.items() if found not in ("", [], {}, None)}
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_data(item) for item in value]
    text = str(value)
    return text if len(text.split()) <= MOST_WORDS else None


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Keep what the machine says out of a verdict."""
    names = ("RANK", "WORLD_SIZE", "GITHUB_ACTIONS", "COLUMNS")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def with_inputs(text: str, inputs: Sequence[Path]) -> str:
    """Return a word of a case's command with the path of the input that it names."""
    for number, path in enumerate(inputs):
        mark = f"{{{number}}}"
        if text.startswith(mark):
            rest = text.removeprefix(mark)
            return f"{path}{rest}" if rest.startswith("/") else str(path)
    return text


def _rows(printed: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield what was printed, without sentences and in an order of its own; nothing if it is no JSON."""
    try:
        found = json.loads(printed)
    except ValueError:
        return
    rows = [{"in": name} | _without_sentences(row) for name in LISTS for row in found.pop(name, ())]
    if isinstance(step := found.pop("step", None), dict):
        rows += [{"in": "departures"} | _without_sentences(row) for row in step.get("departures", ())]
        rows += [{"in": "step not compared"} | _without_sentences(row) for row in step.get("not_compared", ())]
    for row in sorted(rows, key=lambda row: json.dumps(row, sort_keys=True)):
        yield json.loads(json.dumps(row).replace(where, "<in>"))


def _without_sentences(row: Mapping[str, Any]) -> dict[str, Any]:
    names = row.get("tensors")
    kept = {name: value for name, value in row.items() if name not in SENTENCES and value not in ("", [], {}, None)}
    return kept | ({"tensors": names} if isinstance(names, list) and len(names) > 1 else {})
