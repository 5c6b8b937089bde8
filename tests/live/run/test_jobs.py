"""Jobs under torchrun, unedited: right ones raise nothing, and what is wrong at a model's first call is named."""

import pytest
import torch
from safetensors.torch import save_file

from tests.lanes import nightly
from tests.live.run.jobs import run

SHARDED = """
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
model = build()
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh["fsdp"])
fully_shard(model, mesh=mesh["fsdp"])
"""

ON_META = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
with torch.device("meta"):
    model = build()
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
whole = torch.load("weights.pt", weights_only=True)
options = StateDictOptions(full_state_dict=True)
"""


def saved(folder):
    torch.manual_seed(3)
    layers = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.LayerNorm(16)
    )
    weights = {name: value.contiguous() for name, value in layers.state_dict().items()}
    weights["3.weight"] = torch.randn(16)
    torch.save(weights, folder / "weights.pt")
    save_file(weights, folder / "weights.safetensors")


def findings(ran, number=1):
    return [(one.kind, one.tensor) for one in ran.report(number).findings]


def test_a_job_that_shards_what_it_built_is_in_order_and_goes_on(tmp_path):
    ran = run(tmp_path, SHARDED + "loss, _ = train(model)\nprint('trained', flush=True)\n")
    assert ran.code == 0, ran.err
    assert "✓ 0.weight    float32[32/tp/fsdp, 16]" in ran.out
    assert "trained" not in ran.out
    assert ran.err.count("trained") == 2
    assert "values of Sequential are compared with the values before sharding" in ran.err
    assert not list(tmp_path.glob(".job*"))


def test_shards_exchanged_after_sharding_are_named(tmp_path):
    ran = run(tmp_path, SHARDED + "exchange(model[0].weight)\ntrain(model)\n")
    assert ran.code == 1, ran.err
    assert findings(ran) == [("misordered", "0.weight")]


@nightly
def test_weights_written_again_after_sharding_are_not_checked(tmp_path):
    again = "torch.manual_seed(rank)\nfor one in model[0].parameters(): nn.init.normal_(one.to_local())\n"
    ran = run(tmp_path, SHARDED + again + "train(model)\n", "-o", "job.shardviz")
    assert ran.code == 0, ran.err
    why = {one.tensor: one.why for one in ran.report().not_checked}
    assert "written after it was sharded" in why["0.weight"]
    assert "2.weight" not in why


@nightly
def test_a_model_on_meta_is_compared_with_the_state_dict_that_it_loads(tmp_path):
    saved(tmp_path)
    ran = run(tmp_path, ON_META + "set_model_state_dict(model, whole, options=options)\ntrain(model)\n")
    assert ran.code == 0, ran.err
    assert "the state dict that was loaded" in ran.err
    assert not {one.tensor for one in ran.report().not_checked} - {"3.bias"}  # zeros


@nightly
def test_shards_exchanged_after_a_load_are_named(tmp_path):
    saved(tmp_path)
    loaded = "set_model_state_dict(model, whole, options=options)\nexchange(model[2].weight)\ntrain(model)\n"
    ran = run(tmp_path, ON_META + loaded)
    assert ran.code == 1, ran.err
    assert findings(ran) == [("misordered", "2.weight")]


def test_one_ranks_load_skipped_is_named_beside_the_checkpoint(tmp_path):
    saved(tmp_path)
    skipped = """
for name, parameter in model.named_parameters():
    parts = whole[name].chunk(2)
    with torch.no_grad():
        parameter.to_local().copy_(parts[rank] if rank == 0 else torch.randn_like(parts[rank]))
train(model)
"""
    ran = run(tmp_path, ON_META + skipped, "--reference", "weights.safetensors")
    assert ran.code == 1, ran.err
    assert findings(ran) == [("foreign", "0.weight")]
    assert "1 finding in 6 of 6 tensors" in ran.out
    assert ran.report().findings[0].ranks == (1,)


@nightly
def test_a_model_on_meta_that_loads_nothing_known_says_that_placement_is_not_checked(tmp_path):
    saved(tmp_path)
    by_hand = "torch.manual_seed(rank)\nfor one in model.parameters(): nn.init.normal_(one.to_local())\ntrain(model)\n"
    ran = run(tmp_path, ON_META + by_hand)
    assert ran.code == 2, ran.err
    assert "it was on the meta device when it was sharded" in ran.out + ran.err


@nightly
def test_names_of_a_reference_are_mapped_by_a_file(tmp_path):
    saved(tmp_path)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    save_file({f"encoder.{name}": value for name, value in weights.items()}, tmp_path / "other.safetensors")
    (tmp_path / "names.txt").write_text("# the model's = the checkpoint's\n* = encoder.*\n")
    load = "set_model_state_dict(model, whole, options=options)\ntrain(model)\n"
    ran = run(tmp_path, ON_META + load, "--reference", "other.safetensors", "--map", "names.txt")
    assert ran.code == 0, ran.err
    assert "other.safetensors" in ran.err


TWO = """
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
class Teacher(nn.Sequential): pass
teacher, student = Teacher(*build()), build()
fully_shard(teacher, mesh=mesh)
fully_shard(student, mesh=mesh)
with torch.no_grad():
    teacher(torch.randn(2, 16))
