"""Where a dump is from: the probe and the mesh, or the job's command, that its `run.json` names."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
