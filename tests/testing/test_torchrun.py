"""Assertions in a script of the user's own: every rank fails, rank 0 tells the whole. Nightly under torchrun itself."""

import sys

from shardviz.live.world import launch
from tests.lanes import nightly
from tests.testing.sessions import execute

IMPORTS = """
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from shardviz.testing import assert_layout, assert_ordered, assert_reduced, assert_replicated, stamp

"""
SCRIPT = """
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
"""
JOB = f'{IMPORTS}distributed.init_process_group("gloo"){SCRIPT}distributed.destroy_process_group()\n'


def follow(_world, text):
    """Run lines of a script on a rank that is part of a job."""
    exec(text, {})


def test_assertions_hold_in_a_job_and_fail_on_all_ranks_with_one_story():
    printed = {}
    launch(f"{__name__}:follow", (IMPORTS + SCRIPT,), num_ranks=4, on_output=printed.__setitem__)
    assert_is_the_story(printed[0])
    assert not any(printed[rank] for rank in (1, 2, 3))


@nightly
def test_assertions_tell_the_same_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(JOB)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = execute([*launcher, "train.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_is_the_story(done.stdout)


def assert_is_the_story(printed):
    lines = printed.splitlines()
    assert lines[0] == "all is right"
    assert lines[1] == "lines: True False False False"
    assert lines[2] == (
        "weight: 4 of 4 ranks claim float32[6/shard, 8], not the intended [*, */shard] (see rank 0 for the full report)"
    )
