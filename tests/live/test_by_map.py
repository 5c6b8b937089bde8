"""Weights beside a checkpoint that they are made of: the same maps as `shardviz diff`, from either side."""

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd
from tests.live.test_by_reference import TP, beside

MAP = {"up": "cat(w1, w3, 0)", "down": "transpose(w2)"}


class Fused(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)


def parts():
    made = torch.Generator().manual_seed(0)
    sizes = {"w1": (24, 16), "w2": (20, 32), "w3": (24, 16)}
    return {name: torch.randn(*size, generator=made) for name, size in sizes.items()}


def saved(path, tensors):
    if torch.distributed.get_rank() == 0:
        save_file({name: one.contiguous() for name, one in tensors.items()}, path)
    torch.distributed.barrier()
    return path


@spmd(mesh=TP)
def test_a_weight_that_is_made_of_several_is_looked_up_in_them(mesh, shard_dump):
    one = parts()
    reference = saved(beside(shard_dump), one)
    model = fully_shard(Fused(torch.cat([one["w1"], one["w3"]]), one["w2"].t().contiguous()), mesh=mesh)
    shardviz.capture(model, shard_dump, reference=reference, reference_names=MAP)
    report = check_dump(shard_dump)
    assert report.findings == report.not_checked == ()
    wrong = fully_shard(Fused(torch.cat([one["w3"], one["w1"]]), one["w2"].t().contiguous()), mesh=mesh)
    shardviz.capture(wrong, shard_dump, reference=reference, reference_names=MAP, force=True)
    report = check_dump(shard_dump)
    assert [finding.tensor for finding in report.findings] == ["up"]
    assert report.not_checked == ()


@spmd(mesh=TP)
def test_a_map_that_has_the_models_names_on_its_right_is_turned(mesh, shard_dump):
    one = parts()
    reference = saved(beside(shard_dump), {"up": torch.cat([one["w1"], one["w3"]]), "down": one["w2"].t()})
    model = nn.ParameterDict(one)
    shardviz.capture(fully_shard(model, mesh=mesh), shard_dump, reference=reference, reference_names=MAP)
    report = check_dump(shard_dump)
    assert report.findings == report.not_checked == ()
