"""The model's own values after sharding: copies that differ, shards that repeat each other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.run import check_dump
from shardviz.dump.write import rank_file
from tests.check.checking import check_made, only
from tests.check.records import add_values
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.report import Report

RANDOM = np.random.default_rng(0).standard_normal((8, 8, 3)).astype(np.float32)


def drawn(folder: Path, values: dict[int, np.ndarray]) -> Report:
    lost = {rank: np.full((8, 3), -1) for rank in range(4)}
    check_made(folder, "dp=2,tp=2", {"w": Made("[16/tp, 3]", ids=lost)})
    add_values(folder / "made.shardviz", "w", "[16/tp, 3]", values)
    return check_dump(folder / "made.shardviz")


def test_memory_that_is_not_finite_was_not_drawn(tmp_path: Path) -> None:
    drawn(tmp_path, {rank: RANDOM[rank % 2] for rank in range(4)})
    file = tmp_path / "made.shardviz" / rank_file(1)
    file.write_text(re.sub(r'"values":\[\[[^,]+', '"values":[["nan"', file.read_text(), count=1))
    found = only(check_dump(tmp_path / "made.shardviz"))
    assert found.kind == "foreign"
    assert "never written" in found.cause
