"""Smaller worlds within a job: its first ranks work as if alone while the others wait."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardviz.errors import MeshError
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.live.capture.agreement import of_all_ranks, together
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.compat.worlds import count_groups, world_of
from shardviz.testing.assertions.subjects import current_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

AnyMesh = DeviceMesh | Mesh | Mapping[str, int] | str


def mesh_of(mesh_given: AnyMesh) -> Mesh:
    """Return a mesh as axes and sizes.

    Raises:
        MeshError: It is not a mesh, has more ranks than the job, or is a device mesh of other ranks than the first.
    """
    if isinstance(mesh_given, DeviceMesh):
        mesh = plain_mesh(mesh_given)
    elif isinstance(mesh_given, Mapping):
        mesh = Mesh(tuple(mesh_given), tuple(mesh_given.values()))
    else:
        mesh = parse_mesh(mesh_given) if isinstance(mesh_given, str) else mesh_given
    size = distributed.get_world_size()
    if mesh.size > size:
        raise MeshError(
            f"mesh {mesh} has {mesh.size} ranks, this job has {size}",
            f"run the test on {mesh.size} ranks, or choose a smaller mesh: meshes of fewer ranks use the first ones",
        )
    if sorted(mesh.ranks) != list(range(mesh.size)):
        raise MeshError(f"mesh {mesh} is of ranks {list(mesh.ranks)}, not of the first {mesh.size}")
    return mesh


@contextmanager
def on_mesh(mesh_given: AnyMesh) -> Iterator[DeviceMesh | None]:
    """Yield a mesh in a world of its ranks only; None on other ranks. Every rank calls this.

    Within it the world's size is the mesh's, so that code which never heard of a larger job runs as in one of that
    size.

    Raises:
        MeshError: As `mesh_of`.
    """
    mesh = mesh_of(mesh_given)
    if mesh.size == distributed.get_world_size():
        with _as_current(mesh_given if isinstance(mesh_given, DeviceMesh) else _device_mesh(mesh)) as whole:
            yield whole
        return
    group = distributed.new_group(list(range(mesh.size)))
    if distributed.get_rank() < mesh.size:
        with world_of(group), together(), _as_current(_device_mesh(mesh)) as mesh_here:
            yield mesh_here
    else:
        yield None
    count_groups(max(of_all_ranks(count_groups())))


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    kind = "cuda" if "nccl" in distributed.get_backend() else "cpu"
    return init_device_mesh(kind, mesh.shape, mesh_dim_names=mesh.axes)


@contextmanager
def _as_current(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Let assertions take this mesh for the test's."""
    token = current_mesh.set(mesh)
    try:
        yield mesh
    finally:
        current_mesh.reset(token)
