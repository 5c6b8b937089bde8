"""Messages between the command and the job's ranks: options in the environment, and notes.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardviz.errors import DumpError
from shardviz.live.trace_modules import Followed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLE = "SHARDVIZ_RUN"
PATIENCE = 60.0
"""Seconds that a rank waits for the others to come to the same model."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the ranks are to do.

    Attributes:
        output: The first dump's folder; further models get a number behind its name.
        session: A folder for what the ranks note and remember; every process of the job reaches it.
        reference: What values are compared with; empty for what the hooks see.
        names: The reference's names by pattern over the model's.
        steps: Optimizer steps after which the job ends; 0 to let it go on.
        force: Replace dumps that are there.
        patience: Seconds that a rank waits for the others.
        command: The job's command, for the record.
        is_stamped: Whether the reference is a stamped copy: a job that has loaded it is ended before it saves.
        trace: What of a step is followed, as `Followed.parse` reads it.
        trace_step: Which optimizer step that is, counted from 1.
    """

    output: str
    session: str
    reference: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    force: bool = False
    patience: float = PATIENCE
    command: tuple[str, ...] = ()
    is_stamped: bool = False
    trace: str = "off"
    trace_step: int = 1

    def environment(self) -> dict[str, str]:
        """Return the variables that start the hooks in every Python process of a job."""
        bootstrap = str(Path(__file__).parent / "bootstrap")
        before = os.environ.get("PYTHONPATH")
        variables = {
            VARIABLE: json.dumps(asdict(self)),
            "PYTHONPATH": os.pathsep.join(filter(None, (bootstrap, before))),
        }
        has_lines = Followed.parse(self.trace, of_job=True).lines is not None
        return variables | ({"TORCH_COMPILE_DISABLE": "1"} if has_lines else {})  # compiled code has no lines

    @classmethod
    def of_environment(cls) -> Options:
        """Return what the command asked for."""
        options = json.loads(os.environ[VARIABLE])
        return cls(**{**options, "command": tuple(options["command"])})

    def dump(self, index: int) -> Path:
        """Return the folder of a model's dump, the first, the second and so on."""
        first = Path(self.output)
        return first if not index else first.with_name(f"{first.stem}-{index + 1}{first.suffix}")


def session_beside(dump: Path) -> Path:
    """Make a folder next to a dump for ranks' notes; every process of the job can reach it.

    Raises:
        DumpError: It cannot be made.
    """
    try:
        dump.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{dump.name}.", suffix=".run", dir=dump.parent))
    except OSError as error:
        why = error.strerror or error
        raise DumpError(f"cannot write beside {dump}: {why}", "give another folder with -o") from error


Kind = Literal[
    "joined",
    "sharded",
    "source",
    "captured",
    "not-captured",
    "not-watched",
    "problem",
    "ended",
    "refused",
    "finished",
    "died",
]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a process of the job has to say.

    Attributes:
        kind: `joined` that it is a rank, `sharded` that something was sharded, `source` what values are compared with,
            `captured` a dump, `not-captured` and `problem` why not, `not-watched` that its Python has no shardviz,
            `ended` that shardviz ended it as asked, `refused` that it did so before a save, `finished` that its script
            came to its end without an error, `died` how it ended if its launcher saw it fail.
        rank: Its rank; -1 if it has none.
        text: The dump's folder, or a sentence.
    """

    kind: Kind
    rank: int
    text: str = ""


def leave(session: str | Path, note: Note) -> None:
    """Write a note; a disk that refuses must not stop a job."""
    path = Path(session) / f"notes-{socket.gethostname()}-{os.getpid()}.jsonl"
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(note)) + "\n")


def read(session: Path) -> list[Note]:
    """Return all notes, rank 0's first; a line left unfinished by a killed process is skipped."""
    notes = (note for path in sorted(session.glob("notes-*.jsonl")) for note in _notes_in(path))
    return sorted(notes, key=lambda note: note.rank)


def _notes_in(path: Path) -> Iterator[Note]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError):
            yield Note(**json.loads(line))


def ranks_on(session: Path) -> list[int]:
    """Return the process numbers of the ranks that have joined on this machine."""
    note_files = session.glob(f"notes-{socket.gethostname()}-*.jsonl")
    return [
        int(path.stem.rpartition("-")[2])
        for path in note_files
        if any(note.kind == "joined" for note in _notes_in(path))
    ]
