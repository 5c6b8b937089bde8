"""An intention that equals what is held, where placements claim one stretch of a fused weight's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.check.run import check_dump
from shardviz.layout.intended import order_between
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from tests.check.checking import check_made, only
from tests.check.records import change_run
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize("intended", ["[(*/3/tp)/fsdp, *]", ORDER])
def test_what_is_held_as_intended_is_in_order_whatever_the_label(tmp_path: Path, intended: str) -> None:
    check_made(tmp_path, "fsdp=2,tp=2", {"w": Made(CLAIMED, HELD)})
    assert ORDER in only(check_dump(tmp_path / "made.shardviz")).fix
    change_run(tmp_path / "made.shardviz", intended={"w": intended})
    assert check_dump(tmp_path / "made.shardviz").findings == ()


@pytest.mark.parametrize(("held", "kind"), [(CLAIMED, "wrong-segment"), ("[(12/2/tp)/fsdp, 2]", "misordered")])
def test_what_is_not_held_as_intended_is_found(tmp_path: Path, held: str, kind: str) -> None:
    check_made(tmp_path, "fsdp=2,tp=2", {"w": Made(CLAIMED, held)})
    change_run(tmp_path / "made.shardviz", intended={"w": "[(*/3/tp)/fsdp, *]"})
    assert only(check_dump(tmp_path / "made.shardviz")).kind == kind


EVERY = ("embed", "layers.0.up", "layers.1.up", "head")


@pytest.mark.parametrize(
    ("names", "is_of_all"),
    [(EVERY, True), (EVERY[1:], False), (("layers.0.qkv", "layers.1.qkv", "layers.2.qkv"), False)],
)
def test_an_order_that_every_split_weight_has_is_not_of_fused_ones(names, is_of_all, tmp_path):
    tensors = {f"{name}.weight": Made("[16/tp, 6]", "[16/2/tp, 6]" if name in names else None) for name in EVERY}
    if names[0] not in EVERY:
        tensors = {f"{name}.weight": Made("[16/tp, 6]", "[16/2/tp, 6]") for name in names}
    findings = check_made(tmp_path, "tp=2", tensors | {"norm.weight": "[6]"}).findings
    assert {finding.cause_id for finding in findings} == {"segments"}
    assert all(("fused weight is to blame" in finding.cause) == is_of_all for finding in findings)
