"""An intention that equals what is held, where placements claim one stretch of a fused weight's rows."""

from __future__ import annotations

import pytest

from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import order_between, parse

CLAIMED = "[12/tp/fsdp, 2]"
HELD = "[(12/3/tp)/fsdp, 2]"
ORDER = "[*/tp/fsdp, *] order 0: view(3, 2, 2).transpose(0, 1)"


@pytest.mark.parametrize(
    ("claimed", "held", "text"),
    [
        (CLAIMED, HELD, ORDER),
        ("[12/tp, 2/fsdp]", "[12/3/tp, 2/fsdp]", "[*/tp, */fsdp] order 0: view(3, 2, 2).transpose(0, 1)"),
        ("[2, 12/tp]", "[2, 12/3/tp]", "[*, */tp] order 1: view(3, 2, 2).transpose(0, 1)"),
        (CLAIMED, CLAIMED, ""),
        (CLAIMED, "[12/fsdp/tp, 2]", ""),
        ("[12/3/tp, 2]", "[12/tp, 2]", ""),
        ("[9/tp, 2]", "[9/3/tp, 2]", ""),
    ],
)
def test_segments_in_rank_order_are_an_order_of_what_is_claimed(claimed: str, held: str, text: str) -> None:
    mesh = parse_mesh("fsdp=2,tp=2")
    assert order_between(parse(claimed).layout(mesh), parse(held).layout(mesh)) == text
