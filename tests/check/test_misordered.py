"""A tensor that is out of order is found, and what happened to it gets its name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.check.checking import arange, check_made, only, reordered, shards_of
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path


MESH = "fsdp=2,tp=4"


def test_the_fsdp_over_tp_bug_reads_as_an_order_of_axes_with_the_right_label(tmp_path: Path) -> None:
    found = only(check_made(tmp_path, MESH, {"w": Made("[12/fsdp/tp, 12]", held="[12/tp/fsdp, 12]")}))
    assert found.kind == "misordered"
    assert (found.claimed, found.held) == ("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]")
    assert "(_StridedShard(0, split_factor=4), Shard(0))" in found.fix
    assert "pytorch#129229" in found.refs
    assert found.severity == "error"


def test_a_finding_of_many_layers_is_one_with_all_their_names(tmp_path: Path) -> None:
    made = Made("[12/fsdp/tp, 12]", held="[12/tp/fsdp, 12]")
    report = check_made(tmp_path, MESH, {f"layers.{index}.w": made for index in range(12)})
    (found,) = report.findings
    assert found.tensors == tuple(f"layers.{index}.w" for index in range(12))
    assert found.summary.startswith("12 tensors alike: ")
    assert all(len(report.findings_of[name]) == 1 for name in found.tensors)


@pytest.mark.parametrize(
    ("heads", "halves", "mesh", "layout"),
    [
        (2, (4, 2), "fsdp=2,tp=2", "[16/tp/fsdp, 2]"),  # as segments of two rows that fsdp split
        (2, (2, 4), "fsdp=8,tp=2", "[16/tp/fsdp, 2]"),  # as shards of one row, along fsdp in another order
        (4, (4, 2), "tp=32", "[32/tp, 2]"),
    ],
)
def test_the_rotary_order_is_named_first_where_single_rows_look_like_shards(
    tmp_path: Path, heads: int, halves: tuple[int, int], mesh: str, layout: str
) -> None:
    rows = heads * math.prod(halves)
    content = arange(rows, 2).reshape(heads, *halves, 2).swapaxes(1, 2).reshape(rows, 2)
    found = only(check_made(tmp_path, mesh, {"w": reordered(content, layout, mesh)}))
    assert "rotary" in found.cause
    assert found.also, "what the shards look like is said too"


def test_interleaved_rows_are_not_blamed_on_a_mesh_of_other_sizes(tmp_path: Path) -> None:
    content = arange(16, 2).reshape(2, 8, 2).swapaxes(0, 1).reshape(16, 2)
    several = only(
        check_made(tmp_path / "a", "fsdp=8,tp=2", {"w": reordered(content, "[16/tp/fsdp, 2]", "fsdp=8,tp=2")})
    )
    assert "interleaves" in several.cause
    one = only(check_made(tmp_path / "b", "tp=16", {"w": reordered(content, "[16/tp, 2]", "tp=16")}))
    assert "numbers the ranks" in one.cause, "two nodes of eight ranks may be numbered so"
    assert "view(1, 2, 8, 1)" in one.also[0]


def test_a_square_shard_transposed_has_one_name(tmp_path: Path) -> None:
    ids = {rank: part.T for rank, part in shards_of(arange(8, 4), "[8/tp, 4]", "tp=2").items()}
    found = only(check_made(tmp_path, "tp=2", {"w": Made("[8/tp, 4]", ids=ids)}))
    assert "each shard transposed" in found.held
    assert not any("memory" in one for one in found.also)


def test_what_nothing_fits_is_scrambled_with_its_first_differences(tmp_path: Path) -> None:
    content = np.random.default_rng(0).permutation(arange(6, 6).ravel()).reshape(6, 6)
    found = only(check_made(tmp_path, "tp=2", {"w": reordered(content, "[6/tp, 6]", "tp=2")}))
    assert found.kind == "misordered"
    assert found.held.startswith("scrambled: rank 0 holds [")
    assert found.sentence.endswith(": no known pattern fits")
    assert found.details[0].startswith("first differences: rank 0 holds [")
