"""Write a dump: each file is renamed once complete, so a killed job leaves no half file; and say which run wrote it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from shardviz.errors import DumpError
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.dump.records.base import Record
    from shardviz.dump.records.files import PlanRecord, RankRecord, RunRecord
    from shardviz.layout.mesh import Mesh

RUN_FILE = "run.json"


class _Sizes(msgspec.Struct):
    """A mesh, as far as it is named in a message."""

    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()


class _Origin(msgspec.Struct):
    """The fields of `run.json` that say where a dump is from."""

    probe: str = ""
    command: tuple[str, ...] = ()
    mesh: _Sizes | None = None


def written_by(path: Path) -> str:
    """Say which probe wrote a dump and on which mesh, if its name alone is ambiguous."""
    origin = _origin(path)
    mesh = origin.mesh or _Sizes()
    sizes = ", ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=False))
    return f": probe {printable(origin.probe)} wrote it on mesh ({printable(sizes)})" if origin.probe else ""


def is_earlier_run(path: Path, probe: str, mesh: Mesh) -> bool:
    """Whether a folder is `shardviz probe`'s dump of the same probe on the same mesh."""
    origin = _origin(path)
    return origin.probe == probe and origin.mesh == _Sizes(mesh.axes, mesh.shape)


def is_earlier_job(path: Path, command: Sequence[str]) -> bool:
    """Whether a folder is `shardviz run`'s dump of the same command."""
    return _origin(path).command == tuple(command)


def _origin(path: Path) -> _Origin:
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode((path / RUN_FILE).read_bytes(), type=_Origin)
    return _Origin()


PLAN_FILE = "plan.json"
SUFFIX = ".shardviz"
RANK_FILE = re.compile(r"rank_([0-9]{5,7})\.json")
_OWN_FILE = re.compile(
    r"(run|plan)\.json|rank_[0-9]{5,7}\.(json|safetensors)|\.(run|plan|rank_[0-9]{5,7})\.(json|safetensors)\.tmp"
)
TRACE_FOLDER = "trace"
"""A folder of a job's dump: what its ranks saw of one step, a dump itself."""
UNSHARDED_FOLDER, MOVED_FOLDER = "unsharded", "moved"
"""Folders of a probe's dump while its ranks wait for the judge: the step of the unsharded model, and in that the same
from weights and batch that were moved by a rounding."""
_ELSEWHERE = "choose another folder with -o"


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.json"


