"""Which tests run on ranks: `@spmd(mesh=...)`, and the marker `mesh` that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.errors import MeshError
from shardviz.layout.mesh import Mesh, parse_mesh, unnamed_axes
from shardviz.text import counted

if TYPE_CHECKING:
    import pytest

    from shardviz.live.world.starting import Method

MARK = "mesh"


@dataclass(frozen=True, slots=True)
class SpmdMark:
    """How a test is to run on ranks: mesh, timeout, launch method and backend.

    Attributes:
        mesh: The mesh whose ranks run it.
        timeout: Seconds that it may take; None for `--shardviz-timeout`.
        launch: How ranks are started; None for `--shardviz-launch`.
        backend: A process group backend; None for gloo.
    """

    mesh: Mesh
    timeout: float | None = None
    launch: Method | None = None
    backend: str | None = None


def spmd(
    mesh: Mapping[str, int] | Sequence[int] | str,
    *,
    timeout: float | None = None,
    launch: Method | None = None,
    backend: str | None = None,
) -> pytest.MarkDecorator:
    """Run a test, or every test of a class, on each rank of a mesh.

    The test may take `mesh`, which is the `DeviceMesh`. Other arguments are made once, in pytest's own process, and
    are sent to every rank. The same as `pytest.mark.mesh(fsdp=2, tp=4)`, with room for more than the mesh.

    Args:
        mesh: Sizes by axis, outermost first: `{"fsdp": 2, "tp": 4}` or `"fsdp=2,tp=4"`. The axes of `(2, 4)` are
            called `dim0` and `dim1`.
        timeout: Seconds that the test may take on the ranks.
        launch: "fork" or "spawn".
        backend: "gloo", the default, or "nccl", which takes a GPU for each rank, ...

    Raises:
        MeshError: That is not a mesh.
    """
    import pytest

    return pytest.mark.mesh(SpmdMark(_mesh(mesh), timeout, launch, backend))


def spmd_of(item: pytest.Item) -> SpmdMark | None:
    """Return how a test wants to be run by the marker nearest to it; None if it has none.

    Raises:
        MeshError: The marker's arguments are not a mesh, or give two.
    """
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return None
    if sum(one.name == MARK for one in item.own_markers) > 1:
        raise MeshError(f"{item.name} is marked with more than one mesh", "keep one: a test runs on one mesh")
    if len(mark.args) + bool(mark.kwargs) != 1:
        raise MeshError(f"the marker of {item.name} names no mesh", "write pytest.mark.mesh(fsdp=2, tp=4)")
    (argument,) = mark.args or (mark.kwargs,)
    return argument if isinstance(argument, SpmdMark) else SpmdMark(_mesh(argument))


def _mesh(argument: Any) -> Mesh:
    if isinstance(argument, str):
        return parse_mesh(argument)
    if isinstance(argument, Sequence) and argument and all(isinstance(size, int) for size in argument):
        return Mesh(unnamed_axes(len(argument)), tuple(argument))
    if not isinstance(argument, Mapping) or not all(isinstance(size, int) for size in argument.values()):
        raise MeshError(f"the mesh {argument!r} names no axes", 'write {"fsdp": 2, "tp": 4} or "fsdp=2,tp=4"')
    return Mesh(tuple(argument), tuple(argument.values()))


def check_item(item: pytest.Item) -> None:
    """Fail or skip a marked test that cannot run on ranks."""
    import unittest

    import pytest

    __tracebackhide__ = True
    spmd, wrong = None, ""
    try:
        spmd = spmd_of(item)
    except MeshError as error:
        wrong = str(error)
    if spmd is None:
        pytest.fail(wrong, pytrace=False)
    if not isinstance(item, pytest.Function):
        pytest.fail(
            f"{item.name} is marked with a mesh, but only functions and methods of plain classes run on ranks\n"
            "Hint: make the test a function",
            pytrace=False,
        )
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        kind = item.cls.__name__
        pytest.fail(
            f"{kind}.{item.name} is a method of a unittest.TestCase, which cannot run on ranks\n"
            f"Hint: let {kind} be a plain class, with setup_method for setUp and assert for self.assertEqual",
            pytrace=False,
        )
    limit = item.config.getoption("shardviz_ranks")
    if limit is not None and spmd.mesh.size > limit:
        pytest.skip(f"mesh {spmd.mesh} has {counted(spmd.mesh.size, 'rank')}, --shardviz-ranks allows {limit}")
