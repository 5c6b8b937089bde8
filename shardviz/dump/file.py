"""Read one file of a dump as a record, schema first, and name in one line what is wrong, or which dump was meant."""

from __future__ import annotations

import os
import re
import stat
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from shardviz.dump.records.base import MAX_NUMBER, SCHEMA
from shardviz.dump.write import PLAN_FILE, RANK_FILE, RUN_FILE, SUFFIX
from shardviz.errors import ChangedError, DumpError, NoDumpError
from shardviz.text import listed, nearest, printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardviz.dump.records.files import PlanRecord, RankRecord, RunRecord

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
        raise DumpError(f"cannot read {path}: {error.strerror}", _PERMISSIONS) from error
    if stat.S_ISLNK(mode):
        raise DumpError(f"{path} is a link", "a dump's files are plain files; copy the target here")
    if not stat.S_ISREG(mode):
        raise DumpError(f"{path} is not a plain file", "remove it, or write the dump again")
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
