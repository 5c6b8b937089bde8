"""Read a dump that may come from another machine: every number is checked before anything is built from it.

Nothing is unpickled, no path out of the folder is followed, and no size in a file makes the reader allocate more than
the file itself is long.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from shardviz.dump import nearby
from shardviz.dump.arrays.dense import Wanted, check_arrays, read_array, read_arrays
from shardviz.dump.pause import collector_paused
from shardviz.dump.records.base import DIGEST_LENGTH, MAX_NUMBER, SCHEMA
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.validate import StampedShapes, check_rank, check_run, layout_of, mesh_of
from shardviz.dump.write import PLAN_FILE, RANK_FILE, RUN_FILE, dense_file, rank_file
from shardviz.errors import DumpError
from shardviz.layout.mesh import Mesh
from shardviz.text import Fold, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.plan.ranks import PlannedRanks
    from shardviz.plan.records import PlanRecord

__all__ = ["DIGEST_LENGTH", "DumpFiles", "layout_of", "mesh_of", "read_files"]

MAX_FILE = 1 << 30
"""Bytes of a JSON file: a dump of 1,024 ranks has 32 MB in all, and large values lie beside it."""

SHOWN = 300
"""How many characters a message shows of the reason why a file is damaged."""

_PERMISSIONS = "change the permissions of the dump's folder and its files"
_ELSEWHERE = "write fewer values into it: shardviz probe --values, or values_limit"

AnyRecord = TypeVar("AnyRecord", "RunRecord", "RankRecord", "PlanRecord")


@dataclass(frozen=True)
class DumpFiles:
    """A dump in memory.

    Attributes:
        path: Its folder.
        run: What is true of the whole run.
        ranks: Each rank's record, by rank; those of a plan are made when they are asked for.
        damaged: Ranks whose file could not be read, or whose dense values could not, with the line that says why;
            empty when read strictly.
    """

    path: Path
    run: RunRecord
    ranks: Mapping[int, RankRecord]
    damaged: dict[int, str] = field(default_factory=dict)

    @property
    def planned(self) -> PlannedRanks | None:
        """The ranks of a plan, which nobody ran; None in the dump of a run."""
        ranks: Any = self.ranks
        return ranks if hasattr(ranks, "plan") else None

    def alike(self) -> Iterator[tuple[RankRecord, tuple[int, ...]]]:
        """Yield records with the ranks that did the same in the step: those of a plan's parts, else each by itself."""
        if self.planned is not None:
            yield from self.planned.alike()
        else:
            yield from ((self.ranks[rank], (rank,)) for rank in sorted(self.ranks))

    @cached_property
    def equally_full(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in groups that hold as much of every tensor: those of a plan are few, else each rank is alone."""
        if self.planned is not None:
            return tuple(self.planned.equally_full())
        return tuple((rank,) for rank in sorted(self.ranks))

    @cached_property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the run without a readable file."""
        return tuple(rank for rank in range(self.run.num_ranks) if rank not in self.ranks)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh that the run was asked for; one axis `rank` where none was given."""
        if self.run.mesh is None:
            return Mesh(("rank",), (self.run.num_ranks,))
        return mesh_of(self.run.mesh)

    def dense(self, rank: int, key: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Return one array from a rank's safetensors file, mapped rather than copied where it can be.

        Args:
            rank: Whose file.
            key: The array's name, `moment/role/name`.
            shape: The shape that it must have.

        Raises:
            DumpError: The file is not there, is not a safetensors file, or has no such array.
        """
        return read_array(_inside(self.path, dense_file(rank)), key, shape)


def arrays_of(files: DumpFiles, rank: int) -> dict[str, NDArray[np.generic]]:
    """Return all arrays of a rank's safetensors file that its record names, by `moment/role/name`.

    Raises:
        DumpError: The file is not there, is not a safetensors file, or lacks one of them.
    """
    wanted = _dense_arrays(files.ranks[rank])
    return read_arrays(_inside(files.path, dense_file(rank)), wanted) if wanted else {}


def read_run(path: Path | str) -> RunRecord:
    """Read the record of a dump's run, and none of its ranks.

    Raises:
        DumpError: The folder is not a dump, or its `run.json` is damaged.
    """
    folder = Path(path)
    _check_folder(folder)
    run = _read(folder, RUN_FILE, RunRecord)
    with _damage(folder / RUN_FILE):
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
        path: The dump's folder.
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
            if on_first and len(ranks) == 1 and count + 1 < len(files):
                on_first(DumpFiles(folder, run, dict(ranks)))
                on_first = None
            if on_progress:
                on_progress(count + 1, len(files))
    return DumpFiles(folder, run, ranks, damaged)


def is_plan(folder: Path) -> bool:
    """Whether a dump is a plan's."""
    return os.path.lexists(folder / PLAN_FILE)


def _read_plan(folder: Path, run: RunRecord, stamped: StampedShapes) -> PlannedRanks:
    from shardviz.plan.read import check_plan
    from shardviz.plan.records import PlanRecord

    plan: PlanRecord = _read(folder, PLAN_FILE, PlanRecord)
    if plan.run_id != run.run_id:
        raise DumpError(f"{folder / PLAN_FILE} is of another run than {RUN_FILE}", "plan again")
    with collector_paused(), _damage(folder / PLAN_FILE):
        return check_plan(plan, run, stamped)


def _read_rank(folder: Path, name: str, run: RunRecord, stamped: StampedShapes) -> RankRecord:
    record = _read(folder, name, RankRecord)
    if record.run_id != run.run_id:
        hint = "keep the files of one run in a folder; remove this one to check the other ranks"
        raise DumpError(f"{folder / name} is of another run than {RUN_FILE}", hint)
    with _damage(folder / name):
        if rank_file(record.rank) != name:
            raise DumpError(f"rank is {record.rank}, expected the rank in the file's name")
        check_rank(record, run, stamped)
    if wanted := _dense_arrays(record):
        check_arrays(_inside(folder, dense_file(record.rank)), wanted)
    return record


def _dense_arrays(record: RankRecord) -> list[Wanted]:
    """Return the arrays in the file beside a rank's file."""
    dense = {index: body for index, body in enumerate(record.bodies) if body.dense}
    return [
        Wanted(f"{body.moment}/{body.role}/{name}", body.local_shape, body.dtype)
        for tensor in record.tensors
        if (body := dense.get(tensor.body)) is not None
        for name in Fold(tensor.name, tensor.numbers, tensor.suffix).names()
    ]


def _check_folder(folder: Path) -> None:
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        raise DumpError(
            f"{_named(folder)} does not exist: no dump and no checkpoint is there", nearby.meant(folder)
        ) from None
    except (OSError, ValueError) as error:
        raise DumpError(f"cannot read dump {_named(folder)}: {_reason(error)}") from error
    if not stat.S_ISDIR(mode) and nearby.is_dump(folder.parent):
        raise DumpError(f"{folder} is one file of a dump", f"give its folder: {folder.parent}")
    if not stat.S_ISDIR(mode):
        hint = f"shardviz probe {folder} writes one" if folder.suffix == ".py" else nearby.WRITES_ONE
        raise DumpError(f"dump {folder} is not a folder", hint)


def _named(folder: Path) -> str:
    """Return a folder's name as a message has it: of a very long one the beginning."""
    name = printable(str(folder))
    return name if len(name) <= SHOWN else name[:SHOWN] + "..."


def _rank_files(folder: Path) -> list[tuple[int, str]]:
    """Return the rank files with the ranks that their names say, rising."""
    try:
        found = [(int(match[1]), match[0]) for match in map(RANK_FILE.fullmatch, os.listdir(folder)) if match]
    except OSError as error:
        raise DumpError(f"cannot read dump {folder}: {error.strerror}") from error
    return sorted(found, key=lambda file: (len(file[1]), file))


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    try:
        is_link, is_other = path.is_symlink(), path.exists() and not path.is_file()
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}", _PERMISSIONS) from error
    if is_link:
        raise DumpError(f"{path} is a link", "a dump's files are plain files; copy the target here")
    if is_other:
        raise DumpError(f"{path} is not a plain file", "remove it, or write the dump again")
    return path


