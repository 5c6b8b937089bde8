"""The files of a probe: modules imported from outside the libraries, each with a stamp.

A rank notes a file as Python looks for it, so that a change during a run is one since. Such modules are always read
from their source: Python takes old bytecode for that of a file of the same size that was saved in the same second.
Nothing here imports torch: the launcher reads the notes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import sysconfig
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType, ModuleType

Stamp = tuple[int, int, int] | None
"""When a file was written, its size and its inode; None if there is no such file."""

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGES = ("site-packages", "dist-packages")


def stamp_of(path: str | Path) -> Stamp:
    """Return what changes when a file is saved."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_library(path: str) -> bool:
    """Whether a file or a folder is one of Python's own, or was installed into it."""
    return path.startswith(_LIBRARIES) or any(part in _PACKAGES for part in Path(path).parts)


@contextmanager
def noting(notes: Path | None, *, writes: bool) -> Iterator[None]:
    """Note the files of the modules that are imported meanwhile, and read these from source.

    Args:
        notes: The file that gets a line for each; None if nobody watches.
    """
    if notes is None:
        yield
        return
    finder = _NotingFinder(notes if writes else None)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def read_notes(notes: Path) -> dict[Path, Stamp]:
    """Return the files that were noted so far, with their first stamps."""
    stamps: dict[Path, Stamp] = {}
    with suppress(OSError):
        for line in notes.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be half written
                path, stamp = json.loads(line)
                stamps.setdefault(Path(path), tuple(stamp) if stamp else None)
    return stamps


class SourceLoader(SourceFileLoader):
    """Loads a module from its source, whatever bytecode there is of it."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the source."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_file(path: Path, name: str) -> ModuleType:
    """Run a file as a module of a name, which can import the files beside it."""
    # Not from bytecode: it would be that of an earlier text which has the same size and was saved in the same second.
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


class _NotingFinder(MetaPathFinder):
    """Ask the other finders, and note where they find or could have found a user's module."""

    def __init__(self, notes: Path | None) -> None:
        self._notes = notes
        self._known: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is None:
            self._note(_places(fullname, path))
        elif spec.origin and spec.has_location and not is_library(spec.origin):
            self._note([spec.origin])
            if type(spec.loader) is SourceFileLoader:
                spec.loader = SourceLoader(fullname, spec.origin)
        return spec

    def _note(self, files: Sequence[str]) -> None:
        new = [file for file in map(os.path.abspath, files) if file not in self._known]
        self._known.update(new)
        if self._notes is not None and new:
            with self._notes.open("a", encoding="utf-8") as notes:
                notes.writelines(json.dumps([file, stamp_of(file)]) + "\n" for file in new)


def _places(fullname: str, path: Sequence[str] | None) -> list[str]:
    """Return the files that would be a module which is not there yet."""
    last = fullname.rpartition(".")[2]
    folders = [folder for folder in (sys.path if path is None else path) if not is_library(os.path.abspath(folder))]
    ends = (f"{last}.py", os.path.join(last, "__init__.py"))
    return [os.path.join(folder, end) for folder in folders if os.path.isdir(folder or ".") for end in ends]
