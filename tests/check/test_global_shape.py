"""A global shape that is not the unsharded model's: what the ranks hold of the right one is said, with the label."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shardviz.check.run import check_dump
from tests.check.checking import check_made, only
from tests.check.records import change_rank, read_rank
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.explain.finding import Finding


def from_local(path: Path, made: Made, *placements: str) -> Finding:
    """Check a tensor of four ranks whose global shape is the local one times four on its split dim."""
    _relabeled(path, made, *placements)
    return only(check_dump(path / "made.shardviz"))


def _relabeled(path: Path, made: Made, *placements: str) -> None:
    check_made(path, "tp=4", {"w": made})
    for rank in range(4):
        record = read_rank(path / "made.shardviz", rank)
        (body,), (layout,) = record.bodies, record.layouts
        rows, columns = body.local_shape
        shape = (rows * 4 if placements == ("Shard(0)",) else rows, columns)
        layout = msgspec.structs.replace(layout, shape=shape, placements=placements)
        body = msgspec.structs.replace(body, shape=shape)
        change_rank(path / "made.shardviz", rank, bodies=(body,), layouts=(layout,))


def test_shards_labeled_as_copies_are_told_their_shape_and_their_label_at_once(tmp_path: Path) -> None:
    found = from_local(tmp_path, Made("[8/tp, 4]"), "Replicate()")
    assert (found.kind, found.held) == ("wrong-shape", "[8/tp, 4]")
    assert found.fix == "pass shape=(8, 4) and stride=(4, 1) to from_local; label the local tensors by (Shard(0),)"
