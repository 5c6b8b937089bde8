"""One rank that raises in the middle of a capture: every rank hears of it at once, and the job goes on."""

import time

import pytest
import torch
from torch import distributed

from shardviz.errors import ShardvizError
from shardviz.live.capture import agreement
from shardviz.live.capture.agreement import OtherRankError, of_all_ranks, raise_together, together
from shardviz.testing import spmd
from tests.lanes import nightly
from tests.live.run.jobs import run
from tests.live.worlds import PATIENCE


def exchange_twice(rank, when, error):
    for moment in ("before the first", "between", "after the last"):
        if moment == when:
            raise error
        if moment != "after the last":
            assert of_all_ranks(rank) == [0, 1, 2]


@spmd(mesh={"dp": 3}, timeout=2 * PATIENCE)
@pytest.mark.parametrize("when", ["before the first", "between", "after the last"])
@pytest.mark.parametrize("error", [KeyError("lost"), ShardvizError("lost", "find it")])
def test_all_ranks_raise_where_one_does(mesh, when, error):
    begun = time.monotonic()
    rank = mesh.get_rank()
    with pytest.raises(type(error) if rank == 1 else OtherRankError) as raised, together():
        exchange_twice(rank, when if rank == 1 else "", error)
    if rank != 1:
        assert "rank 1 failed: " in raised.value.message
        assert "lost" in raised.value.message
        assert raised.value.hint == getattr(error, "hint", "")
    assert time.monotonic() - begun < PATIENCE
    total = torch.ones(1)
    distributed.all_reduce(total)  # the job's next collective is its own
    assert total.item() == 3


@spmd(mesh={"dp": 2})
def test_an_error_that_ranks_have_agreed_on_is_raised_by_each_and_nothing_is_left(mesh):
    with pytest.raises(ShardvizError, match="full") as raised, together(), together():
        raise_together(ShardvizError("full") if mesh.get_rank() == 1 else None)
    assert not isinstance(raised.value, OtherRankError)
    with together():
        assert of_all_ranks(mesh.get_rank()) == [0, 1]


@spmd(mesh={"dp": 2})
def test_a_rank_that_says_nothing_of_a_phase_is_named_by_those_that_wait_for_it(mesh, monkeypatch):
    monkeypatch.setattr(agreement, "LONG_PATIENCE", 0.2)
    if mesh.get_rank() == 0:
        with pytest.raises(OtherRankError, match="rank 1 did not finish loading in"):
            agreement.agreed_errors(None, "loading")


ODD = """
class Odd(nn.Sequential):
    is_odd = False
    def named_buffers(self, *args, **kwargs):
        if self.is_odd:
            raise KeyError("a buffer of mine")
        return super().named_buffers(*args, **kwargs)

first, model = build(), Odd(*build())
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
fully_shard(first, mesh=mesh)
fully_shard(model, mesh=mesh)
model.is_odd = rank == 1
with torch.no_grad():
    model(torch.randn(2, 16))
train(first)
print("trained", flush=True)
"""


@nightly
def test_a_capture_that_fails_on_one_rank_is_reported_and_the_job_goes_on(tmp_path):
    ran = run(tmp_path, ODD)
    assert ran.code == 2, ran.err
    assert ran.err.count("trained") == 2
    assert "not captured: Odd: rank 1 failed: KeyError" in ran.err
    assert "a buffer of mine" in ran.err
    assert "✓ 0.weight" in ran.out  # the other model's dump, which has the first number
    assert ran.report().findings == ()
