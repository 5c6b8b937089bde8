"""Cases on disk: an archive a room with every file once, and which files and which command make a case."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import re
import tarfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
VERDICTS = HERE / "verdicts"
CASES = "cases.json"
TEST = re.compile(r"([^\s:]+\.py)::(\w+)")
"""The file and the function in the name of a case that a test made."""


class DamagedError(Exception):
    """An archive or a file of verdicts that cannot be read; its text names the file."""


@dataclass(frozen=True)
class Case:
    """One command and what it reads.

    Attributes:
        name: The test that it comes from, and the probe where a test has several.
        command: The arguments of `shardviz`; `{0}` stands for the first input.
        inputs: For each input its files, by their path in it: the hash of their content. A single file has the path "".
    """

    name: str
    command: tuple[str, ...]
    inputs: tuple[Mapping[str, str], ...]


@dataclass
class Room:
    """The cases of one room, and the content of their files by hash."""

    name: str
    cases: dict[str, Case] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, command: Iterable[str], inputs: Iterable[Mapping[str, Path]]) -> None:
        """Add a case; a second one of the same name gets a number, one with the same content is left out.

        Args:
            name: Its name.
            command: The arguments of `shardviz`.
            inputs: The files of each input, by their path in it (`files_of`).
        """
        self.add_content(name, command, [{path: file.read_bytes() for path, file in files.items()} for files in inputs])

    def add_content(self, name: str, command: Iterable[str], inputs: Iterable[Mapping[str, bytes]]) -> None:
        """Add a case as `add` does, of which each file's content is given."""
        contents = [{path: self.blob(content) for path, content in files.items()} for files in inputs]
        case = Case(name, tuple(command), tuple(contents))
        alike = [other for other in self.cases.values() if (other.command, other.inputs) == (case.command, case.inputs)]
        if alike:
            return
        number = 2
        while name in self.cases:
            name, number = f"{case.name} #{number}", number + 1
        self.cases[name] = Case(name, case.command, case.inputs)

    def blob(self, content: bytes) -> str:
        """Keep the content of a file; return its hash."""
        digest = digest_of(content)
        self.blobs[digest] = content
        return digest

    def size(self, name: str) -> int:
        """Return how many bytes a case reads."""
        return sum(len(self.blobs[digest]) for files in self.cases[name].inputs for digest in files.values())

    def take_kept(self, recorded: Room) -> None:
        """Take over the cases of a recorded room whose tests are gone (`is_kept`)."""
        self.cases |= {name: case for name, case in recorded.cases.items() if is_kept(name)}
        self.blobs |= recorded.blobs
        self.keep(self.cases)

    def keep(self, names: Iterable[str]) -> None:
        """Leave out all other cases, and the files that only they have."""
        chosen = set(names)
        self.cases = {name: case for name, case in self.cases.items() if name in chosen}
        used = {digest for case in self.cases.values() for files in case.inputs for digest in files.values()}
        self.blobs = {digest: content for digest, content in self.blobs.items() if digest in used}

    def save(self, folder: Path | None = None) -> Path:
        """Write the archive, into another folder if one is given.

        Blobs of one length are neighbors, which compresses well.
        """
        folder = folder or RECORDED
        folder.mkdir(exist_ok=True, parents=True)
        path = folder / f"{self.name}.tar.xz"
        cases = [{"name": case.name, "command": case.command, "inputs": case.inputs} for case in self.cases.values()]
        ordered = sorted(self.blobs.items(), key=lambda item: (item[1][:16], len(item[1]), item[0]))
        with tarfile.open(path, "w:xz", preset=9) as archive:
            for name, content in [(CASES, json.dumps(cases).encode()), *ordered]:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return path


def digest_of(content: bytes) -> str:
    """Return the hash by which a file's content is known."""
    return hashlib.sha256(content).hexdigest()[:20]


def files_of(path: Path) -> dict[str, Path]:
    """Return the files of an input by their path in it; a single file has the path ""."""
    return {"": path} if path.is_file() else dict(_files_in(path))


