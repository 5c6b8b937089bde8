"""One permutation of the ranks has one name, however many layouts it harms; other causes keep theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.check.checking import arange, by_rank, check_made, only, shards_of
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path

MESH = "fsdp=2,tp=2"
LAYOUTS = ("[8/tp/fsdp, 4]", "[8/fsdp, 4/tp]", "[8/fsdp]")
COLUMNS_FIRST = [0, 2, 1, 3]


def test_ranks_counted_in_another_order_are_one_finding_over_all_layouts(tmp_path: Path) -> None:
    made = {f"w{number}": by_rank(layout, MESH, COLUMNS_FIRST) for number, layout in enumerate(LAYOUTS)}
    found = only(check_made(tmp_path, MESH, {**made, "copies": "[6, 6]"}))
    assert (found.kind, found.tensors) == ("misordered", ("w0", "w1", "w2"))
    assert "rows and columns of a 2x2 mesh are exchanged" in found.held
    assert "numbers the ranks in a different order than the mesh" in found.cause
    assert "mesh.get_coordinate()" in found.fix


def test_a_tensor_that_the_permutation_would_have_harmed_and_is_in_order_leaves_each_its_own_cause(
    tmp_path: Path,
) -> None:
    made = {f"w{number}": by_rank(layout, MESH, COLUMNS_FIRST) for number, layout in enumerate(LAYOUTS[:2])}
    report = check_made(tmp_path, MESH, {**made, "whole": "[12/fsdp]"})
    assert {finding.tensor: finding.held for finding in report.findings} == {
        "w0": "[8/fsdp/tp, 4]",
        "w1": "[8/tp, 4/fsdp]",
    }


def test_one_layout_that_explains_all_is_kept(tmp_path: Path) -> None:
    made = {name: by_rank(LAYOUTS[0], MESH, COLUMNS_FIRST) for name in ("up", "down")}
    found = only(check_made(tmp_path, MESH, made))
    assert found.held == "[8/fsdp/tp, 4]"
    assert "the mesh's first axis first" in found.cause


def test_two_exchanged_ranks_are_no_order_of_all(tmp_path: Path) -> None:
    mesh, source = "fsdp=2,tp=4", [0, 6, 2, 3, 4, 5, 1, 7]
    made = {}
    for number, layout in enumerate(("[16/fsdp/tp, 4]", "[16/tp, 4]", "[16/fsdp, 4]")):
        own = shards_of(arange(16, 4), layout, mesh)
        made[f"w{number}"] = Made(layout, ids={rank: own[source[rank]] for rank in own})
    found = only(check_made(tmp_path, mesh, made))
    assert (found.ranks, found.tensors) == ((1, 6), ("w0", "w1", "w2"))
    assert found.held == "rank 1 holds the shard of rank 6 and rank 6 holds the shard of rank 1"
    assert "changed places" in found.cause
