"""What a rank is told to run a probe; importable without torch, since the launcher makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.mesh import Mesh

TASK = "shardviz.live.probing:run_probe"


@dataclass(frozen=True)
class ProbeJob:
    """One probe to run.

    Attributes:
        name: The probe's name.
        path: Its file.
        build: The function in it that builds the model.
        mesh: The mesh to run on.
        folder: Where the dump goes.
        command: The command line, for the record.
        values_limit: Local tensors of at most this many elements are written out value by value.
    """

    name: str
    path: Path
    build: str
    mesh: Mesh
    folder: Path
    command: tuple[str, ...]
    values_limit: int
