"""`shardviz mesh` of a mesh with very many groups: what is printed is what costs."""

from __future__ import annotations

import pytest

from shardviz.cli import main
from shardviz.commands.mesh import _first_groups
from shardviz.layout.mesh import Mesh, parse_mesh
from tests.lanes import at_night


@pytest.mark.parametrize("text", ["a=1", "a=2,b=3", "a=3,b=1,c=4", "a=2,b=2,c=2,d=3"])
def test_the_first_groups_are_those_that_come_first_of_all(text: str) -> None:
    mesh = parse_mesh(text)
    turned = Mesh(mesh.axes, mesh.shape, tuple(reversed(mesh.ranks)))
    for one in (mesh, turned):
        for axis in one.axes:
            for most in (1, 5, 100):
                assert _first_groups(one, axis, most) == one.groups(axis)[:most]


@pytest.mark.parametrize("axes", [14, *at_night([20])])
def test_of_very_many_groups_the_first_are_printed(axes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", ",".join(f"a{axis}=2" for axis in range(axes))]) == 0
    out = capsys.readouterr().out
    assert out.count(f"{1 << (axes - 1):,} groups along a") == axes
    assert out.count(f"{(1 << (axes - 1)) - 16:,} more: --all prints them") == axes
