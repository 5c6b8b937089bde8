"""Which process group a rank waits in, read from the local variables of its Python frames.

The rank answers this itself, in the thread that listens to the launcher: collectives let other threads run while they
wait. A rank in a collective that does not cannot answer, and is reported without the axis.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

PATIENCE = 1.0
"""Seconds that ranks have to answer."""
_MESHES = ("mesh", "device_mesh")
_MESH_DIMS = ("mesh_dim", "i")
"""The names that torch's redistribution has for its mesh and the axis that it has reached."""


def write(folder: Path, rank: int) -> None:
    """Write down the ranks of the group that this process's main thread waits in."""
    ranks = _group_ranks(sys._current_frames().get(threading.main_thread().ident or 0))
    file = _path(folder, rank)
    file.with_suffix(".tmp").write_text(json.dumps(ranks))
    file.with_suffix(".tmp").rename(file)


def read(folder: Path, ranks: Collection[int]) -> dict[int, list[int]]:
    """Return the group that each of `ranks` wrote down; an empty list if it waits in none."""
    deadline = time.monotonic() + PATIENCE
    files = {rank: _path(folder, rank) for rank in ranks}
    while time.monotonic() < deadline and not all(file.exists() for file in files.values()):
        time.sleep(0.02)
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def axes_text(group: Collection[int], coords: Sequence[str]) -> str:
    """Name the axes along which a group's ranks differ: "over tp"; empty if unknown.

    Args:
        group: Global ranks.
        coords: A label for every rank, "fsdp=1, tp=0"; without labels nothing can be named.
    """
    if not group or not all(rank < len(coords) for rank in group):
        return ""
    parts = [coords[rank].split(", ") for rank in group]
    axes = [of_axis[0].partition("=")[0] for of_axis in zip(*parts, strict=True) if len(set(of_axis)) > 1]
    if len(axes) > 1 and len(group) == len(coords):
        return "over all ranks"
    return f"over {' and '.join(axes)}" if axes else ""


def _path(folder: Path, rank: int) -> Path:
    return folder / f"groups_{rank:05d}.json"


def _group_ranks(frame: FrameType | None) -> list[int]:
    """Return the ranks of the innermost group that a stack has to do with; empty if it has none."""
    torch = sys.modules.get("torch.distributed")  # never imported here: a rank may be at it in its own thread
    if torch is None or not hasattr(torch, "get_process_group_ranks"):
        return []
    for group in _groups(frame, torch.ProcessGroup):
        with suppress(Exception):  # it may be destroyed
            return [int(rank) for rank in torch.get_process_group_ranks(group)]
    return []


def _groups(frame: FrameType | None, kind: type) -> Iterator[Any]:
    while frame is not None:
        if "/torch/distributed/" in frame.f_code.co_filename:
            variables = frame.f_locals
            yield from (value for value in variables.values() if isinstance(value, kind))
            mesh = next((variables[name] for name in _MESHES if hasattr(variables.get(name), "get_group")), None)
            dim = next((variables[name] for name in _MESH_DIMS if isinstance(variables.get(name), int)), None)
            if mesh is not None and (dim is not None or mesh.ndim == 1):
                with suppress(Exception):
                    yield mesh.get_group(dim or 0)
        frame = frame.f_back
