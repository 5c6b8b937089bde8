"""The first wrong element, and what is in its place."""

from pathlib import Path

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.model.holders import Plane
from shardviz.picture.model.sides import first_difference, found_in_place_of, sides_of
from tests.dumps import Made, make_dump


def test_the_first_difference_is_found_in_whatever_slice_it_is(tmp_path: Path) -> None:
    swapped = Made("[8/fsdp/tp, 3, 4]", "[8/tp/fsdp, 3, 4]")
    dump = dump_of(read_files(make_dump(tmp_path / "d.shardviz", parse_mesh("fsdp=2,tp=2"), {"w": swapped})))
    sides = sides_of(dump, dump.tensors[0])
    assert first_difference(sides, Plane(1, 2, (0, 0, 0))) == (2, 0, 0)
    assert first_difference(sides, Plane(0, 1, (0, 0, 0))) == (2, 0, 0)


def test_a_tensor_in_order_has_no_first_difference(tmp_path: Path) -> None:
    dump = dump_of(read_files(make_dump(tmp_path / "d.shardviz", parse_mesh("tp=2"), {"w": "[8/tp, 3]"})))
    assert first_difference(sides_of(dump, dump.tensors[0]), Plane(0, 1, (0, 0))) is None


def test_the_element_in_place_of_another_is_what_the_shard_holds_there(tmp_path: Path) -> None:
    swapped = Made("[8/fsdp/tp, 3]", "[8/tp/fsdp, 3]")
    dump = dump_of(read_files(make_dump(tmp_path / "d.shardviz", parse_mesh("fsdp=2,tp=2"), {"w": swapped})))
    assert found_in_place_of(dump.tensors[0], (3, 2), 1) == (5, 2)
    assert found_in_place_of(dump.tensors[0], (0, 1), 0) == (0, 1)
    assert found_in_place_of(dump.tensors[0], (0, 1), 3) is None


def test_a_shard_that_is_too_short_has_nothing_in_its_place(tmp_path: Path) -> None:
    uneven = Made("[12/fsdp/tp]", "[12/tp/fsdp]")
    dump = dump_of(read_files(make_dump(tmp_path / "d.shardviz", parse_mesh("fsdp=2,tp=4"), {"w": uneven})))
    assert found_in_place_of(dump.tensors[0], (9,), 5) is None
