"""Which dump somebody may have meant who named a path that is not one."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from shardviz.dump.write import RANK_FILE, RUN_FILE, SUFFIX
from shardviz.errors import DumpError, NoDumpError
from shardviz.text import listed, nearest, printable

if TYPE_CHECKING:
    from pathlib import Path

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
