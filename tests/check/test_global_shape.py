"""A global shape that is not the unsharded model's: what the ranks hold of the right one is said, with the label."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardviz.check.run import check_dump
from tests.check.checking import arange, check_made, only
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


def test_uneven_shards_given_to_from_local_lack_their_shape_and_nothing_else(tmp_path: Path) -> None:
    found = from_local(tmp_path, Made("[10/tp, 4]"), "Shard(0)")
    assert (found.kind, found.claimed, found.held) == ("wrong-shape", "[12/tp, 4]", "[10/tp, 4]")
    assert found.fix == "pass shape=(10, 4) and stride=(4, 1) to from_local"


def test_shards_labeled_as_copies_are_told_their_shape_and_their_label_at_once(tmp_path: Path) -> None:
    found = from_local(tmp_path, Made("[8/tp, 4]"), "Replicate()")
    assert (found.kind, found.held) == ("wrong-shape", "[8/tp, 4]")
    assert found.fix == "pass shape=(8, 4) and stride=(4, 1) to from_local; label the local tensors by (Shard(0),)"


def test_shards_of_another_cut_are_named_beside_their_shape(tmp_path: Path) -> None:
    made = Made("[10/tp, 4]", ids=dict(enumerate(np.array_split(arange(10, 4), 4))))
    found = from_local(tmp_path, made, "Shard(0)")
    assert "differ by at most one" in found.held
    assert "shape=(10, 4)" in found.fix
    assert "torch.chunk" in found.fix


def test_padding_behind_a_tensor_that_its_label_counts_is_no_finding(tmp_path: Path) -> None:
    padded = np.concatenate([arange(10, 4), np.zeros((2, 4), np.int64)])
    _relabeled(tmp_path, Made("[10/tp, 4]", ids=dict(enumerate(np.split(padded, 4)))), "Shard(0)")
    assert check_dump(tmp_path / "made.shardviz").findings == ()


def test_a_tensor_that_was_padded_before_it_was_split_is_told_so(tmp_path: Path) -> None:
    padded = np.concatenate([np.zeros((2, 4), np.int64), arange(10, 4)])
    found = from_local(tmp_path, Made("[10/tp, 4]", ids=dict(enumerate(np.split(padded, 4)))), "Shard(0)")
    assert found.cause == "The code pads the tensor from [10, 4] to [12, 4] after it builds the model"


def test_what_is_no_layout_of_the_right_shape_is_not_given_a_label(tmp_path: Path) -> None:
    content = np.random.default_rng(0).permutation(arange(10, 4).ravel()).reshape(10, 4)
    found = from_local(tmp_path, Made("[10/tp, 4]", ids=dict(enumerate(np.array_split(content, 4)))), "Shard(0)")
    assert (found.kind, found.held) == ("wrong-shape", "")
    assert found.fix.endswith("or call distribute_tensor on the whole tensor")
