"""Read an untrusted dump: every number is checked before anything is built from it.

Nothing is unpickled, and no path out of the folder is followed. Memory is bounded by the length of the files, except
for a mesh's list of ranks (at most `MAX_RANKS`), which need not be written if it counts up. A file is read schema
first, and one line names what is wrong in it, or which dump was meant.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import structs

from shardviz.dump.arrays import ArrayRequest, check_arrays, read_array, read_arrays
from shardviz.dump.records.base import MAX_NUMBER, SCHEMA
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.validate import StampedShapes, check_rank, check_run, layout_of, mesh_of
from shardviz.dump.write import PLAN_FILE, RANK_FILE, RUN_FILE, SUFFIX, dense_file, rank_file
from shardviz.errors import ChangedError, DumpError, NoDumpError, RefusedError
from shardviz.layout.mesh import Mesh
from shardviz.machine import collector_paused
from shardviz.text import Fold, listed, nearest, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.dump.plan import PlannedRanks
    from shardviz.dump.records.files import PlanRecord

WRITES_ONE = "shardviz probe tp_fsdp --mesh 2,4 writes one"
MOST_DUMPS = 4
"""Dumps of a folder that a hint lists."""


def is_dump(folder: Path) -> bool:
    """Whether a folder has the file that every dump has."""
    with suppress(OSError):
        return (folder / RUN_FILE).is_file()
    return False


def hint_at_dump(path: Path) -> str:
    """Return a hint for a path that does not exist: the dump beside it whose name is nearest."""
    names = [found.name for found in _dumps_in(path.parent)]
    with_suffix = f"{path.name}{SUFFIX}"
    close = with_suffix if with_suffix in names else nearest(path.name, names)
    return f"did you mean {printable(str(path.with_name(close)))}?" if close else WRITES_ONE


def no_dump(folder: Path) -> DumpError:
    """Return the error for a folder that is not a dump: its hint has those that are in it."""
    message = f"{folder} is not a dump: it has no {RUN_FILE}"
    dumps = [printable(str(path)) for path in _dumps_in(folder)]
    if dumps:
        return DumpError(message, f"give one of the dumps in it: {listed(dumps, MOST_DUMPS)}")
    with suppress(OSError):
        if any(RANK_FILE.fullmatch(path.name) for path in folder.iterdir()):
            return DumpError(f"{message}, only files of ranks", f"copy {RUN_FILE} from where the job wrote the dump")
    return NoDumpError(message, WRITES_ONE)


def _dumps_in(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if is_dump(path))
    return []


MAX_FILE = 1 << 30
"""Bytes of a JSON file: a dump of 1,024 ranks has 32 MB in all, and large values lie beside it."""

SHOWN = 300
"""How many characters a message shows of the reason why a file is damaged."""

_PERMISSIONS = "change the permissions of the dump's folder and its files"
_ELSEWHERE = "write fewer values into it: shardviz probe --values, or values_limit"

AnyRecord = TypeVar("AnyRecord", "RunRecord", "RankRecord", "PlanRecord")


def plain_file(folder: Path, name: str) -> Path:
    """Return the path of a file in a dump's folder; links and what is not a file are refused.

    Raises:
        DumpError: It is a link, or there and not a plain file.
    """
    path = folder / name
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror}", _PERMISSIONS) from error
    if stat.S_ISLNK(mode):
        raise RefusedError(f"{path} is a link", "a dump's files are plain files; copy the target here")
    if not stat.S_ISREG(mode):
        raise RefusedError(f"{path} is not a plain file", "remove it, or write the dump again")
    return path


def _content(folder: Path, name: str) -> bytes:
    path = plain_file(folder, name)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= MAX_FILE:
                return file.read(size)
        raise DumpError(f"{path} is {size:,} bytes, more than the {MAX_FILE:,} that are read", _ELSEWHERE)
    except FileNotFoundError:
        if name == RUN_FILE:
            raise no_dump(folder) from None
        raise DumpError(f"{folder} is not a dump: it has no {name}", "write the dump again") from None
    except PermissionError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror}", _PERMISSIONS) from error
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error


_OLD_PHASE = re.compile(rb'("role":"[a-z]+",)"stage":"')
"""A body's phase as it was called in older dumps; a stage is a pipeline's."""


CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"\}\n\Z')
"""The end of a file as shardviz writes it. What another program wrote anew has no line's end, or spaces in it."""

