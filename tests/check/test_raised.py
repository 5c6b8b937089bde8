"""Why a sharded step raises, by what the exception says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.check.run import check_dump
from tests.check.checking import check_made, only
from tests.check.records import change_rank

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "rank 0 raised NotImplementedError in step (train.py:9): Operator "
TAIL = " does not have a sharding strategy registered."


@pytest.mark.parametrize(
    ("operator", "cause"),
    [
        ("c10d.allreduce_.default", "collective-of-dtensor"),
        ("_c10d_functional.all_reduce.default", "collective-of-dtensor"),
        ("aten.histc.default", "unsupported-sharding"),
    ],
)
def test_a_collective_of_a_dtensor_is_no_sharding_that_torch_lacks(tmp_path: Path, operator: str, cause: str) -> None:
    check_made(tmp_path, "tp=2", {"w": "[8/tp]"})
    for rank in range(2):
        change_rank(tmp_path / "made.shardviz", rank, raised=(("step", f"{HEAD}{operator}{TAIL}"),))
    assert only(check_dump(tmp_path / "made.shardviz")).cause_id == cause
