"""Notes that ranks leave for the command, a file for each process. Imports no torch."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal[
    "joined", "sharded", "source", "captured", "not-captured", "not-loaded", "problem", "ended", "finished", "died"
]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a process of the job has to say.

    Attributes:
        kind: `joined` that it is a rank, `sharded` that something was sharded, `source` what values are compared with,
            `captured` a dump, `not-captured` and `problem` why not, `not-loaded` that a model was called before
            anything was loaded, `ended` that shardviz ended it as asked, `finished` that its script came to its end
            without an error, `died` how it ended where its launcher saw it fail.
        rank: Its rank; -1 where it has none.
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
    """Return all notes, those of rank 0 first; a line that a killed process left unfinished is left out."""
    found = (note for path in sorted(session.glob("notes-*.jsonl")) for note in _notes_in(path))
    return sorted(found, key=lambda note: note.rank)


def _notes_in(path: Path) -> Iterator[Note]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError):
            yield Note(**json.loads(line))


def ranks_on(session: Path) -> list[int]:
    """Return the process numbers of the ranks that have joined on this machine."""
    own = session.glob(f"notes-{socket.gethostname()}-*.jsonl")
    return [int(path.stem.rpartition("-")[2]) for path in own if any(note.kind == "joined" for note in _notes_in(path))]