exchange(student[2].weight)
train(student)
"""


@nightly
def test_two_models_of_the_same_names_are_two_dumps(tmp_path):
    ran = run(tmp_path, TWO)
    assert ran.code == 1, ran.err
    assert findings(ran) == []
    assert findings(ran, 2) == [("misordered", "2.weight")]


def test_a_job_that_never_shards_is_not_silent(tmp_path):
    ran = run(tmp_path, "train(build())\n")
    assert ran.code == 2
    assert "no sharding call was seen: 2 ranks joined a process group" in ran.err
    assert "Hint: where your own code shards, call shardviz.capture" in ran.err
    assert not (tmp_path / "job.shardviz").exists()


@nightly
def test_a_job_that_raises_on_one_rank_fails_and_what_was_captured_is_reported(tmp_path):
    ran = run(tmp_path, SHARDED + "train(model)\nif rank == 1: raise SystemError('lost a disk')\n")
    assert ran.code == 3
    assert "✓ 0.weight" in ran.out
    assert "lost a disk" in ran.err
    assert "the job failed" in ran.err
    assert "exited with 1" in ran.err


@nightly
def test_a_rank_that_does_not_call_the_model_is_named_and_nobody_hangs(tmp_path):
    alone = """
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = build()
parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=None)})
if rank == 0:
    class Alone(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
        def forward(self, x):
            return x
    Alone(model)(torch.randn(2, 16))
"""
    ran = run(tmp_path, alone, "--patience", "2")
    assert ran.code == 2, ran.err
    assert "not captured: Alone: rank 1 did not call it within 2 s" in ran.err


@nightly
def test_a_job_ends_after_the_steps_that_were_asked_for(tmp_path):
    ran = run(tmp_path, SHARDED + "train(model, steps=10**9)\n", "--steps", "2")
    assert ran.code == 0, ran.err
    assert "✓ 0.weight" in ran.out


SPAWN = """
import os, torch
import torch.multiprocessing as mp
from torch import nn, distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    model(torch.randn(2, 8)).sum().backward()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, (os.getcwd(),), nprocs=2)
"""


@nightly
def test_a_script_that_spawns_its_own_ranks_is_captured(tmp_path):
    import sys

    ran = run(tmp_path, SPAWN, command=(sys.executable,), whole=True)
    assert ran.code == 0, ran.err
    assert "✓ [0-1].weight  float32[8/fsdp, 8]" in ran.out


DDP = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(rank)  # DDP sends rank 0's values to the others
model = DistributedDataParallel(build())
if "broken" in sys.argv:
    with torch.no_grad():
        model.module[0].weight[rank] = 7.0
train(model)
"""


@nightly
@pytest.mark.parametrize(("words", "code"), [((), 0), (("broken",), 1)])
def test_ddp_copies_are_compared_with_rank_0s(tmp_path, words, code):
    ran = run(tmp_path, DDP, words=words)
    assert ran.code == code, ran.err + ran.out
    assert "✓ 2.weight" in ran.out


FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(build(), use_orig_params=True, device_id=torch.device("cpu"))
train(model)
"""


@nightly
def test_fsdp1s_flat_parameters_are_in_order(tmp_path):
    ran = run(tmp_path, FSDP1)
    assert ran.code == 0, ran.err
    assert "✓ 0.weight" in ran.out


COMPILED = """
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
model = build()
fully_shard(model, mesh=mesh)
model = torch.compile(model, backend="eager")
train(model)
"""


@nightly
def test_a_compiled_model_keeps_its_names(tmp_path):
    ran = run(tmp_path, COMPILED)
    assert ran.code == 0, ran.err
    assert "✓ 0.weight  float32[32/fsdp, 16]" in ran.out


DCP = """
import torch.distributed.checkpoint as dcp
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
model = build()
fully_shard(model, mesh=mesh)
dcp.save(model.state_dict(), checkpoint_id="saved")
with torch.device("meta"):
    other = build()
fully_shard(other, mesh=mesh)
other.to_empty(device="cpu")
values = other.state_dict()
dcp.load(values, checkpoint_id="saved")
other.load_state_dict(values)
train(other)
"""


@nightly
def test_a_dcp_folder_is_a_reference_or_it_is_said_why_not(tmp_path):
    ran = run(tmp_path, DCP)
    assert ran.code in (0, 2), ran.err
    assert ("saved" in ran.err) if ran.code == 0 else ("is not compared with it" in ran.err)


PIPELINE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
whole = build()
part = nn.Sequential(*(whole[:2] if rank == 0 else whole[2:]))
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).pow(2).sum())
for _ in range(2):
    if rank == 0:
        schedule.step(torch.randn(4, 16))
    else:
        schedule.step(target=torch.zeros(4, 16))
"""


@nightly
def test_a_pipelines_stages_are_captured_before_its_first_step(tmp_path):
    ran = run(tmp_path, PIPELINE)
    assert "captured" not in ran.err or ran.code in (0, 2), ran.err
    assert (tmp_path / "job.shardviz").exists(), ran.err
