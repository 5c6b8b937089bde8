"""Checkpoints that DeepSpeed itself writes, read offline: the same as its own converter makes of them."""

import os
import subprocess
import sys

import numpy as np
import pytest
from torch import distributed

import shardviz
from shardviz.check.run import check_dump
from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.findings import check_checkpoint
from shardviz.checkpoint.open import open_checkpoint
from shardviz.testing import spmd
from tests.lanes import nightly
from tests.live.claims.test_zero_masters import engine_of

pytestmark = nightly


def saved(engine, folder):
    path = folder.with_name("zero")
    engine.save_checkpoint(str(path))
    distributed.barrier()
    return path


def converted(path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = get_fp32_state_dict_from_zero_checkpoint(str(path))
    return {name: one.detach().float().numpy() for name, one in whole.items()}


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "fp32"), (3, "bf16")])
@spmd(mesh={"dp": 2})
def test_a_checkpoint_is_what_deepspeeds_own_converter_makes_of_it(mesh, shard_dump, stage, dtype):
    engine = engine_of(stage, dtype)
    path = saved(engine, shard_dump)
    found = open_checkpoint(path)
    assert check_checkpoint(found).findings == ()
    for name, whole in converted(path).items():
        master = f"optimizer.state.{name}.fp32"
        one = found.tensors[master if master in found.tensors else name]
        if one.dtype == "float32":
            assert np.array_equal(one.bits.view("f4"), whole), name
    shardviz.capture(engine, shard_dump, reference=path)
    report = check_dump(shard_dump)
    assert report.findings == ()
    assert {one.tensor for one in report.not_checked} <= {""}


@spmd(mesh={"dp": 2})
def test_links_of_round_robin_gradients_are_not_where_the_buffers_are(mesh, shard_dump):
    path = saved(engine_of(2, round_robin_gradients=True), shard_dump)
    report = check_checkpoint(open_checkpoint(path))
    assert {one.kind for one in report.findings} == {"misordered"}
    assert all("round_robin_gradients" in one.cause for one in report.findings)
    found = open_checkpoint(path).tensors
    for name, whole in converted(path).items():
        master = found.get(f"optimizer.state.{name}.fp32")
        assert master is None or np.array_equal(master.bits.view("f4"), whole)


@pytest.mark.parametrize("stage", [1, 3])
@spmd(mesh={"dp": 2})
def test_a_universal_checkpoint_has_what_it_was_made_of(mesh, shard_dump, stage):
    path = saved(engine_of(stage, "bf16"), shard_dump)
    if distributed.get_rank() == 0:
        (step,) = path.glob("global_step*")
        to = path.with_name("universal") / step.name
        options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(step)]
        alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        subprocess.run([*command, "--output_folder", str(to), *options], check=True, env=alone, capture_output=True)
        made = open_checkpoint(to.parent)
        assert check_checkpoint(made).findings == ()
        outcomes = compare_checkpoints(open_checkpoint(path), made).outcomes
        assert {one.verdict for one in outcomes} <= {"equal", "tied", "added"}
        moments = [one for one in outcomes if one.name.endswith(("exp_avg", "exp_avg_sq"))]
        assert len(moments) > 8
        assert {one.verdict for one in moments} == {"equal"}
    distributed.barrier()