def dense_file(rank: int) -> str:
    """Return the name of the safetensors file beside a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def prepare_folder(path: Path, *, force: bool = False) -> Path:
    """Make an empty folder for a dump.

    Args:
        path: The folder; its parents are made as needed.
        force: Replace what is there, if that is a dump.

    Raises:
        DumpError: Something is there and `force` was not given, or it is not a dump, or the folder cannot be made.
    """
    check_folder(path, force=force)
    with _disk_errors(f"cannot make {path}"):
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def replacing_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a folder next to `path` to write a dump into; it replaces `path` on success.

    Whatever happens before that, `path` is left as it was and nothing half-written stays. Meanwhile no other process
    of this machine is given the same `path`.

    Raises:
        DumpError: As `prepare_folder`, before anything is written; or another process is writing it, or the folder
            cannot take its place.
    """
    path = type(path)(os.path.abspath(path))
    check_folder(path, force=force)
    with _disk_errors(f"cannot make {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        check_folder(path, force=force)  # another process may just have finished
        unfinished = prepare_folder(path.with_name(f".{path.name}.{os.getpid()}.tmp"), force=True)
        try:
            yield unfinished
            with _disk_errors(f"cannot replace {path}"):
                _exchange(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep other processes from writing the dump; the kernel unlocks it when one is killed.

    Raises:
        DumpError: Another one is writing it.
    """
    lock = path.with_name(f".{path.name}.lock")
    with _disk_errors(f"cannot write to {path}"):
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = lock.exists() and lock.stat().st_ino == os.fstat(descriptor).st_ino  # not one just removed
        except BlockingIOError:
            is_ours = False
        except OSError:  # a network's file system that has no locks
            is_ours = True
        if not is_ours:
            raise DumpError(f"another process is writing {path}", f"wait for it, or {_ELSEWHERE}")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _exchange(new: Path, path: Path) -> None:
    """Put a folder in the place of another, which comes back if that fails."""
    old = new.with_suffix(".old")
    if not path.exists():
        os.replace(new, path)
        return
    os.replace(path, old)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(old, path)
        raise
    shutil.rmtree(old)


def check_folder(path: Path, *, force: bool) -> None:
    """Make sure that a dump can be written to `path`, and change nothing.

    Raises:
        DumpError: Something is there that may not be replaced.
    """
    with _disk_errors(f"cannot write to {path}"):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise DumpError(f"{path} exists and is not a folder", _ELSEWHERE)
        there = sorted(path.iterdir()) if path.exists() else []
    if not there:
        return
    if not _is_dump(path):
        raise DumpError(f"{path} exists and is not a dump: it has no {RUN_FILE} of shardviz", _ELSEWHERE)
    others = [entry.name for entry in there if not (_is_own(entry) or _is_trace(entry))]
    if others:
        raise DumpError(
            f"{path} holds {len(others)} files that are not part of a dump, such as {printable(others[0])}",
            f"move them away, or {_ELSEWHERE}",
        )
    if not force:
        raise DumpError(f"{path} exists{written_by(path)}", "give --force to replace it, or another folder with -o")


def _is_own(entry: Path) -> bool:
    return _OWN_FILE.fullmatch(entry.name) is not None and _is_plain(entry)


def _is_trace(path: Path) -> bool:
    """Whether an entry of a dump's folder is the trace of a step, with nothing else in it."""
    is_trace = path.name in (TRACE_FOLDER, UNSHARDED_FOLDER, MOVED_FOLDER)
    is_folder = is_trace and path.is_dir() and not path.is_symlink()
    return is_folder and all(_is_own(inner) or _is_trace(inner) for inner in path.iterdir())


class _Signature(msgspec.Struct):
    """The fields by which shardviz's files are recognized."""

    schema: int
    num_ranks: int


def _is_dump(path: Path) -> bool:
    """Whether a folder has shardviz's `run.json`, or a rank file of a job that was killed early."""
    ranks = sorted(entry for entry in path.glob("rank_*.json") if RANK_FILE.fullmatch(entry.name))
    for candidate in [path / RUN_FILE, *ranks[:1]]:
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if _is_plain(candidate):
                msgspec.json.decode(candidate.read_bytes(), type=_Signature)
                return True
    return False


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def write_run(folder: Path, record: RunRecord) -> None:
    """Write `run.json`.

    Raises:
        DumpError: It cannot be written.
    """
    with _renamed(folder / RUN_FILE) as temporary:
        temporary.write_bytes(_encoded(record))


def write_rank(folder: Path, record: RankRecord, dense: Mapping[str, NDArray[np.generic]] | None = None) -> None:
    """Write one rank's file, after the dense values that it refers to.

    Args:
        record: What the rank holds.
        dense: Large values by `moment/role/name`.

    Raises:
        DumpError: A file cannot be written.
    """
    if dense:
        _write_dense(folder, record.rank, dense)
    meshes: Any = tuple(mesh.in_file() for mesh in record.meshes)
    with _renamed(folder / rank_file(record.rank)) as temporary:
        temporary.write_bytes(_encoded(msgspec.structs.replace(record, meshes=meshes)))


def write_plan(folder: Path, record: PlanRecord) -> None:
    """Write a plan's file, which stands for those of all ranks.

    Raises:
        DumpError: It cannot be written.
    """
    with _renamed(folder / PLAN_FILE) as temporary:
        temporary.write_bytes(_encoded(record))


def _write_dense(folder: Path, rank: int, dense: Mapping[str, NDArray[np.generic]]) -> None:
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    from shardviz.dump.arrays import metadata_of

    path = folder / dense_file(rank)
    # safetensors writes the memory of an array as it lies, whatever its strides (0.8.0, tried).
    contiguous = {key: np.asarray(array, order="C") for key, array in dense.items()}
    try:
        with _renamed(path) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode
            save_file(contiguous, temporary, metadata_of(rank, contiguous))
            with suppress(OSError):  # a file system without modes
                temporary.chmod(mode)  # safetensors makes a file that only its owner can read (0.8.0)
    except SafetensorError as error:
        raise DumpError(f"cannot write {path}: {error}", _ELSEWHERE) from error


def _encoded(record: Record) -> bytes:
    """Return a record as JSON in a line, whose last field is the checksum of what it is without that field."""
    text = msgspec.json.encode(record)
    return b'%b,"crc32":"%08x"}\n' % (text[:-1], zlib.crc32(text))


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to, which becomes `path` once all is written."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _disk_errors(f"cannot write {path}"):
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """Raise an error of the disk as one of shardviz's."""
    try:
        yield
    except OSError as error:
        raise DumpError(f"{what}: {error.strerror or error}", _ELSEWHERE) from error
