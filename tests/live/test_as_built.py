"""Shards that repeat each other: drawn on every rank with one seed, or built so and split rightly."""

import math

import pytest
import torch
from torch import nn

from shardviz.layout.mesh import Mesh
from shardviz.live.step.unsharded.late_weights import as_built, repeating
from tests.live.probing import checked

EXPERTS = """
from torch.distributed.tensor import distribute_tensor, DTensor, Shard
from torch import distributed
BATCH_AXES = ()
del batch
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter({values})
def build(): return Experts()
def parallelize(model, mesh): model.w = nn.Parameter(distribute_tensor(model.w.data, mesh, [Shard({dim})]))
"""
COPIED = "torch.randn(3, 2).repeat(4, 1, 1)"
DRAWN = "torch.randn(4, 3, 2)"
ONE_SEED = """
def initialize(model, mesh):
    torch.manual_seed(5)
    model.w.to_local().data.normal_()
"""
ONE_FILE = """
def initialize(model, mesh):
    local = model.w.to_local().data
    distributed.broadcast(local, 0)
"""


@pytest.mark.parametrize(
    ("values", "dim"), [(COPIED, 0), ("torch.randn(3, 1).repeat(1, 8)", 1), ("torch.randn(2, 5).repeat(2, 1)", 0)]
)
def test_parts_that_were_built_alike_are_no_identical_shards(values, dim, tmp_path):
    assert checked(EXPERTS.format(values=values, dim=dim), "dp=2", tmp_path).findings == ()


@pytest.mark.parametrize("values", [COPIED, DRAWN])
@pytest.mark.parametrize("after", [ONE_SEED, ONE_FILE])
def test_shards_that_were_drawn_or_loaded_alike_are(values, after, tmp_path):
    report = checked(EXPERTS.format(values=values, dim=0) + after, "dp=2", tmp_path)
    wanted = [] if (values, after) == (COPIED, ONE_FILE) else ["identical-shards"]  # what is sent is what is there
    assert [one.kind for one in report.findings] == wanted


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "uint8", "complex128"])
@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (4, 4)])
def test_elements_of_all_types_are_laid_side_by_side(name, shape):
    dtype = getattr(torch, name, torch.float8_e4m3fn)  # torch 2.6 has no float4
    same = torch.ones(shape, dtype=torch.complex128 if name == "complex128" else torch.uint8)
    model = nn.Module()
    model.register_buffer("same", same.view(dtype))
    model.register_buffer("other", (same.flatten().cumsum(0).to(same.dtype).reshape(shape)).view(dtype))
    model.register_buffer("none", torch.empty(0, 4).to(same.dtype).view(dtype))
    mesh = Mesh(("dp",), (2,))
    found = {name: one for name, one in repeating(model, mesh).items() if one.values.numel()}
    assert sorted(found) == (["same"] if math.prod(shape) > 1 else [])
    assert as_built(model, found, mesh, 0) == sorted(found)
    same += 1
    assert as_built(model, found, mesh, 0) == []


ENGINE = """
BATCH_AXES = ()
del batch
def parallelize(model, mesh):
    engine = {engine}
    with torch.no_grad():
        for param in engine.parameters():
            param.fill_({value})
        for (name, param), loaded in zip(engine.named_parameters(), model.parameters()):
            if name in {names}:
                param.copy_(loaded)
    return engine
"""


@pytest.mark.parametrize("value", [-1.0, 1.0, 0.25])
def test_a_weight_that_no_load_wrote_keeps_its_number_while_others_are_loaded(value, tmp_path):
    text = ENGINE.format(engine="build()", value=value, names=["0.weight", "2.bias"])
    report = checked(text, "dp=2", tmp_path)
    assert [(finding.kind, finding.explanation.name, finding.tensors) for finding in report.findings] == [
        ("foreign", "placeholder-left", ("0.bias", "2.weight"))
    ]


def test_weights_that_all_are_drawn_again_keep_a_number_that_is_right(tmp_path):
    text = (
        "def build():\n    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))\n"
        "    nn.init.normal_(model[1].weight)\n    return model\n"
        "def parallelize(model, mesh):\n    for module in model:\n        module.reset_parameters()\n"
    )
    report = checked(f"BATCH_AXES = ()\ndel batch\n{text}", "dp=2", tmp_path)
    assert report.findings == ()
