"""One file of another save among a checkpoint's files: named, with its step where that is known; training is not."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from shardviz.checkpoint.beside.compare import compare_with_job
from shardviz.checkpoint.beside.job import job_of
from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.comparing.elsewhere.one_file import UNKNOWN
from shardviz.checkpoint.open import open_checkpoint
from shardviz.commands.common.dumps import read_dump

ODD = "__1_0.distcp"


def trained(folder, to, is_in=lambda file: True, names=()):
    """Copy a checkpoint and change all numbers, or those in some files, or of some tensors."""
    shutil.copytree(folder, to)
    for name, tensor in open_checkpoint(to).tensors.items():
        for chunk in tensor.chunks:
            if is_in(chunk.place.file) and (name in names or not names):
                start = tensor.stored(chunk).start
                np.memmap(to / chunk.place.file, "<u4", "r+", start, tensor.chunk_bits(chunk).shape)[...] ^= 1 << 20
    return to


def compared(one, other, also=()):
    found = compare_checkpoints(*map(open_checkpoint, (one, other)), also=[open_checkpoint(path) for path in also])
    return [outcome for outcome in found.outcomes if outcome.verdict != "equal"]


@pytest.fixture
def step(saved):
    return saved / "dcp"


def test_a_file_of_another_save_is_named(step, tmp_path):
    found = compared(step, trained(step, tmp_path / "mixed", ODD.__eq__))
    assert {outcome.verdict for outcome in found} == {"other"}
    assert all(f"All that differs is in {ODD} of the second, all " in outcome.cause for outcome in found)
    assert all(outcome.cause.endswith(f"nothing in its 3 other files: {UNKNOWN}.") for outcome in found)


def test_the_step_of_such_a_file_is_named_where_it_is_known(step, tmp_path):
    older = trained(step, tmp_path / "older")
    found = compared(step, trained(step, tmp_path / "mixed", ODD.__eq__), [older])
    assert {outcome.verdict for outcome in found} == {"stale"}
    assert all(f"the second has there what {older} has" in outcome.why for outcome in found)
    assert all(
        outcome.cause.endswith("that file is of older, or its rank did not train its parts since.") for outcome in found
    )


def test_a_file_that_alone_stayed_as_it_was_is_named(step, tmp_path):
    found = compared(step, trained(step, tmp_path / "mixed", ODD.__ne__))
    assert all(f"Everything in {ODD} of the second is as in the first" in outcome.cause for outcome in found)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"names": ("app.model.0.weight",), "is_in": ODD.__eq__},
        {"names": ("app.model.0.weight", "app.model.2.bias")},
    ],
    ids=["all that was trained", "one tensor's part", "what was not frozen"],
)
def test_training_is_no_file_of_another_save(step, tmp_path, change):
    found = compared(step, trained(step, tmp_path / "later", **change))
    assert found
    assert not any(outcome.cause for outcome in found)


def beside(saved, checkpoint):
    found = compare_with_job(job_of(read_dump(saved / "job.shardviz")), open_checkpoint(checkpoint))
    return [outcome for outcome in found.outcomes if outcome.verdict == "other"]


def test_a_job_names_the_file_that_is_not_as_it_holds(saved, step, tmp_path):
    found = beside(saved, trained(step, tmp_path / "mixed", ODD.__eq__))
    assert found
    words = f"All that differs is in {ODD} of the checkpoint, "
    assert all(outcome.cause.startswith(words) for outcome in found), [outcome.cause for outcome in found]
    trained_since = beside(saved, trained(step, tmp_path / "later"))
    assert len(trained_since) >= len(found)
    assert not any("All that differs" in outcome.cause for outcome in trained_since)
