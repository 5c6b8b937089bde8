"""The target of a stamped copy: only another copy is replaced, and only when all is written.

A copy is known by a mark: in the metadata of each safetensors file, in a file of its own in a DCP folder.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.formats.headers import LENGTH_BYTES, MAX_HEADER
from shardviz.errors import DumpError
from shardviz.stamping.fill import VERSION
from shardviz.text import bytes_text, printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SAFETENSORS = ".safetensors"

MARK = "shardviz"
"""The key in a file's metadata by which a stamped copy is known."""

MARK_FILE = ".shardviz_stamped"
"""The file by which a stamped DCP folder is known."""

STAMPED = f"stamped {VERSION}"


def is_stamped(path: Path) -> bool:
    """Whether a DCP folder, a safetensors file, or every one of a folder, is a stamped copy."""
    if (path / MARK_FILE).is_file():
        with (path / MARK_FILE).open(errors="replace") as file:
            return file.read(2 * len(STAMPED)).strip() == STAMPED
    files = sorted(path.glob(f"*{SAFETENSORS}")) if path.is_dir() else [path]
    marks = [header_of(file).get("__metadata__") for file in files if file.is_file()]
    return bool(marks) and all(isinstance(mark, dict) and mark.get(MARK) == STAMPED for mark in marks)


def header_of(path: Path) -> dict[str, Any]:
    """Return the header of any file; empty if it has no readable one."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            return json_object(file.read(length)) if length <= MAX_HEADER else {}
    except OSError:
        return {}


def json_object(text: bytes) -> dict[str, Any]:
    """Return a JSON object; empty if the text is not one."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def replacing(target: Path, nbytes: int, *, is_folder: bool, force: bool) -> Iterator[Path]:
    """Give a path beside `target` to write to, which takes its place once all went well.

    Raises:
        DumpError: Something is there that may not be replaced, there is too little room, or it cannot be written.
    """
    target = type(target)(os.path.abspath(target))
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        _refuse_existing(target, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if nbytes > free:
            message = f"{target} takes {bytes_text(nbytes)}, and {target.parent} has {bytes_text(free)} left"
            raise DumpError(message, "give a folder on another disk with -o")
        if is_folder:
            unfinished.mkdir()
        yield unfinished
        _remove(target)
        os.replace(unfinished, target)
    except OSError as error:
        raise DumpError(f"cannot write {target}: {error.strerror or error}", "choose another place with -o") from error
    finally:
        with suppress(OSError):
            _remove(unfinished)


def _refuse_existing(target: Path, *, force: bool) -> None:
    if not (target.exists() or target.is_symlink()) or (target.is_dir() and not any(target.iterdir())):
        return
    if target.is_symlink() or not is_stamped(target):
        raise DumpError(
            f"{printable(str(target))} exists and is not a stamped copy: its weights would be lost",
            "choose another place with -o",
        )
    if not force:
        raise DumpError(f"{printable(str(target))} exists", "give --force to replace it, or another place with -o")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
