"""Buffers that ranks make again for their own part of a stamped model, and weights that are put together of others."""

import pytest
import torch
from torch import nn

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import ShardAssertionError, assert_ordered, spmd, stamp


class Heads(nn.Module):
    """Four heads, each with a slope; the statistics begin at one, which is the id of the first weight."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.register_buffer("slopes", 0.5 ** torch.arange(1, 5), persistent=False)
        self.register_buffer("statistics", torch.ones(4), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)


def stamped(mesh):
    model = Heads()
    stamp(model)
    rank = mesh.get_local_rank()
    model.q.weight, model.k.weight = (nn.Parameter(w.detach().chunk(2)[rank].clone()) for w in model.parameters())
    return model


@spmd(mesh={"tp": 2})
def test_parts_of_what_was_built_are_in_order(mesh):
    model = stamped(mesh)
    model.slopes = (0.5 ** torch.arange(1, 5)).chunk(2)[mesh.get_local_rank()].clone()
    model.statistics, model.mask = torch.ones(2), model.mask[:2] if mesh.get_local_rank() == 0 else model.mask[2:]
    assert_ordered(model)


@spmd(mesh={"tp": 2})
def test_a_part_of_ids_on_every_rank_is_found(mesh):
    model = stamped(mesh)
    model.slopes = model.slopes[:2]
    with pytest.raises(ShardAssertionError, match="all ranks along tp hold the same part"):
        assert_ordered(model)


@pytest.mark.parametrize(("which", "kinds"), [("rank", set()), ("0", {"duplicated", "missing"})])
@spmd(mesh={"tp": 2})
def test_a_weight_of_two_has_a_part_of_each(mesh, which, kinds, shard_dump):
    model = Heads()
    stamps = stamp(model)
    rank = mesh.get_local_rank() if which == "rank" else 0
    joined = torch.cat([w.detach().chunk(2)[rank] for w in model.parameters()])
    model.both = nn.Linear(4, 8, bias=False)
    model.both.weight = nn.Parameter(joined)
    del model.q, model.k
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    report = check_dump(shard_dump)
    assert {finding.kind for finding in report.findings} == kinds
    assert "both.weight" not in {entry.tensor for entry in report.not_checked}