def _files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            file = Path(root, name)
            if file.is_file() and not file.is_symlink():
                yield file.relative_to(folder).as_posix(), file


def rooms() -> list[str]:
    """Return the names of the rooms that are recorded; of a room that lost its archive or its verdicts, too."""
    return sorted(
        {path.name.removesuffix(".tar.xz") for path in RECORDED.glob("*.tar.xz")}
        | {path.stem for path in VERDICTS.glob("*.json")}
    )


def is_kept(name: str) -> bool:
    """Whether the test that made a case is gone: its case stays, and what is printed of it stands in `texts/`."""
    test = TEST.match(name)
    return test is not None and test[2] not in _functions_of(HERE.parent / test[1])


@cache
def _functions_of(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def (\w+)", file.read_text(), re.M) if file.is_file() else ())


def load(name: str) -> Room:
    """Read a room's archive.

    Raises:
        DamagedError: It is damaged or cut short.
    """
    path = RECORDED / f"{name}.tar.xz"
    try:
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress(path.read_bytes()))) as archive:
            content = {entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()}
            blobs = {name: file.read() for name, file in content.items() if file is not None}
        made: list[dict[str, Any]] = json.loads(blobs.pop(CASES))
        cases = [Case(one["name"], tuple(one["command"]), tuple(one["inputs"])) for one in made]
        missing = {digest for case in cases for files in case.inputs for digest in files.values()} - blobs.keys()
    except (OSError, EOFError, KeyError, TypeError, ValueError, tarfile.TarError, lzma.LZMAError) as error:
        raise DamagedError(f"{path}: {type(error).__name__}: {error}") from error
    if missing:
        raise DamagedError(f"{path}: {len(missing)} files of its cases are missing")
    return Room(name, {case.name: case for case in cases}, blobs)


def lay_out(room: Room, folder: Path) -> None:
    """Write every file of a room once, called by its hash; cases, of other rooms too, link to them."""
    folder.mkdir(exist_ok=True)
    for digest, content in room.blobs.items():
        (folder / digest).write_bytes(content)


def place(case: Case, files: Path, folder: Path) -> list[Path]:
    """Put a case's inputs into a folder of their own.

    Args:
        case: The case.
        files: Where its room's files are laid out.
        folder: Where its inputs are put.

    Returns:
        Where they are.
    """
    inputs = []
    for number, content in enumerate(case.inputs):
        target = folder / f"input_{number}"
        for name, digest in content.items():
            file = target / name if name else target.with_suffix(_suffix(case, number))
            file.parent.mkdir(parents=True, exist_ok=True)
            os.link(files / digest, file)
            target = file if not name else target
        inputs.append(target)
    return inputs


def _suffix(case: Case, number: int) -> str:
    """Return the ending of an input that is a single file, which readers go by."""
    text = next((text for text in case.command if text.startswith(f"{{{number}}}")), "")
    return text.partition("}")[2]


def read_verdicts(name: str, folder: Path | None = None) -> dict[str, Any]:
    """Return a room's verdicts by case, from another folder if one is given.

    Raises:
        DamagedError: The file is damaged or missing.
    """
    path = (folder or VERDICTS) / f"{name}.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"{path}: expected an object with a verdict a case, found {type(found).__name__}")
    return found


def write_verdicts(name: str, verdicts: Mapping[str, Any], folder: Path | None = None) -> None:
    """Write a room's verdicts, a line for each finding, so that a change is read as a diff."""
    folder = folder or VERDICTS
    folder.mkdir(exist_ok=True, parents=True)
    lines = []
    for case, rows in sorted(verdicts.items()):
        inner = ",\n".join(f"    {json.dumps(row, sort_keys=True, ensure_ascii=False)}" for row in rows)
        lines.append(f"  {json.dumps(case, ensure_ascii=False)}: [\n{inner}\n  ]")
    (folder / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