CHECKSUM_BYTES = 21


def _as_written(content: bytes, path: Path) -> bytes:
    """Return a file's text without its checksum.

    Raises:
        ChangedError: It has another checksum than it was written with.
    """
    match = CHECKSUM.search(content, max(0, len(content) - CHECKSUM_BYTES))
    if match is None:
        return content
    text = content[: match.start()] + b"}"
    if zlib.crc32(text) != int(match[1], 16):
        raise ChangedError(f"{path} was damaged after it was written: its checksum differs", "write the dump again")
    return text


class _Schema(msgspec.Struct):
    schema: Annotated[int, msgspec.Meta(ge=-1, le=MAX_NUMBER)] = -1


def read_record(folder: Path, name: str, kind: type[AnyRecord]) -> AnyRecord:
    """Read one file, and tell another version from damage before its fields are looked at."""
    path = folder / name
    content = _as_written(_content(folder, name), path)
    try:
        record = msgspec.json.decode(content, type=kind)
        if record.schema == SCHEMA:
            return record
        schema = record.schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        with damage(path):
            schema = msgspec.json.decode(content, type=_Schema).schema
    if schema != SCHEMA:
        schema_text = "no schema number" if schema == -1 else f"schema {schema}"
        raise DumpError(f"{path}: {schema_text}, expected schema {SCHEMA}", "read it with the shardviz that wrote it")
    with damage(path):
        return msgspec.json.decode(_OLD_PHASE.sub(rb'\1"phase":"', content), type=kind)


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Say which file something is wrong with, in one line that a terminal can show."""
    try:
        yield
    except (DumpError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = printable(reason(error))
        shown = what if len(what) <= SHOWN else what[:SHOWN] + "..."
        alternative = "" if path.name in (RUN_FILE, PLAN_FILE) else ", or remove the file to check the other ranks"
        raise DumpError(f"{path} is damaged: {shown}", f"write the dump again{alternative}") from error


def reason(error: Exception) -> str:
    """Return why a file could not be read, as a message says it."""
    match error:
        case DumpError():
            return error.message
        case RecursionError():
            return "lists nested too deeply, expected the fields of a dump"
        case OSError():
            return error.strerror or str(error)
        case _:
            return str(error)


__all__ = ["DumpFiles", "layout_of", "mesh_of", "read_files"]


@dataclass(frozen=True)
class DumpFiles:
    """A dump in memory.

    Attributes:
        ranks: Each rank's record, by rank; those of a plan are made when they are asked for.
        damaged: Ranks whose file could not be read, or whose dense values could not, with the line that says why;
            empty when read strictly.
        changed: Those of them whose file was damaged or replaced after it was written.
        refused: Those of them whose file is a link or no plain file, or may not be opened.
        folder_of: The folders of ranks, if several parts of a dump were read as one.
    """

    path: Path
    run: RunRecord
    ranks: Mapping[int, RankRecord]
    damaged: dict[int, str] = field(default_factory=dict)
    changed: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    folder_of: Mapping[int, Path] = field(default_factory=dict)

    def folder(self, rank: int) -> Path:
        """Return the folder that has a rank's files."""
        return self.folder_of.get(rank, self.path)

    @property
    def planned(self) -> PlannedRanks | None:
        """The ranks of a plan, which nobody ran; None in the dump of a run."""
        ranks: Any = self.ranks
        return ranks if hasattr(ranks, "plan") else None

    def alike(self) -> Iterator[tuple[RankRecord, tuple[int, ...]]]:
        """Yield records with the ranks that did the same in the step: a plan's parts, or each rank."""
        if self.planned is not None:
            yield from self.planned.alike()
        else:
            yield from ((self.ranks[rank], (rank,)) for rank in sorted(self.ranks))

    @cached_property
    def equally_full(self) -> tuple[tuple[int, ...], ...]:
        """Ranks in groups that hold equal amounts of every tensor; outside plans each is alone."""
        if self.planned is not None:
            return tuple(self.planned.equally_full())
        return tuple((rank,) for rank in sorted(self.ranks))

    @cached_property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the run without a readable file."""
        return tuple(rank for rank in range(self.run.num_ranks) if rank not in self.ranks)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh that the run was asked for; one axis `rank` if none was given."""
        if self.run.mesh is None:
            return Mesh(("rank",), (self.run.num_ranks,))
        return mesh_of(self.run.mesh)

    def dense(self, rank: int, key: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Return one array from a rank's safetensors file, mapped rather than copied if it can be.

        Args:
            key: The array's name, `moment/role/name`.
            shape: The shape that it must have.

        Raises:
            DumpError: The file is not there, is not a safetensors file, or has no such array.
        """
        return read_array(plain_file(self.folder(rank), dense_file(rank)), key, shape)


def arrays_of(files: DumpFiles, rank: int) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of a rank's safetensors file that its record names: `moment/role/name`.

    Raises:
        DumpError: The file is not there, is not a safetensors file, or lacks one of them.
    """
    arrays = _dense_arrays(files.ranks[rank])
    return read_arrays(plain_file(files.folder(rank), dense_file(rank)), arrays) if arrays else {}


def read_run(path: Path | str) -> RunRecord:
    """Read the record of a dump's run, and none of its ranks.

    Raises:
        DumpError: The folder is not a dump, or its `run.json` is damaged.
    """
    folder = Path(path)
    _check_folder(folder)
    run = read_record(folder, RUN_FILE, RunRecord)
    if run.mesh is not None:
        run = structs.replace(run, mesh=run.mesh.kept())
    with damage(folder / RUN_FILE):
        check_run(run)
    return run


def read_files(
    path: Path | str,
    *,
    strict: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
    on_first: Callable[[DumpFiles], None] | None = None,
) -> DumpFiles:
    """Read a dump.

    Args:
        strict: Raise on the first damaged rank file; otherwise note it and read the rest.
        on_progress: Called with the number of ranks read and the number of rank files.
        on_first: Called with the dump as the first of several ranks alone shows it, while the others are still unread.

    Raises:
        DumpError: The folder is not a dump, or a file in it is damaged. The message names the file, the field and what
            was expected.

    Example:
        files = read_files("tp_fsdp-2x4.shardviz", strict=False)
        print(files.run.mesh, sorted(files.ranks), files.damaged)
    """
    folder = Path(path)
    run = read_run(folder)
    stamped = StampedShapes(run.stamps)
    if is_plan(folder):
        return DumpFiles(folder, run, _read_plan(folder, run, stamped))
    ranks: dict[int, RankRecord] = {}
    damaged: dict[int, str] = {}
    changed, refused = frozenset[int](), frozenset[int]()
    files = _rank_files(folder)
    with collector_paused():
        for count, (rank, name) in enumerate(files):
            try:
                record = _read_rank(folder, name, run, stamped)
                ranks[record.rank] = record
            except DumpError as error:
                if strict:
                    raise
                damaged.setdefault(rank, error.message)
                changed |= {rank} if isinstance(error, ChangedError) else frozenset()
                refused |= {rank} if isinstance(error, RefusedError) else frozenset()
            if on_first and len(ranks) == 1 and count + 1 < len(files):
                on_first(DumpFiles(folder, run, dict(ranks)))
                on_first = None
            if on_progress:
                on_progress(count + 1, len(files))
    return DumpFiles(folder, run, ranks, damaged, changed, refused)


def ranks_here(folder: Path) -> list[int]:
    """Return the ranks that have a file in a folder."""
    return [rank for rank, _ in _rank_files(folder)]


def is_plan(folder: Path) -> bool:
    """Whether a dump is a plan's."""
    return os.path.lexists(folder / PLAN_FILE)


def _read_plan(folder: Path, run: RunRecord, stamped: StampedShapes) -> PlannedRanks:
    from shardviz.dump.plan import check_plan
    from shardviz.dump.records.files import PlanRecord

    plan: PlanRecord = read_record(folder, PLAN_FILE, PlanRecord)
    if plan.run_id != run.run_id:
        raise DumpError(f"{folder / PLAN_FILE} is from a different run than {RUN_FILE}", "plan again")
    with collector_paused(), damage(folder / PLAN_FILE):
        return check_plan(plan, run, stamped)


def _read_rank(folder: Path, name: str, run: RunRecord, stamped: StampedShapes) -> RankRecord:
    record = read_record(folder, name, RankRecord)
    record = structs.replace(record, meshes=tuple(mesh.kept() for mesh in record.meshes))
    if record.run_id != run.run_id:
        hint = "keep the files of one run in a folder; remove this one to check the other ranks"
        raise ChangedError(f"{folder / name} is from a different run than {RUN_FILE}", hint)
    if rank_file(record.rank) != name:
        hint = "give each rank's file its name again; remove this one to check the other ranks"
        raise ChangedError(f"{folder / name} has what rank {record.rank} wrote", hint)
    with damage(folder / name):
        check_rank(record, run, stamped)
    if arrays := _dense_arrays(record):
        check_arrays(plain_file(folder, dense_file(record.rank)), record.rank, arrays)
    return record


def _dense_arrays(record: RankRecord) -> list[ArrayRequest]:
    """Return the arrays in the file beside a rank's file."""
    dense = {index: body for index, body in enumerate(record.bodies) if body.dense}
    return [
        ArrayRequest(f"{body.moment}/{body.role}/{name}", body.local_shape, body.dtype)
        for tensor in record.tensors
        if (body := dense.get(tensor.body)) is not None
        for name in Fold(tensor.name, tensor.numbers, tensor.suffix).names()
    ]


def _check_folder(folder: Path) -> None:
    if "\0" in str(folder):  # Python's own words for it vary by version
        raise DumpError(f"cannot read dump {_short_name(folder)}: a path cannot have a null byte")
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        raise DumpError(
            f"{_short_name(folder)} does not exist: no dump and no checkpoint is there",
            hint_at_dump(folder),
        ) from None
    except (OSError, ValueError) as error:
        raise DumpError(f"cannot read dump {_short_name(folder)}: {reason(error)}") from error
    if not stat.S_ISDIR(mode) and is_dump(folder.parent):
        raise DumpError(f"{folder} is one file of a dump", f"give its folder: {folder.parent}")
    if not stat.S_ISDIR(mode):
        if folder.suffix == ".py":
            raise DumpError(
                f"{folder} is a Python file, not a dump",
                f"shardviz probe {folder} writes one if it has build(), shardviz run -- python {folder} if it is a job",
            )
        raise DumpError(f"dump {folder} is not a folder", WRITES_ONE)


def _short_name(folder: Path) -> str:
    """Return a folder's name as a message has it: of a very long one the beginning."""
    name = printable(str(folder))
    return name if len(name) <= SHOWN else name[:SHOWN] + "..."


def _rank_files(folder: Path) -> list[tuple[int, str]]:
    """Return the rank files with the ranks that their names say, rising."""
    try:
        numbered = [(int(match[1]), match[0]) for match in map(RANK_FILE.fullmatch, os.listdir(folder)) if match]
    except OSError as error:
        raise DumpError(f"cannot read dump {folder}: {error.strerror}") from error
    return sorted(numbered, key=lambda file: (len(file[1]), file))
