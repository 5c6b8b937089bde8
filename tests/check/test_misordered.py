"""A tensor that is out of order is found, and what happened to it gets its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.check.checking import arange, check_made, only, reordered, shards_of
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path


MESH = "fsdp=2,tp=4"


def test_a_finding_of_many_layers_is_one_with_all_their_names(tmp_path: Path) -> None:
    made = Made("[12/fsdp/tp, 12]", held="[12/tp/fsdp, 12]")
    report = check_made(tmp_path, MESH, {f"layers.{index}.w": made for index in range(12)})
    (found,) = report.findings
    assert found.tensors == tuple(f"layers.{index}.w" for index in range(12))
    assert found.summary.startswith("12 tensors alike: ")
    assert all(len(report.findings_of[name]) == 1 for name in found.tensors)


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
    assert found.details[0].startswith("scrambled: rank 0 holds [")
