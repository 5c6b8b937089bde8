"""Folders of DeepSpeed's ZeRO: buffers laid back into parameters, what is wrong with them, and damaged ones."""

from __future__ import annotations

import math
import pickle
import random
import resource
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.formats.zero_buffers import boxes
from shardviz.checkpoint.open import open_checkpoint
from shardviz.cli import main
from shardviz.errors import DumpError
from tests.checkpoint.hostile import KIB, Run, damaged, refused
from tests.checkpoint.zero_folders import KINDS, save_universal, save_zero, wholes
from tests.dumps import replace_file
from tests.lanes import nightly, recorded

CASES = 100
NIGHTLY_CASES = 6000


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    root = tmp_path_factory.mktemp("zero")
    return {stage: save_zero(root / str(stage), stage) for stage in (1, 3)}


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)


def optim(folder, rank):
    return folder / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_stretch_is_its_boxes(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole, found = np.arange(size).reshape(shape), []
    for offsets, sizes, before in boxes(tuple(shape), start, stop):
        assert before == len(found)
        found += whole[tuple(slice(at, at + one) for at, one in zip(offsets, sizes, strict=True))].ravel().tolist()
    assert found == list(range(start, stop))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_and_moments_are_laid_back_into_parameters(tmp_path, stage, world):
    found = open_checkpoint(save_zero(tmp_path, stage, world))
    for kind, tensors in wholes().items():
        for name, whole in tensors.items():
            called = name if stage == 3 and kind == "fp32" else f"optimizer.state.{name}.{kind}"
            assert np.array_equal(found.tensors[called].bits, whole.numpy().view("u4")), called
    assert found.tensors["frozen"].bits.view("f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.tensors["buffer"].bits.view("f4").tolist() == [0, 1, 2, 3]
    assert found.tensors["0.weight"].dtype == ("float32" if stage == 3 else "bfloat16")
    assert check_checkpoint(found).findings == ()


def test_a_tied_name_of_stage_3_is_the_tensor_it_is_tied_to(zero):
    found = open_checkpoint(zero[3])
    assert np.array_equal(found.tensors["tied"].bits, found.tensors["0.weight"].bits)


def test_verbs_take_the_folder_and_that_of_a_step(zero, capsys):
    for path in map(str, (zero[1], zero[1] / "global_step2")):
        for words in (["check", path], ["show", path], ["diff", str(zero[1]), path]):
            assert main(words) == 0, words
        assert "all equal" in capsys.readouterr().out


# Findings


# Damaged and hostile


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_of_its_pickles_runs(zero, tmp_path, stage):
    folder = copied(zero[stage], tmp_path)
    marker = tmp_path / "executed"
    torch.save({"optimizer_state_dict": Run(marker)}, optim(folder, 0))
    assert "posix.system, which is not among the types of a checkpoint" in refused(folder)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Run(marker)))
    assert marker.exists()  # it would have


def fuzz(zero, tmp_path, count, seed):
    files = sorted(path for folder in zero.values() for path in folder.rglob("*") if path.is_file())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng, results = random.Random(seed), []
    for _ in range(count):
        chosen = rng.choice(files)
        root = next(folder for folder in zero.values() if folder in chosen.parents)
        folder = tmp_path / root.name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root, folder)
        replace_file(folder / chosen.relative_to(root), damaged(chosen.read_bytes(), rng))
        results.append(refused(folder))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < KIB
    return results


@recorded
def test_damaged_folders_are_refused_in_one_line_or_read(zero, tmp_path):
    results = fuzz(zero, tmp_path, CASES, seed=0)
    assert CASES / 10 < sum(map(bool, results)) < CASES
    assert all(str(tmp_path) in message for message in results if message)


@nightly
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_damaged_folders(zero, tmp_path, seed):
    assert any(fuzz(zero, tmp_path, NIGHTLY_CASES // 4, seed))


def test_moments_are_named_by_parameter(zero):
    names = open_checkpoint(zero[1]).tensors
    assert {f"optimizer.state.scale.{kind}" for kind in KINDS} <= set(names)


# Universal checkpoints


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint_has_what_the_ranks_buffers_had(tmp_path, zero, stage):
    found = open_checkpoint(save_universal(tmp_path / "u", stage))
    report = check_checkpoint(found)
    assert report.findings == ()
    assert [one.why.rpartition(": ")[2] for one in report.not_checked] == [
        "buffer, frozen, tied" if stage == 3 else "buffer, frozen"
    ]
    for kind, each in wholes().items():
        for name, whole in each.items():
            called = name if stage == 3 and kind == "fp32" else f"optimizer.state.{name}.{kind}"
            assert found.tensors[called].shape == whole.shape
            assert np.array_equal(found.tensors[called].bits.view("f4"), whole.numpy())
    verdicts = {one.verdict for one in compare_checkpoints(open_checkpoint(zero[stage]), found).outcomes}
    assert verdicts == ({"equal", "added"} if stage == 1 else {"equal"})  # steps, which buffers do not have


def test_a_universal_checkpoint_whose_files_are_elsewhere_is_not_followed(tmp_path):
    folder = save_universal(tmp_path / "u", 1)
    (zero,) = folder.rglob("zero")
    zero.rename(tmp_path / "elsewhere")
    zero.symlink_to(tmp_path / "elsewhere")
    assert not [name for name in open_checkpoint(folder).tensors if name.startswith("optimizer.")]


def test_files_of_a_universal_checkpoint_are_neither_run_nor_followed(tmp_path):
    folder = save_universal(tmp_path / "u", 1)
    one = folder / "global_step2" / "zero" / "0.bias" / "fp32.pt"
    torch.save({"param": Run("touch /tmp/never")}, one)
    with pytest.raises(DumpError, match=r"fp32\.pt"):
        open_checkpoint(folder)
    one.unlink()
    one.symlink_to("/etc/passwd")
    assert "optimizer.state.0.bias.fp32" not in open_checkpoint(folder).tensors
    one.unlink()
    one.write_bytes(b"PK")
    with pytest.raises(DumpError, match=r"fp32\.pt"):
        open_checkpoint(folder)
