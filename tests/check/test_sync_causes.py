"""Causes of weights that a sync or a load left wrong: shared memory, copies that were rounded, loads into copies."""

import numpy as np
import pytest

from shardviz.check.run import check_dump
from shardviz.layout.mesh import parse_mesh
from tests.check.checking import arange, only, shards_of
from tests.check.records import add_values, change_rank, change_run
from tests.dumps import Made, make_dump

CLAIMED = "[8/tp, 4]"


@pytest.mark.parametrize("is_shared", [True, False])
def test_names_that_share_memory_hold_what_came_last(tmp_path, is_shared):
    later = {rank: ids + 32 for rank, ids in shards_of(arange(8, 4), CLAIMED, "tp=2").items()}
    tensors = {"first": Made(CLAIMED, ids=later), "last": CLAIMED}
    folder = make_dump(tmp_path / "job.shardviz", parse_mesh("tp=2"), tensors)
    for rank in range(2 if is_shared else 1):
        change_rank(folder, rank, tied=(("first", "last"),))
    finding = only(check_dump(folder))
    assert (finding.kind, finding.tensor, finding.held) == ("foreign", "first", "the elements of last")
    assert finding.explanation.id == ("shared-memory" if is_shared else "copied-tensor")


def test_a_layer_that_was_read_for_a_second_one_is_one_finding(tmp_path):
    def shards(first):
        return {rank: ids + first for rank, ids in shards_of(arange(8, 4), CLAIMED, "tp=2").items()}

    tensors = {
        "layers.0.wq": Made(CLAIMED, ids=shards(96)),
        "layers.0.wk": Made(CLAIMED, ids=shards(96)),
        "layers.1.wk": Made(CLAIMED, ids=shards(32)),
        "layers.2.wq": CLAIMED,
        "layers.2.wk": CLAIMED,
    }
    report = check_dump(make_dump(tmp_path / "job.shardviz", parse_mesh("tp=2"), tensors))
    found = {finding.tensors: (finding.explanation.owner, finding.explanation.layer) for finding in report.findings}
    assert found == {
        ("layers.0.wq", "layers.0.wk"): ("layers.2", "layers.0"),
        ("layers.1.wk",): ("layers.2.wq", ""),
    }
    assert report.findings[0].cause.startswith("The loader reads from layers.2 for layers.0 too")


@pytest.mark.parametrize("digests", [("a", "a"), ("a", "b"), ()])
def test_copies_that_are_equal_once_rounded_are_no_seeds(tmp_path, digests):
    folder = make_dump(tmp_path / "job.shardviz", parse_mesh("dp=2"), {"w": "[4, 4]"})
    values = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    add_values(folder, "w", "[4, 4]", {0: values, 1: values.astype(np.float16).astype(np.float32)}, written=False)
    for rank, digest in enumerate(digests):
        change_rank(folder, rank, rounded=(("w", "float16", digest),))
    finding = only(check_dump(folder))
    assert finding.kind == "unreplicated"
    assert finding.explanation.id == ("rounded-copies" if digests == ("a", "a") else "rank-dependent-seed")


@pytest.mark.parametrize("key", ["w", ""])
def test_values_that_were_read_into_copies_are_a_cause_of_their_own(tmp_path, key):
    nowhere = {rank: np.full((4, 4), -1) for rank in range(2)}
    tensors = {"v": CLAIMED, "w": Made(CLAIMED, ids=nowhere)}
    folder = make_dump(tmp_path / "job.shardviz", parse_mesh("tp=2"), tensors)
    change_run(folder, reference="step-10")
    for rank in range(2 if key else 0):
        change_rank(folder, rank, skipped_keys=(("w", key),))
    finding = only(check_dump(folder))
    assert (finding.kind, finding.tensor) == ("foreign", "w")
    assert finding.explanation.id == ("loaded-into-copies" if key else "left-out-of-load")
