"""The collectives that gather a tensor, and what each rank receives."""

from __future__ import annotations

import pytest

from shardviz.gathering import Step, gather_steps
from shardviz.mesh import parse_mesh
from shardviz.notation import parse

MESH = parse_mesh("fsdp=2,tp=4")


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ("[8, 8]", []),
        ("[16/tp, 2]", [Step("all_gather", "tp", 24)]),
        ("[16/tp/fsdp, 2]", [Step("all_gather", "fsdp", 4), Step("all_gather", "tp", 24)]),
        ("[16/fsdp/tp, 2]", [Step("all_gather", "tp", 12), Step("all_gather", "fsdp", 16)]),
        ("[8/fsdp, 8/tp]", [Step("all_gather", "tp", 24), Step("all_gather", "fsdp", 32)]),
        ("[24/3/tp, 2]", [Step("all_gather", "tp", 36)]),
        ("[16/fsdp, 2] +tp", [Step("all_reduce", "tp", 24, "sum"), Step("all_gather", "fsdp", 16)]),
        ("[5/tp]", [Step("all_gather", "tp", 5)]),
        ("[flat(3, 3)/fsdp]", [Step("all_gather", "fsdp", 5)]),
    ],
)
def test_splits_are_undone_innermost_first_and_sums_are_taken_before(layout: str, steps: list[Step]) -> None:
    assert list(gather_steps(parse(layout).layout(MESH))) == steps
