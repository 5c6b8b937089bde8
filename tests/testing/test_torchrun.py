"""Assertions in a script of the user's own under torchrun: every rank fails, rank 0 tells the whole."""

import sys

from tests.testing.sessions import execute

SCRIPT = """
import torch, sys
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from shardviz.live.compat import fully_shard
from shardviz.testing import assert_layout, assert_ordered, assert_reduced, assert_replicated, stamp

distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Linear(8, 6)
stamp(model)
fully_shard(model, mesh=mesh)
assert_ordered(model)
assert_replicated(model, axis="replicate")
assert_layout(model, {"weight": "[*/shard, *]", "bias": "[*/shard]"})
if distributed.get_rank() == 0:
    print("all is right", flush=True)
try:
    assert_layout(model, {"weight": "[*, */shard]", "bias": None})
except AssertionError as error:
    told = [None] * 4
    distributed.all_gather_object(told, str(error))
    if distributed.get_rank() == 0:
        print("lines:", *[text.count(chr(10)) > 9 for text in told])
        print(told[3])
distributed.destroy_process_group()
"""


def test_assertions_hold_in_a_job_and_fail_on_all_ranks_with_one_story(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = execute([*launcher, "train.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "all is right"
    assert lines[1] == "lines: True False False False"
    assert lines[2] == (
        "weight: 4 of 4 ranks claim float32[6/shard, 8], not the intended [*, */shard] (see rank 0 for the full report)"
    )
