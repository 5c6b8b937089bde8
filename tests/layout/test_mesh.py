"""The mesh: what a user may write, what each mistake is told, and that ranks and coordinates agree."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.errors import MeshError
from shardviz.layout.mesh import Mesh, parse_mesh
from tests.layout.layouts import meshes

if TYPE_CHECKING:
    from random import Random


@pytest.mark.parametrize(
    ("text", "axes", "shape"),
    [
        ("2,4", ("dim0", "dim1"), (2, 4)),
        ("2x4", ("dim0", "dim1"), (2, 4)),
        (" 2, 4 ", ("dim0", "dim1"), (2, 4)),
        ("2 x 4", ("dim0", "dim1"), (2, 4)),
        ("8", ("dim0",), (8,)),
        ("fsdp=2,tp=4", ("fsdp", "tp"), (2, 4)),
        ("fsdp = 2, tp = 4", ("fsdp", "tp"), (2, 4)),
        ("x=2,mx=4", ("x", "mx"), (2, 4)),
        ("x=2", ("x",), (2,)),
        ("1,1,1,1,1", ("dim0", "dim1", "dim2", "dim3", "dim4"), (1, 1, 1, 1, 1)),
        ("0008", ("dim0",), (8,)),
    ],
)
def test_a_mesh_is_read_in_every_form(text: str, axes: tuple[str, ...], shape: tuple[int, ...]):
    assert parse_mesh(text) == Mesh(axes, shape, tuple(range(np.prod(shape))))


def test_sizes_without_names_take_the_names_that_a_probe_gives():
    assert parse_mesh("2,4", ("fsdp", "tp")) == Mesh(("fsdp", "tp"), (2, 4))
    assert parse_mesh("a=2,b=4", ("fsdp", "tp")) == Mesh(("a", "b"), (2, 4))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "mesh '': '' is not a size", "write it as 2,4 or fsdp=2,tp=4"),
        ("2,", "mesh '2,': '' is not a size", "write it as 2,4 or fsdp=2,tp=4"),
        ("2x", "mesh '2x': '' is not a size", "write it as 2,4 or fsdp=2,tp=4"),
        ("two", "mesh 'two': 'two' is not a size", "write it as 2,4 or fsdp=2,tp=4"),
        ("-2,4", "mesh '-2,4': '-2' is not a size", "write it as 2,4 or fsdp=2,tp=4"),
        ("2.0", "mesh '2.0': '2.0' is not a size", "write it as 2,4 or fsdp=2,tp=4"),
        ("٢,4", "mesh '٢,4': '٢' is not a size", "write it as 2,4 or fsdp=2,tp=4"),
        ("fsdp=2xtp=4", "mesh axis 'fsdp=2xtp' is not a name", "letters, digits and _ only, as in fsdp=2,tp=4"),
        ("0,4", "mesh axis dim0 has size 0", "every axis needs at least one rank"),
        ("tp=0", "mesh axis tp has size 0", "every axis needs at least one rank"),
        ("tp=2,tp=4", "mesh axis tp is named 2 times", "name each axis once"),
        ("fsdp=2,4", "mesh 'fsdp=2,4' names 1 of its 2 axes", "name all of them or none"),
        ("=2", "mesh axis '' is not a name", "letters, digits and _ only, as in fsdp=2,tp=4"),
        ("a-b=2", "mesh axis 'a-b' is not a name", "letters, digits and _ only, as in fsdp=2,tp=4"),
        ("1048577", "mesh (dim0=1048577) has more than 1,048,576 ranks", ""),
        ("1024,2048", "mesh (dim0=1024, dim1=2048) has more than 1,048,576 ranks", ""),
        ("999999999", "mesh '999999999' has more than 1,048,576 ranks", ""),
        ("9" * 30, f"mesh '{'9' * 30}' has more than 1,048,576 ranks", ""),
        (",".join("1" * 33), "mesh has 33 axes, more than 32", ""),
    ],
)
def test_every_mistake_is_reported_in_one_line(text: str, message: str, hint: str):
    with pytest.raises(MeshError) as caught:
        parse_mesh(text)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("8", "mesh '8' has 1 size for 2 axes: fsdp, tp", "give one size per axis, as in fsdp=8,tp=2"),
        ("2,4,2", "mesh '2,4,2' has 3 sizes for 2 axes: fsdp, tp", "give one size per axis, as in fsdp=2,tp=4"),
    ],
)
def test_the_hint_for_a_wrong_number_of_sizes_keeps_those_that_were_given(text: str, message: str, hint: str):
    with pytest.raises(MeshError) as caught:
        parse_mesh(text, ("fsdp", "tp"))
    assert (caught.value.message, caught.value.hint) == (message, hint)


@given(st.text(st.sampled_from("0123456789,x= atp²-"), max_size=12) | st.text(max_size=12))
def test_any_text_is_a_mesh_or_a_mesh_error(text: str):
    try:
        mesh = parse_mesh(text)
    except MeshError:
        return
    assert 1 <= mesh.size == len(mesh.ranks)


def test_a_giant_mesh_is_refused_before_its_ranks_are_laid_out():
    started = time.process_time()
    for text in ("1048576,1048576", "x".join(["1000000"] * 30), "9" * 100_000):
        with pytest.raises(MeshError):
            parse_mesh(text)
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 1, 2), "mesh has 2 * 2 = 4 places but 3 ranks"),
        ((0, 1, 2, 2), "mesh names rank 2 more than once"),
        ((0, 1, 2, -1), "mesh names rank -1"),
    ],
)
def test_ranks_fill_the_mesh_once_each(ranks: tuple[int, ...], message: str):
    with pytest.raises(MeshError) as caught:
        Mesh(("fsdp", "tp"), (2, 2), ranks)
    assert caught.value.message == message


def test_a_size_without_an_axis_is_refused():
    with pytest.raises(MeshError) as caught:
        Mesh(("fsdp",), (2, 2))
    assert caught.value.message == "mesh has 2 sizes but 1 axis names"


def test_an_axis_that_is_not_there_is_reported_with_those_that_are():
    with pytest.raises(MeshError) as caught:
        parse_mesh("fsdp=2,tp=4").axis_index("pp")
    assert caught.value.message == "mesh (fsdp=2, tp=4) has no axis 'pp'"
    assert caught.value.hint == "its axes are fsdp, tp"


def test_an_axis_of_a_mesh_without_names_is_reported_how_to_get_one() -> None:
    with pytest.raises(MeshError) as caught:
        parse_mesh("2,4").axis_index("tp")
    assert caught.value.hint == "its axes are dim0, dim1; name them together with their sizes, as in fsdp=2,tp=4"


def test_a_rank_that_is_not_on_the_mesh_is_reported():
    with pytest.raises(MeshError) as caught:
        Mesh(("tp",), (2,), (4, 6)).coord_of(5)
    assert caught.value.message == "rank 5 is not on mesh (tp=2)"


def test_a_mesh_sent_to_another_process_is_equal_to_its_own_and_hashes_as_it():
    """Strings hash otherwise in each process, and a mesh keeps its hash."""
    mesh = parse_mesh("fsdp=2,tp=4")
    assert hash(mesh) == hash(parse_mesh("fsdp=2,tp=4"))
    code = "import pickle, sys; mesh = pickle.load(sys.stdin.buffer); from shardviz.layout.mesh import *; "
    code += "assert mesh in {parse_mesh('fsdp=2,tp=4')}"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(mesh), env=environment, check=True)


def test_a_rank_is_labeled_by_its_coordinate():
    assert parse_mesh("fsdp=2,tp=4").label(7) == "fsdp=1, tp=3"
    assert parse_mesh("pp=2,tp=2").within((2, 3)).labels == ["pp=0, tp=0", "pp=0, tp=1"]


@given(meshes(), st.randoms())
def test_ranks_and_coordinates_agree_however_the_ranks_are_placed(mesh: Mesh, random: Random):
    ranks = list(range(100, 100 + mesh.size))
    random.shuffle(ranks)
    placed = Mesh(mesh.axes, mesh.shape, tuple(ranks))
    assert [placed.rank_at(coord) for coord in placed.coords()] == ranks
    assert [placed.coord_of(rank) for rank in ranks] == list(placed.coords())
    assert all(rank in placed for rank in ranks)
    assert 99 not in placed


@given(meshes(), st.data())
def test_groups_are_the_lines_of_the_grid_along_their_axes(mesh: Mesh, data: st.DataObject):
    grid = np.array(mesh.ranks).reshape(mesh.shape)
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), unique=True))
    positions = sorted(map(mesh.axis_index, axes))
    lines = np.moveaxis(grid, positions, range(mesh.ndim - len(positions), mesh.ndim))
    width = int(np.prod([mesh.shape[position] for position in positions]))
    groups = [tuple(line) for line in lines.reshape(-1, width).tolist()]
    assert mesh.groups(*axes) == groups
    assert {mesh.group_of(rank, *axes) for rank in mesh.ranks} == set(groups)
    assert all(rank in mesh.group_of(rank, *axes) for rank in mesh.ranks)
