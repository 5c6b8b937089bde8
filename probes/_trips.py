"""Code that the checkpoint probes share: from mesh to mesh, through a checkpoint each time, and home again."""

from __future__ import annotations

import math
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import torch
from torch import distributed

from shardviz.layout.mesh import Mesh
from shardviz.testing.trips.worlds import on_mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    Build = Callable[[DeviceMesh], nn.Module]
    Move = Callable[[nn.Module, Path], object]

NEVER = -1.0
"""What a model has before a load: no id is negative."""


def others(mesh: DeviceMesh) -> list[Mesh]:
    """Return the meshes on the way: the axes' sizes exchanged, all ranks along the first axis, and one rank."""
    axes, shape = mesh.mesh_dim_names or (), tuple(mesh.shape)
    ones = (1,) * (len(shape) - 1)
    shapes = dict.fromkeys((shape[::-1], (math.prod(shape), *ones), (1, *ones)))
    return [Mesh(tuple(axes), sizes) for sizes in shapes]


def there_and_back(model: nn.Module, mesh: DeviceMesh, build: Build, save: Move, load: Move) -> nn.Module:
    """Save a model, load and save it on mesh after mesh, and return what is loaded on its own. Every rank calls this.

    Args:
        build: Returns a new one, sharded on a mesh.
        save: Saves one into a folder.
        load: Loads one from a folder, in place.
    """
    with shared_folder() as folder:
        save(model, step(folder, 0))
        for number, other_mesh in enumerate(others(mesh)):
            with on_mesh(other_mesh) as here:
                if here is not None:
                    passing = spoiled(build(here))
                    load(passing, step(folder, number))
                    save(passing, step(folder, number + 1))
        home = spoiled(build(mesh))
        load(home, step(folder, len(others(mesh))))
        distributed.barrier()
    return home


def step(folder: Path, number: int) -> Path:
    """Return the folder of one checkpoint, made on every rank."""
    path = folder / f"step-{number}"
    path.mkdir(exist_ok=True)
    return path


def spoiled(model: nn.Module) -> nn.Module:
    """Fill a model with what must be gone after a load."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(NEVER)
    return model


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder that is the same on every rank, and remove it."""
    first = distributed.get_rank() == 0
    path_list = [mkdtemp(prefix="shardviz-probe-") if first else ""]
    distributed.broadcast_object_list(path_list)
    try:
        yield Path(path_list[0])
    finally:
        if first:
            shutil.rmtree(path_list[0], ignore_errors=True)
