"""Jobs under torchrun, unedited: right ones raise nothing, and what is wrong at a model's first call is named."""

import pytest
from safetensors.torch import save_file

from tests.lanes import nightly
from tests.live.run.jobs import ON_FOUR, ON_META, ON_TWO_RANKS, run, save_weights

SHARDED = """
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
model = build()
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh["fsdp"])
fully_shard(model, mesh=mesh["fsdp"])
"""

WHOLE = """
import io
whole = torch.load(io.BytesIO(open("weights.pt", "rb").read()))["model"]
"""
"""Weights from a place that no hook sees: the file that a job opens would be compared with."""


def findings(ran, number=1):
    return [(one.kind, one.tensor) for one in ran.report(number).findings]


@nightly  # the demo of jobs runs one every day
def test_a_job_that_shards_what_it_built_is_in_order_and_goes_on(tmp_path):
    ran = run(tmp_path, SHARDED + "loss, _ = train(model)\nprint('trained', flush=True)\n")
    assert ran.code == 0, ran.err
    assert "✓ 0.weight    float32[32/tp/fsdp, 16]" in ran.out
    assert "trained" not in ran.out
    assert ran.err.count("trained") == 2
    assert "values of Sequential are compared with the values before sharding" in ran.err
    assert not list(tmp_path.glob(".job*"))


@nightly  # tests/live/run/test_watch.py exchanges shards every day
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
    save_weights(tmp_path)
    ran = run(tmp_path, ON_META + WHOLE + "set_model_state_dict(model, whole, options=full)\ntrain(model)\n")
    assert ran.code == 0, ran.err
    assert "the state dict that was loaded" in ran.err
    assert not {one.tensor for one in ran.report().not_checked} - {"3.bias"}  # zeros


@nightly
def test_shards_exchanged_after_a_load_are_named(tmp_path):
    save_weights(tmp_path)
    loaded = "set_model_state_dict(model, whole, options=full)\nexchange(model[2].weight)\ntrain(model)\n"
    ran = run(tmp_path, ON_META + WHOLE + loaded)
    assert ran.code == 1, ran.err
    assert findings(ran) == [("misordered", "2.weight")]


@nightly
def test_one_ranks_load_skipped_is_named_beside_the_checkpoint(tmp_path):
    save_weights(tmp_path)
    skipped = """
for name, parameter in model.named_parameters():
    parts = whole[name].chunk(2)
    with torch.no_grad():
        parameter.to_local().copy_(parts[rank] if rank == 0 else torch.randn_like(parts[rank]))
train(model)
"""
    ran = run(tmp_path, ON_META + WHOLE + skipped, "--reference", "weights.safetensors")
    assert ran.code == 1, ran.err
    assert findings(ran) == [("foreign", "0.weight"), ("foreign", "3.bias")]  # rank 0's zeros could be of anything
    assert "in 6 of 6 tensors" in ran.out
    assert {finding.ranks for finding in ran.report().findings} == {(1,)}


@nightly
def test_a_model_on_meta_that_loads_nothing_known_says_that_placement_is_not_checked(tmp_path):
    save_weights(tmp_path)
    by_hand = "torch.manual_seed(rank)\nfor one in model.parameters(): nn.init.normal_(one.to_local())\ntrain(model)\n"
    ran = run(tmp_path, ON_META + WHOLE + by_hand)
    assert ran.code == 2, ran.err
    assert "it was on the meta device when it was sharded" in ran.out + ran.err


@nightly
def test_names_of_a_reference_are_mapped_by_a_file(tmp_path):
    weights = save_weights(tmp_path)
    save_file({f"encoder.{name}": value for name, value in weights.items()}, tmp_path / "other.safetensors")
    (tmp_path / "names.txt").write_text("# the model's = the checkpoint's\n* = encoder.*\n")
    load = "set_model_state_dict(model, whole, options=full)\ntrain(model)\n"
    ran = run(tmp_path, ON_META + WHOLE + load, "--reference", "other.safetensors", "--map", "names.txt")
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


AVERAGED = (
    SHARDED
    + """
average = build().requires_grad_(False)
fully_shard(average)
if sys.argv[1:]:
    exchange(average[0].weight)
train(model)
"""
)


