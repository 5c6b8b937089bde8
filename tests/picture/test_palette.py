"""Colours of ranks: which ranks look different, and that nothing else has the colour of what is wrong."""

from __future__ import annotations

import pytest

from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.picture.model.palette import RANK_COLOURS, VERMILLION, rank_colour
from shardviz.tui.colours import rank_style

MESHES = [
    *(parse_mesh(text) for text in ("1", "5", "2,4", "8,8", "2,7", "7,7", "3,14,2", "15,15", "4,28", "2,1,3,7,2")),
    Mesh(("pp",), (2,), (1, 0)),
    Mesh(("dp", "tp"), (2, 7), tuple(reversed(range(10, 24)))),
    Mesh(("dp", "tp"), (3, 3), (4, 8, 1, 0, 7, 2, 6, 3, 5)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_fewer_than_seven_steps_apart_along_an_axis_differ_on_every_mesh(mesh: Mesh) -> None:
    for axis in mesh.axes:
        for group in mesh.groups(axis):
            for first in range(len(group)):
                near = [rank_colour(rank, mesh) for rank in group[first : first + len(RANK_COLOURS)]]
                assert len(set(near)) == len(near), (axis, group)


@pytest.mark.parametrize("step", range(1, 65))
def test_without_a_mesh_ranks_differ_whose_distance_is_no_multiple_of_the_palette(step: int) -> None:
    alike = [rank_colour(rank) == rank_colour(rank + step) for rank in range(64)]
    assert set(alike) == {step % len(RANK_COLOURS) == 0}


@pytest.mark.parametrize("mesh", ["7", "2,4", "8,8", "2,2,2", "4,15"])
def test_a_rank_has_the_same_colour_on_its_mesh_and_on_a_part_of_it(mesh: str) -> None:
    whole = parse_mesh(mesh)
    assert [rank_colour(rank, whole) for rank in whole.ranks] == [rank_colour(rank) for rank in whole.ranks]
    for group in whole.groups(whole.axes[0]):
        part = Mesh(("part",), (len(group),), group)
        assert [rank_colour(rank, part) for rank in group] == [rank_colour(rank, whole) for rank in group]


def test_no_rank_has_the_colour_of_what_is_wrong() -> None:
    assert VERMILLION not in RANK_COLOURS
    assert len(set(RANK_COLOURS)) == len(RANK_COLOURS)


def test_the_viewer_has_the_same_palette() -> None:
    whole = [rank_style(colour, "#000000", 1.0).bgcolor.name for colour in range(len(RANK_COLOURS))]
    assert [name.lower() for name in whole] == list(RANK_COLOURS)
