"""One recorded case of each cause, as shardviz prints and draws it today: the examples on the catalogue's pages."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from shardviz.cli import main
from tests.contract.judge import with_inputs
from tests.contract.store import lay_out, load, place, read_verdicts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.contract.store import Case

ROOMS = ("bugs", "probes", "captures", "lines", "steps", "jobs", "checkpoints", "dumps", "maps", "places", "rules")
"""Where an example is looked for: real runs first."""
ORDER = ("first", "second", "third", "fourth")
"""What inputs are called that have no name of their own."""
MOST_LINES = 60
"""Lines of an example; the others are counted."""


@dataclass(frozen=True)
class Example:
    """What shardviz says of a case.

    Attributes:
        command: The command as a user types it.
        printed: What it prints.
        picture: The finding's tensor as SVG; empty if it has no picture.
    """

    command: str
    printed: str
    picture: str = ""


def examples(rooms: Sequence[str] = ROOMS) -> Mapping[str, Example]:
    """Return the example of each cause that a recorded case has: of the first room that has it, the smallest."""
    found: dict[str, Example] = {}
    for name in rooms:
        room = load(name)
        chosen: dict[str, tuple[int, Case, str]] = {}
        for case_name, rows in read_verdicts(name).items():
            for row in rows:
                cause = row.get("cause_id", "")
                if cause and cause not in found and case_name in room.cases:
                    size, tensor = room.size(case_name), row.get("tensor", "")
                    if cause not in chosen or size < chosen[cause][0]:
                        chosen[cause] = size, room.cases[case_name], tensor
        with tempfile.TemporaryDirectory(prefix="shardviz-docs-") as made:
            files = Path(made, "files")
            lay_out(room, files)
            jobs = [(cause, case, tensor, files, Path(made, cause)) for cause, (_, case, tensor) in chosen.items()]
            with get_context("fork").Pool(os.cpu_count()) as pool:
                found |= dict(pool.imap_unordered(_example_in, jobs))
    return found


def _example_in(job: tuple[str, Case, str, Path, Path]) -> tuple[str, Example]:
    cause, case, tensor, files, folder = job
    folder.mkdir()
    try:
        return cause, _example(case, tensor, [_renamed(path) for path in place(case, files, folder)])
    finally:
        shutil.rmtree(folder)


def _renamed(path: Path) -> Path:
    """Give an input the name that a user would: a probe's dump its default, others what they are."""
    number, record = int(path.stem.rpartition("_")[2]), path / "run.json"
    name = "names.map" if path.suffix == ".map" else f"{ORDER[number]}{path.suffix}"
    if record.is_file():
        run = json.loads(record.read_bytes())
        sizes = "x".join(map(str, (run.get("mesh") or {}).get("shape", ()))) or f"{run['num_ranks']}"
        name = f"{Path(run.get('probe') or ORDER[number]).stem}-{sizes}.shardviz"
    renamed = path.with_name(name)
    return path if renamed.exists() else path.rename(renamed)


def _example(case: Case, tensor: str, inputs: list[Path]) -> Example:
    words = [word for word in case.command if word]
    typed = [with_inputs(word, [Path(path.name) for path in inputs]) for word in words]
    printed = _printed([with_inputs(word, inputs) for word in words])
    for path in inputs:
        printed = printed.replace(f"{path.parent}/", "")
    lines = printed.rstrip().splitlines()
    more = [f"... {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    picture = ""
    if words[0] == "check" and tensor:
        file = inputs[0].parent / "example.svg"
        _printed(["show", str(inputs[0]), tensor, "-o", str(file)])
        picture = file.read_text(encoding="utf-8") if file.is_file() else ""
    return Example(f"shardviz {' '.join(typed)}", "\n".join([*lines[:MOST_LINES], *more]), picture)


def _printed(command: list[str]) -> str:
    """Return what a command prints, 100 columns wide and without colors."""
    out = io.StringIO()
    plain = {"COLUMNS": "100", "NO_COLOR": "1"}
    talk = contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO())
    with talk[0], talk[1], patch.dict(os.environ, plain), contextlib.suppress(SystemExit):
        main(command)
    return out.getvalue()
