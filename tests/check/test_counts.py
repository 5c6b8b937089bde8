"""Ids that are lost or held too often, and ids that are not the tensor's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.check.checking import arange, check_made
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


def test_experts_renumbered_on_each_rank_collide(tmp_path: Path) -> None:
    def expert(index: int) -> np.ndarray:
        return arange(2, 2) + 4 * index

    made: dict[str, Made | str] = {
        "experts.0": Made(None, ids={0: expert(0), 1: expert(2)}, shape=(2, 2)),
        "experts.1": Made(None, ids={0: expert(0), 1: expert(2)}, shape=(2, 2)),
        "experts.2": Made(None, held="[2, 2]", shape=(2, 2)),
        "experts.3": Made(None, held="[2, 2]", shape=(2, 2)),
    }
    report = check_made(tmp_path, "ep=2", made)
    assert [(one.kind, one.tensors) for one in report.findings] == [("name-collision", ("experts.0", "experts.1"))]
    assert "experts.0 on rank 0, experts.2 on rank 1" in report.findings[0].summary
