"""Buffers that each rank updates from its own rows: a warning if a checkpoint has them, not checked otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from shardviz.check.step.update.compare import check_unsharded_update
from shardviz.dump.dump import Dump, dump_of
from tests.check.steps import WANTED, Step, on_all

if TYPE_CHECKING:
    from pathlib import Path

COUNTS = np.array([4.0, 2.0, 6.0, 8.0])


def counted(path: Path, *, is_saved: bool) -> Dump:
    """Count tokens by rank along dp, where the unsharded model counts those of the whole batch."""
    parts = {0: COUNTS / 4, 1: COUNTS / 4, 2: 3 * COUNTS / 4, 3: 3 * COUNTS / 4}
    step = Step(path).add("loss", "scalar", on_all(1.0), wanted=1.0, claim=("Partial('avg')", "Replicate()"))
    step.add("w", "grad", on_all(WANTED)).put(0, "count", "buffer", "updated", COUNTS)
    for rank, values in parts.items():
        step.put(rank, "count", "buffer", "step", values)
    files = step.dump().files
    not_saved = () if is_saved else ("count",)
    ranks = {rank: structs.replace(record, not_saved=not_saved) for rank, record in files.ranks.items()}
    return dump_of(replace(files, ranks=ranks))


def test_a_count_that_is_saved_is_a_warning_with_its_reduction(tmp_path: Path) -> None:
    (finding,) = check_unsharded_update(counted(tmp_path, is_saved=True), frozenset(), {})
    assert (finding.cause_id, finding.severity) == ("unreduced-statistics", "warning")  # type: ignore[union-attr]


def test_a_count_that_no_checkpoint_has_is_not_checked(tmp_path: Path) -> None:
    (unchecked,) = check_unsharded_update(counted(tmp_path, is_saved=False), frozenset(), {})
    assert unchecked.tensor == "count"
    assert "no checkpoint has it" in unchecked.why  # type: ignore[union-attr]
