"""Tensors whose elements are elsewhere are named with their class, and never called wrong."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd
from tests.lanes import nightly

TP = {"tp": 2}


class Coded(torch.Tensor):
    """A weight whose elements are those of another tensor, plus one."""

    @staticmethod
    def __new__(cls, code):
        return torch.Tensor._make_wrapper_subclass(cls, code.shape, dtype=torch.float32)

    def __init__(self, code):
        self.code = code

    def __tensor_flatten__(self):
        return ["code"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("detach", "alias", "view"):
            return cls(args[0].code)
        raise NotImplementedError(name)


def with_a_coded_weight(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(Coded(torch.full((4, 4), mesh.get_rank(), dtype=torch.int8)), requires_grad=False)
    return model


@spmd(mesh=TP)
def test_a_wrapper_subclass_is_named_and_not_called_wrong(mesh, shard_dump):
    shardviz.capture(with_a_coded_weight(mesh), shard_dump, mesh=mesh)
    report = check_dump(shard_dump)
    assert report.findings == ()
    (why,) = [one.why for one in report.not_checked if one.tensor == "0.weight"]
    assert why.endswith("Coded, which keeps them in code")


@spmd(mesh=TP)
def test_what_is_beside_a_subclass_is_still_checked(mesh, shard_dump):
    model = with_a_coded_weight(mesh)
    with torch.no_grad():
        model[1].weight += mesh.get_rank()
    shardviz.capture(model, shard_dump, mesh=mesh)
    report = check_dump(shard_dump)
    assert [(one.kind, one.tensor) for one in report.findings] == [("unreplicated", "1.weight")]


@spmd(mesh=TP)
def test_shards_of_a_subclass_are_named_and_a_stamped_model_keeps_its_other_tensors(mesh, shard_dump):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stamps = shardviz.stamp(model)
    coded = DTensor.from_local(Coded(torch.ones(2, 4, dtype=torch.int8)), mesh, [Shard(0)], run_check=False)
    model[0].weight = nn.Parameter(coded, requires_grad=False)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    report = check_dump(shard_dump)
    assert report.findings == ()
    assert [one.tensor for one in report.not_checked] == ["0.weight"]


@spmd(mesh=TP)
def test_a_sparse_buffer_is_named(mesh, shard_dump):
    model = nn.Linear(4, 4)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    shardviz.capture(model, shard_dump, mesh=mesh)
    found = {one.tensor: one.why for one in check_dump(shard_dump).not_checked}
    assert "torch.sparse_coo" in found["adjacency"]


@nightly
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@spmd(mesh=TP)
def test_weights_that_torchao_quantized_are_named_by_their_class(mesh, shard_dump, config):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install -e '.[frameworks]'")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    quantization.quantize_(model, getattr(quantization, config)())
    shardviz.capture(model, shard_dump, mesh=mesh)
    report = check_dump(shard_dump)
    assert report.findings == ()
    (why,) = [one.why for one in report.not_checked if one.tensor == "0.weight"]
    assert "torchao." in why
    assert "qdata" in why
