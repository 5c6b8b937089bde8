"""Ways between layouts, and the collectives that gather a tensor, with what each rank receives."""

from __future__ import annotations

import pytest

from shardviz.errors import LayoutError
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse, write
from shardviz.layout.routes import cheapest, gathering, torch_route, total


def _ends(start, end, mesh):
    return parse(start).layout(parse_mesh(mesh)), parse(end).layout(parse_mesh(mesh))


def _said(legs):
    return [(leg.collective, leg.axis, write(leg.layout), leg.received) for leg in legs]


@pytest.mark.parametrize(
    ("start", "end", "mesh", "route"),
    [
        ("[12/tp, 12]", "[12, 12/tp]", "tp=4", [("all_to_all", "tp", "[12, 12/tp]", 27)]),
        ("[12/tp, 12]", "[12, 12]", "tp=4", [("all_gather", "tp", "[12, 12]", 108)]),
        ("[12, 12] +tp", "[12/tp, 12]", "tp=4", [("reduce_scatter", "tp", "[12/tp, 12]", 108)]),
        ("[12, 12] +tp", "[12, 12]", "tp=4", [("all_reduce", "tp", "[12, 12]", 216)]),
        ("[12, 12]", "[12/tp, 12]", "tp=4", [("slice", "tp", "[12/tp, 12]", 0)]),
        ("[24/tp, 12]", "[24/3/tp, 12]", "tp=2", [("all_to_all", "tp", "[24/3/tp, 12]", 48)]),
        ("[12/tp, 12]", "[12/tp, 12]", "tp=4", []),
    ],
)
def test_one_axis_takes_the_one_collective_that_does_it(start, end, mesh, route):
    assert _said(cheapest(*_ends(start, end, mesh))) == route


def test_a_pending_sum_of_a_split_tensor_is_taken_before_the_gather_where_torch_gathers_first():
    ends = _ends("[8, 8/b] +a", "[8, 8]", "a=2,b=2")
    assert _said(cheapest(*ends)) == [("all_reduce", "a", "[8, 8/b]", 32), ("all_gather", "b", "[8, 8]", 32)]
    assert _said(torch_route(*ends)) == [("all_gather", "b", "[8, 8] +a", 32), ("all_reduce", "a", "[8, 8]", 64)]


def test_a_route_is_never_dearer_than_torchs_own():
    layouts = ["[12, 8]", "[12/a, 8]", "[12/b, 8/a]", "[12/a/b, 8]", "[12, 8/b] +a", "[12/a, 8] +b"]
    for start in layouts:
        for end in (text for text in layouts if "+" not in text):
            ends = _ends(start, end, "a=2,b=3")
            assert total(cheapest(*ends)) <= total(torch_route(*ends)), (start, end)


def test_what_no_collective_can_make_is_reported():
    with pytest.raises(LayoutError, match="no collective makes a sum pending over tp"):
        cheapest(*_ends("[12, 12]", "[12, 12] +tp", "tp=2"))
    with pytest.raises(LayoutError, match=r"not from shape \(12,\) to \(6,\)"):
        cheapest(*_ends("[12/tp]", "[6/tp]", "tp=2"))


MESH = parse_mesh("fsdp=2,tp=4")


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ("[8, 8]", []),
        ("[16/tp, 2]", [("all_gather", "tp", 24)]),
        ("[16/tp/fsdp, 2]", [("all_gather", "fsdp", 4), ("all_gather", "tp", 24)]),
        ("[16/fsdp/tp, 2]", [("all_gather", "tp", 12), ("all_gather", "fsdp", 16)]),
        ("[8/fsdp, 8/tp]", [("all_gather", "tp", 24), ("all_gather", "fsdp", 32)]),
        ("[24/3/tp, 2]", [("all_gather", "tp", 36)]),
        ("[16/fsdp, 2] +tp", [("all_reduce", "tp", 24), ("all_gather", "fsdp", 16)]),
        ("[5/tp]", [("all_gather", "tp", 5)]),
        ("[flat(3, 3)/fsdp]", [("all_gather", "fsdp", 5)]),
    ],
)
def test_splits_are_undone_innermost_first_and_sums_are_taken_before(
    layout: str, steps: list[tuple[str, str, int]]
) -> None:
    legs = gathering(parse(layout).layout(MESH))
    assert [(leg.collective, leg.axis, leg.received) for leg in legs] == steps
    assert not legs or set(legs[-1].layout.replicate_axes) == set(MESH.axes)
