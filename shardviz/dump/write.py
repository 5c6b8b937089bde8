"""Write a dump: each file under a temporary name first and then renamed, so that a killed job leaves no half file."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from shardviz.errors import DumpError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.dump.records import RankRecord, Record, RunRecord

RUN_FILE = "run.json"
SUFFIX = ".shardviz"


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
        DumpError: Something is there and `force` was not given, or it is no dump, or the folder cannot be made.
    """
    check_folder(path, force=force)
    _clear(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DumpError(f"cannot make {path}: {error.strerror}", "choose another folder with -o") from error
    return path


@contextmanager
def replacing_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Give a folder beside `path` to write a dump into; it takes the place of `path` once all went well.

    Whatever happens before that, `path` is left as it was and nothing half-written stays.

    Raises:
        DumpError: As `prepare_folder`, before anything is written.
    """
    check_folder(path, force=force)
    unfinished = prepare_folder(path.with_name(f".{path.name}.{os.getpid()}.tmp"), force=True)
    try:
        yield unfinished
        _clear(path)
        os.replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_folder(path: Path, *, force: bool) -> None:
    """Make sure that a dump can be written to `path`, and change nothing.

    Raises:
        DumpError: Something is there that may not be replaced.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise DumpError(f"{path} exists and is not a folder", "choose another folder with -o")
    if not path.exists() or not any(path.iterdir()):
        return
    own = {*path.glob("rank_*.json"), *path.glob("rank_*.safetensors"), *path.glob(".*.tmp"), path / RUN_FILE}
    if not (path / RUN_FILE).is_file() and not any(path.glob("rank_*.json")):
        raise DumpError(f"{path} exists and is not a dump: it has no {RUN_FILE}", "choose another folder with -o")
    others = sorted(set(path.iterdir()) - own)
    if others:
        raise DumpError(
            f"{path} holds {len(others)} files that are no part of a dump, such as {others[0].name}",
            "move them away, or choose another folder with -o",
        )
    if not force:
        raise DumpError(f"{path} exists", "give --force to replace it, or another folder with -o")


def _clear(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def write_run(folder: Path, record: RunRecord) -> None:
    """Write `run.json`."""
    _write(folder / RUN_FILE, record)


def write_rank(folder: Path, record: RankRecord, dense: Mapping[str, NDArray[np.generic]] | None = None) -> None:
    """Write one rank's file, after the dense values that it refers to.

    Args:
        folder: The dump.
        record: What the rank holds.
        dense: Large values by `stage/role/name`.
    """
    if dense:
        from safetensors.numpy import save_file

        final = folder / dense_file(record.rank)
        temporary = final.with_name(f".{final.name}.tmp")
        save_file(dict(dense), temporary)
        os.replace(temporary, final)
    _write(folder / rank_file(record.rank), record)


def _write(path: Path, record: Record) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(msgspec.json.encode(record) + b"\n")
        os.replace(temporary, path)
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}") from error