@nightly
@pytest.mark.parametrize(("words", "found"), [((), []), (("broken",), [("misordered", "0.weight")])])
def test_a_moving_average_that_is_never_called_is_captured_too(tmp_path, words, found):
    ran = run(tmp_path, AVERAGED, words=words)
    assert ran.code == bool(found), ran.err
    assert findings(ran) == []
    assert findings(ran, 2) == found


@nightly
def test_a_job_that_never_shards_is_not_silent(tmp_path):
    ran = run(tmp_path, "train(build())\n")
    assert ran.code == 2
    assert "no sharding call was seen: 2 ranks joined a process group" in ran.err
    assert "Hint: if your own code shards, call shardviz.capture" in ran.err
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
    if os.path.exists("store"):  # of a run that gloo aborted at its exit, after which there is another
        os.remove("store")
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


OVER_TENSOR_PARALLEL = """
from torch.distributed.fsdp import FullyShardedDataParallel
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = build()
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu"))
train(model)
"""


@nightly
def test_stretches_of_tensor_parallel_shards_are_no_copies(tmp_path):
    ran = run(tmp_path, OVER_TENSOR_PARALLEL, command=ON_FOUR)
    assert ran.code == 0, ran.err + ran.out
    assert {one.tensor for one in ran.report().not_checked} == {"0.weight", "0.bias", "2.weight"}


@nightly
def test_a_compiled_model_keeps_its_names(tmp_path):
    ran = run(tmp_path, ON_TWO_RANKS + 'model = torch.compile(model, backend="eager")\ntrain(model)\n')
    assert ran.code == 0, ran.err
    assert "✓ 0.weight  float32[32/fsdp, 16]" in ran.out


DCP = """
values = model.state_dict()
dcp.load(values, checkpoint_id="dcp")
model.load_state_dict(values)
"""


@nightly
@pytest.mark.parametrize("wrong", ["", "2.weight"])
def test_a_dcp_folder_is_what_its_load_is_compared_with(tmp_path, wrong):
    save_weights(tmp_path)
    exchanged = f"exchange(dict(model.named_parameters())['{wrong}'])\n" if wrong else ""
    ran = run(tmp_path, ON_META + DCP + exchanged + "train(model)\n")
    assert ran.code == bool(wrong), ran.err + ran.out
    assert "values of Sequential are compared with dcp" in ran.err
    assert findings(ran) == ([("misordered", wrong)] if wrong else [])
    assert not {one.tensor for one in ran.report().not_checked} - {"3.bias"}  # zeros


PIPELINE = """
from collections import OrderedDict
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
whole = build()
part = nn.Sequential(OrderedDict((name, one) for name, one in whole.named_children() if (name < "2") == (rank == 0)))
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).pow(2).sum())
if "broken" in sys.argv and rank == 1:
    with torch.no_grad():
        part[0].weight.copy_(part[0].weight.roll(4, 0))
for _ in range(2):
    if rank == 0:
        schedule.step(torch.randn(4, 16))
    else:
        schedule.step(target=torch.zeros(4, 16))
"""


@nightly
@pytest.mark.parametrize("words", [(), ("broken",)])
def test_a_pipelines_stages_are_compared_with_the_checkpoint_before_its_first_step(tmp_path, words):
    save_weights(tmp_path)
    loads = "whole.load_state_dict(torch.load('weights.pt')['model'])\n"
    body = PIPELINE.replace("part = nn", loads + "part = nn")
    ran = run(tmp_path, body, "--reference", "weights.safetensors", words=words)
    assert ran.code == len(words), ran.err + ran.out
    assert "✓ 0.weight" in ran.out
    assert [one.tensor for one in ran.report().findings] == ["2.weight"] * len(words)
    assert not {one.tensor for one in ran.report().not_checked} - {"3.bias"}  # zeros


BY_HAND = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(rank)  # the halves of two weights that this rank would take from whole ones
groups = [dist.new_group([one]) for one in range(2)]
model = DistributedDataParallel(build(), process_group=groups[rank])
train(model)
"""


@nightly
def test_parts_cut_by_hand_beside_ddp_are_not_called_copies(tmp_path):
    ran = run(tmp_path, BY_HAND)
    assert ran.code == 2, ran.err
    assert "DistributedDataParallel averages over 1 of 2 ranks, and the model has no DTensor" in ran.err
    assert "unreplicated" not in ran.out
