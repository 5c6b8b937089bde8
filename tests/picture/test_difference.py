"""The map of where claimed and held differ, when a line of it stands for many parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.model.holders import Plane, ranks_of
from shardviz.picture.model.sides import sides_of
from shardviz.picture.text.paint import Frame, Ruler, paint
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from pathlib import Path


def test_parts_whose_holders_share_no_hue_have_that_of_the_ranks_that_should_hold_them(tmp_path: Path) -> None:
    mesh = parse_mesh("fsdp=128,tp=8")
    made = Made("[1024/fsdp/tp, 1]", "[1024/tp/fsdp, 1]")
    dump = dump_of(read_files(make_dump(tmp_path / "d.shardviz", mesh, {"w": made})))
    sides = sides_of(dump, dump.stamped["w"])
    plane = Plane(0, 1, (0, 0))
    rows, cols = (Ruler.fitted(sides.holders.edges(dim), room) for dim, room in ((0, 40), (1, 60)))
    looks = paint(Frame(sides, "difference", plane, rows, cols), 0, 0, 40, 60).of
    several = [look for look in looks if look.tone == "elsewhere" and len(ranks_of(look.ranks)) > 1]
    assert len({look.color for look in several}) > 4
    assert all(look.color >= 0 for look in several)
