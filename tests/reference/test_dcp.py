"""A folder that torch.distributed.checkpoint wrote, optimizer beside the model, is a reference for a job's weights."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.check.run import check_dump
from shardviz.checkpoint.open import open_checkpoint
from shardviz.errors import ShardvizError
from shardviz.testing import spmd
from tests.lanes import at_night

TP = {"tp": 2}


def built(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 48)).to(dtype)


def sharded(mesh, dtype=torch.float32):
    model = built(dtype)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def saved(shard_dump, model, wrap=lambda model, optimizer: {"app": {"model": model, "optimizer": optimizer}}):
    """Write a folder beside the dump, after a step of Adam; its path."""
    optimizer = torch.optim.Adam(model.parameters())
    sum((parameter * parameter).sum() for parameter in model.parameters()).backward()
    optimizer.step()
    folder = shard_dump.with_name("step-1")
    checkpoint.save(wrap(*get_state_dict(model, optimizer)), checkpoint_id=folder)
    return folder


@spmd(mesh={"fsdp": 2, "tp": 2})
@pytest.mark.parametrize("dtype", [torch.bfloat16, *at_night([torch.float32])], ids=str)
def test_a_model_is_found_beside_its_optimizer(mesh, dtype, shard_dump):
    model = sharded(mesh, dtype)
    folder = saved(shard_dump, model)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=folder)
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())


@spmd(mesh={"fsdp": 2, "tp": 2})
def test_a_checkpoint_of_four_ranks_finds_shards_exchanged_on_another_mesh(mesh, shard_dump):
    model = sharded(mesh)
    folder = saved(shard_dump, model)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    other, flat = built(), mesh["fsdp", "tp"]._flatten("all")
    for module, name in ((other[0], "0"), (other[2], "2")):
        wrong = (flat.get_local_rank() + (name == "2")) % 4
        mine = full[f"{name}.weight"].chunk(4)[wrong].detach().contiguous()
        module.weight = nn.Parameter(DTensor.from_local(mine, flat, [Shard(0)]))
        module.bias = nn.Parameter(full[f"{name}.bias"].detach())
    shardviz.capture(other, shard_dump, mesh=flat, reference=folder)
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, finding.tensor) == ("misordered", "2.weight")


@spmd(mesh=TP)
def test_flattened_parameters_of_fsdp1_are_found(mesh, shard_dump):
    model = built()
    folder = saved(shard_dump, model)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    shardviz.capture(wrapped, shard_dump, mesh=mesh, reference=folder)
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())


@spmd(mesh=TP)
def test_two_models_in_one_checkpoint_are_told_apart_by_reference_names(mesh, shard_dump):
    model = built()
    folder = saved(shard_dump, model, lambda model, _: {"actor": model, "critic": model})
    with pytest.raises(ShardvizError, match=r"has the model's names 2 times: behind actor\., critic\."):
        shardviz.capture(model, shard_dump, mesh=mesh, reference=folder)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=folder, reference_names={"*": "critic.*"})
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())


@spmd(mesh=TP)
def test_a_checkpoint_that_lacks_a_file_is_refused_on_every_rank(mesh, shard_dump):
    model = built()
    folder = saved(shard_dump, model)
    distributed.barrier()
    if mesh.get_rank() == 0:
        (folder / "__0_0.distcp").unlink()
    distributed.barrier()
    with pytest.raises(ShardvizError, match=r"lacks __0_0\.distcp, which \.metadata names"):
        shardviz.capture(model, shard_dump, mesh=mesh, reference=folder)


@spmd(mesh=TP)
def test_a_damaged_tensor_is_not_checked_and_the_others_are(mesh, shard_dump):
    model = built()
    folder = saved(shard_dump, model)
    place = next(iter(open_checkpoint(folder).tensors["app.model.0.weight"].chunks)).place
    distributed.barrier()
    if mesh.get_rank() == 0:
        data = bytearray((folder / place.file).read_bytes())
        data[place.start : place.start + 400] = bytes(400)
        (folder / place.file).write_bytes(data)
    distributed.barrier()
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, reference=folder)
    report = check_dump(shard_dump)
    assert report.findings == ()
    assert {one.tensor for one in report.not_checked} == {"0.weight"}
    assert "damaged" in report.not_checked[0].why
