"""`assert_layout` on a stamped model: what ranks hold stands between what they claim and what is intended."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardviz
from shardviz.live.capture.stamp import stamps_of
from shardviz.testing import ShardAssertionError, assert_layout, spmd, stamp

FSDP_TP = {"fsdp": 2, "tp": 2}


def lines_of(subject, layouts):
    with pytest.raises(ShardAssertionError) as caught:
        assert_layout(subject, layouts)
    return str(caught.value).splitlines()


def left_to_right(mesh):
    """A weight split over tp and then fsdp, labeled as if it were the other way round."""
    model = nn.Linear(3, 12, bias=False)
    stamp(model)
    local = model.weight.detach().chunk(2)[mesh.get_local_rank("tp")].chunk(2)[mesh.get_local_rank("fsdp")]
    label = {"placements": (Shard(0), Shard(0)), "run_check": False, "shape": (12, 3), "stride": (3, 1)}
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, **label))
    return model


@spmd(mesh=FSDP_TP)
def test_a_label_that_is_wrong_stands_beside_what_is_held_and_is_drawn_so(mesh):
    lines = lines_of(left_to_right(mesh), "[*/tp/fsdp, *]")
    assert lines[1:5] == [
        "  ranks     0-3",
        "  claimed   float32[12/fsdp/tp, 3]",
        "  held      float32[12/tp/fsdp, 3]",
        "  intended  [*/tp/fsdp, *]",
    ]
    assert lines[6].split()[:2] == ["claimed", "held"]
    assert any("✗ 2" in line for line in lines)


@spmd(mesh=FSDP_TP)
def test_a_plain_tensor_is_reported_by_what_each_rank_holds_of_it(mesh):
    model = nn.Linear(3, 12, bias=False)
    stamp(model)
    model.weight = nn.Parameter(model.weight.detach().chunk(2)[mesh.get_local_rank("tp")].clone())
    lines = lines_of(model, "[*/fsdp, *]")
    assert lines[2:5] == [
        "  claimed   float32[6, 3], plain",
        "  held      float32[12/tp, 3]",
        "  intended  [*/fsdp, *]",
    ]


@spmd(mesh={"fsdp": 2})
def test_weights_that_were_drawn_anew_are_not_taken_for_ids(mesh):
    model = nn.Linear(4, 4, bias=False)
    stamp(model)
    fully_shard(model, mesh=mesh)
    nn.init.normal_(model.weight)
    lines = lines_of(model, "[*, */fsdp]")
    assert lines[2:4] == ["  claimed   float32[4/fsdp, 4]", "  intended  [*, */fsdp]"]
    assert any(line.split() == ["claimed", "fsdp=0", "fsdp=1"] for line in lines)


@spmd(mesh={"fsdp": 2})
def test_what_a_bfloat16_model_holds_is_told_unless_it_was_cast_after_it_was_stamped(mesh):
    model = nn.Linear(40, 40, bias=False).to(torch.bfloat16)
    stamp(model)
    fully_shard(model, mesh=mesh)
    assert lines_of(model, "[*, */fsdp]")[3] == "  held      bfloat16[40/fsdp, 40]"
    model = nn.Linear(40, 40, bias=False)
    stamp(model)
    fully_shard(model.to(torch.bfloat16), mesh=mesh)
    lines = lines_of(model, "[*, */fsdp]")
    assert lines[2:4] == ["  claimed   bfloat16[40/fsdp, 40]", "  intended  [*, */fsdp]"]


@spmd(mesh=FSDP_TP)
def test_a_dump_of_a_stamped_model_tells_it_too(mesh, shard_dump):
    model = left_to_right(mesh)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps_of(model))
    assert "  held      float32[12/tp/fsdp, 3]" in lines_of(shard_dump, "[*/tp/fsdp, *]")