def _content(folder: Path, name: str) -> bytes:
    path = _inside(folder, name)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= MAX_FILE:
                return file.read(size)
        raise DumpError(f"{path} is {size:,} bytes, more than the {MAX_FILE:,} that are read", _ELSEWHERE)
    except FileNotFoundError:
        hint = nearby.inside(folder) if name == RUN_FILE else "write the dump again"
        raise DumpError(f"{folder} is not a dump: it has no {name}", hint) from None
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error


class _Schema(msgspec.Struct):
    schema: Annotated[int, msgspec.Meta(ge=-1, le=MAX_NUMBER)] = -1


def _read(folder: Path, name: str, kind: type[AnyRecord]) -> AnyRecord:
    """Read one file, and tell another version from damage before its fields are looked at."""
    content, path = _content(folder, name), folder / name
    try:
        record = msgspec.json.decode(content, type=kind)
        if record.schema == SCHEMA:
            return record
        schema = record.schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        with _damage(path):
            schema = msgspec.json.decode(content, type=_Schema).schema
    if schema != SCHEMA:
        found = "no schema number" if schema == -1 else f"schema {schema}"
        raise DumpError(f"{path}: {found}, expected schema {SCHEMA}", "read it with the shardviz that wrote it")
    with _damage(path):
        return msgspec.json.decode(content, type=kind)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Say which file something is wrong with, in one line that a terminal can show."""
    try:
        yield
    except (DumpError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = printable(_reason(error))
        shown = what if len(what) <= SHOWN else what[:SHOWN] + "..."
        other = "" if path.name in (RUN_FILE, PLAN_FILE) else ", or remove the file to check the other ranks"
        raise DumpError(f"{path} is damaged: {shown}", f"write the dump again{other}") from error


def _reason(error: Exception) -> str:
    match error:
        case DumpError():
            return error.message
        case RecursionError():
            return "lists within lists without end, expected the fields of a dump"
        case OSError():
            return error.strerror or str(error)
        case _:
            return str(error)
