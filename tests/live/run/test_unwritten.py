"""Parameters that nothing was written to after `to_empty`, and the many ways in which others were."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardviz.live.run.references.values import Unwritten
from shardviz.testing import spmd
from tests.lanes import nightly
from tests.live.run.jobs import ON_META, run

PATTERN = torch.arange(1000.0)


def allocated(mesh, *, plain=False, fresh=()):
    """Return a model on memory that others used before; on fresh pages, which are zero, on some ranks."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 6))
    if not plain:
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        local = parameter.data if plain else parameter.to_local().data
        local.copy_(PATTERN[: local.numel()].view(local.shape) * (mesh.get_rank() not in fresh))
    unwritten = Unwritten()
    unwritten.remember(model)
    return model, unwritten


def copy_locals(model):
    for parameter in model.parameters():
        parameter.to_local().copy_(torch.ones_like(parameter.to_local()))


def set_data(model):
    for parameter in model.parameters():
        parameter.data.fill_(1.0)


def write_the_same(model):
    for parameter in model.parameters():
        parameter.copy_(parameter.clone())


def load(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def assign(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def reset(model):
    for part in (model[0], model[1], model[2]):
        part.reset_parameters()


WAYS = [copy_locals, set_data, write_the_same, load, assign, reset]


@nightly
@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__)
def test_what_was_written_in_any_way_is_not_named(mesh, write):
    model, unwritten = allocated(mesh)
    assert len(unwritten.names(model)) == 6
    with torch.no_grad():
        write(model)
    assert unwritten.names(model) == set()


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("plain", [False, True])
def test_what_an_init_function_forgot_is_named(mesh, plain):
    model, unwritten = allocated(mesh, plain=plain)
    model[0].reset_parameters()
    model[1].reset_parameters()
    assert unwritten.names(model) == {"2.weight", "2.bias"}


@spmd(mesh={"fsdp": 2})
def test_zero_pages_say_nothing_unless_another_rank_shows_that_nothing_was_written(mesh):
    model, unwritten = allocated(mesh, fresh=(0, 1))
    assert unwritten.names(model) == set()
    model, unwritten = allocated(mesh, fresh=(1,))
    assert len(unwritten.names(model)) == 6


USED = (
    "used = [torch.randn(size) for size in (256, 128, 16, 8) for _ in range(50)]\ndel used\ntorch.manual_seed(rank)\n"
)
"""Makes it likely that `to_empty` gets memory that is not a fresh page."""


@nightly
def test_a_jobs_init_that_forgets_a_layer_is_one_finding(tmp_path):
    forgot = "model[0].reset_parameters()\nmodel[3].reset_parameters()\ntrain(model, seed=rank)\n"
    ran = run(tmp_path, USED + ON_META + forgot)
    assert ran.code == 1, ran.err
    (finding,) = ran.report().findings
    assert (finding.kind, finding.ranks) == ("foreign", (0, 1))
    assert {one.tensor for one in finding.each} == {"2.weight", "2.bias"}
    assert "to_empty" in finding.cause
    assert {one.tensor for one in ran.report().not_checked} == {"0.weight", "0.bias", "3.weight", "3.bias"}


@nightly
def test_a_job_whose_init_reaches_everything_has_no_finding(tmp_path):
    ran = run(tmp_path, USED + ON_META + "for i in (0, 2, 3): model[i].reset_parameters()\ntrain(model)\n")
    assert ran.code in (0, 2), ran.err
    assert not ran.report().findings
