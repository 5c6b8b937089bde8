"""Checkpoints that DeepSpeed itself writes, read offline: the same as its own converter makes of them."""

import numpy as np
import pytest
from torch import distributed

import shardviz
from shardviz.check.run import check_dump
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
