"""The collectives that gather a tensor, and what each rank receives."""

from __future__ import annotations

import pytest

from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.layout.routes import GatherStep, gather_steps

MESH = parse_mesh("fsdp=2,tp=4")


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ("[8, 8]", []),
        ("[16/tp, 2]", [GatherStep("all_gather", "tp", 24)]),
        ("[16/tp/fsdp, 2]", [GatherStep("all_gather", "fsdp", 4), GatherStep("all_gather", "tp", 24)]),
        ("[16/fsdp/tp, 2]", [GatherStep("all_gather", "tp", 12), GatherStep("all_gather", "fsdp", 16)]),
        ("[8/fsdp, 8/tp]", [GatherStep("all_gather", "tp", 24), GatherStep("all_gather", "fsdp", 32)]),
        ("[24/3/tp, 2]", [GatherStep("all_gather", "tp", 36)]),
        ("[16/fsdp, 2] +tp", [GatherStep("all_reduce", "tp", 24, "sum"), GatherStep("all_gather", "fsdp", 16)]),
        ("[5/tp]", [GatherStep("all_gather", "tp", 5)]),
        ("[flat(3, 3)/fsdp]", [GatherStep("all_gather", "fsdp", 5)]),
    ],
)
def test_splits_are_undone_innermost_first_and_sums_are_taken_before(layout: str, steps: list[GatherStep]) -> None:
    assert list(gather_steps(parse(layout).layout(MESH))) == steps
