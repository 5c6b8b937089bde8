"""One file of another save among a checkpoint's files: named, with its step where that is known; training is not."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.live_job.compare import compare_with_job
from shardviz.checkpoint.live_job.job import job_of
from shardviz.checkpoint.open import open_checkpoint
from shardviz.commands.common.dumps import read_dump
from shardviz.layout.region import Region

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


def test_a_file_of_the_first_is_named_where_a_step_says_that_it_is_the_odd_one(step, tmp_path):
    newer = trained(step, tmp_path / "newer")
    mixed = trained(step, tmp_path / "mixed", ODD.__ne__)  # all but one file are the newer step's
    found = compared(mixed, newer, [step])
    assert {outcome.verdict for outcome in found} == {"stale"}
    assert all(f"the first has there what {step} has" in outcome.why for outcome in found)
    assert all(f"All differences are in {ODD} of the first, in all " in outcome.cause for outcome in found)


def test_a_file_beside_a_checkpoint_that_is_not_cut_into_such_files_is_the_odd_one(step, tmp_path):
    tensors = {name: one for name, one in open_checkpoint(step).tensors.items() if one.dtype == "float32" and one.shape}
    whole = {name: one.read(Region.whole(one.shape)).copy().view(np.float32) for name, one in tensors.items()}
    save_file(whole, tmp_path / "whole.safetensors")
    found = compared(tmp_path / "whole.safetensors", trained(step, tmp_path / "mixed", ODD.__eq__))
    found = [one for one in found if one.verdict == "other"]
    assert found
    words = "none in its 3 other files. The file comes from another save, or its rank did not load or train its parts"
    assert all(one.cause.endswith(words) for one in found), [(one.verdict, one.why, one.cause) for one in found]


LAYERS = [f"layers.{at}.{end}" for at in range(5) for end in ("wq.weight", "wk.weight", "norm.weight")]
FILES = {"a.safetensors": LAYERS[:7], "b.safetensors": LAYERS[7:]}
MATRICES = {file: [name for name in names if "norm" not in name] for file, names in FILES.items()}


def sharded(folder, changed=(), norms=1):
    """Write a model into two files, whose boundary is within a layer; some of its weights are another save's.

    Norms that are changed are `norms` in each element.
    """
    folder.mkdir()
    numbers = {name: np.random.default_rng([at, name in changed]) for at, name in enumerate(LAYERS)}
    for file, names in FILES.items():
        scales = {name: np.full(8, norms if name in changed else 1) for name in names if "norm" in name}
        own = {name: numbers[name].normal(size=(8, 8)) for name in names if name not in scales} | scales
        save_file({name: value.astype(np.float32) for name, value in own.items()}, folder / file)
    index = {"weight_map": {name: file for file, names in FILES.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_safetensors_file_of_another_save_is_named(tmp_path):
    one, other = sharded(tmp_path / "one"), sharded(tmp_path / "other", LAYERS)
    mixed = sharded(tmp_path / "mixed")
    shutil.copy(other / "a.safetensors", mixed)
    found = compared(one, mixed)
    assert {outcome.name for outcome in found} == {*MATRICES["a.safetensors"]}
    rest = "except 2 of its scales and biases, and none of its other files. "
    where = f"All of a.safetensors of the second differs {rest}"
    assert {outcome.cause for outcome in found} == {
        where + "The file comes from another save, or only its tensors were changed"
    }
    assert {outcome.to_json()["cause_id"] for outcome in found} == {"whole-file-differs"}
    assert {outcome.verdict for outcome in found} == {"other"}
    of_a_step = compared(one, mixed, [other])
    assert {outcome.verdict for outcome in of_a_step} == {"stale"}
    assert all(outcome.cause.startswith(f"{where}It was not gathered") for outcome in of_a_step)
    with_norms = sharded(tmp_path / "norms", FILES["a.safetensors"], norms=2)
    assert {outcome.name for outcome in compared(one, with_norms)} == {*FILES["a.safetensors"]}
    where = "All of a.safetensors of the second differs, and none of its other files. "
    assert all(outcome.cause.startswith(where) for outcome in compared(one, with_norms))


def beside(saved, checkpoint):
    found = compare_with_job(job_of(read_dump(saved / "job.shardviz")), open_checkpoint(checkpoint))
    return [outcome for outcome in found.outcomes if outcome.verdict == "other"]


def test_a_job_names_the_file_that_is_not_as_it_holds(saved, step, tmp_path):
    found = beside(saved, trained(step, tmp_path / "mixed", ODD.__eq__))
    assert found
    words = f"All differences are in {ODD} of the checkpoint, "
    assert all(outcome.cause.startswith(words) for outcome in found), [outcome.cause for outcome in found]
    trained_since = beside(saved, trained(step, tmp_path / "later"))
    assert len(trained_since) >= len(found)
    assert not any("All differences are in" in outcome.cause for outcome in trained_since)
