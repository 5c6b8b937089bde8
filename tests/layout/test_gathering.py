"""The collectives that gather a tensor, and what each rank receives."""

from __future__ import annotations

import pytest

from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.layout.routes import gathering

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
