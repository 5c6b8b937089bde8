"""Parameters that shared storage before a job sharded its model, with values or on the meta device."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shardviz.check.run import check_dump
from shardviz.live.run.references.sources import Opened
from shardviz.live.run.taking import take
from shardviz.live.run.watching import Watch
from shardviz.testing import spmd
from tests.lanes import at_night, nightly


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(16.0))
        self.body.register_buffer("scale", self.scale)


def report_of(folder, mesh, change, device="cpu"):
    """Shard a model with tied parameters, load it where it was on the meta device, and return the report."""
    torch.manual_seed(0)
    file = folder / "weights.safetensors"
    whole = {name: value.detach().clone() for name, value in Tied().state_dict().items() if name != "head.weight"}
    if mesh.get_rank() == 0:
        save_file(whole, file)
    with torch.device(device):
        model = Tied()
    seen = Watch(folder / "job.shardviz").session
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    if device == "meta":
        seen.sources.append(Opened(file))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, one in [*model.named_parameters(), *model.named_buffers()]:
                sharded = isinstance(one, DTensor)
                one.copy_(distribute_tensor(whole[name], mesh, one.placements) if sharded else whole[name])
    change(model)
    note = take(seen, model, folder / "job.shardviz")
    assert note.kind == "captured", note.text
    torch.distributed.barrier()
    return check_dump(folder / "job.shardviz")


def untie(model):
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def renew_buffer(model):
    model.body.scale = model.scale.clone()


@nightly
@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("device", [*at_night(["cpu"]), "meta"])
def test_a_tie_that_was_lost_after_sharding_is_named(mesh, tmp_path, device):
    report = report_of(tmp_path, mesh, untie, device)
    found = {finding.tensor: finding for finding in report.findings}
    assert [(one.kind, one.ranks) for one in found.values()] == [("untied", (0, 1))]
    assert "embed.weight" in found["head.weight"].summary


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("device", [*at_night(["cpu"]), "meta"])
@pytest.mark.parametrize("change", [*at_night([lambda model: None]), renew_buffer])
def test_a_tie_that_is_kept_and_a_buffer_of_its_own_are_quiet(mesh, tmp_path, change, device):
    report = report_of(tmp_path, mesh, change, device)
    assert not report.findings
    assert "embed.weight" not in report.why_not_checked


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("ties", [False, *at_night([True])])
def test_a_tie_that_to_empty_broke_before_sharding_is_named(mesh, tmp_path, ties):
    torch.manual_seed(0)
    whole = {name: value.clone() for name, value in Tied().state_dict().items() if name != "head.weight"}
    if mesh.get_rank() == 0:
        save_file(whole, tmp_path / "weights.safetensors")
    torch.distributed.barrier()
    with torch.device("meta"):
        model = Tied()
    seen = Watch(tmp_path / "job.shardviz").session
    seen.sources.append(Opened(tmp_path / "weights.safetensors"))
    seen.values.remember_ties(model)
    model.to_empty(device="cpu")
    if ties:
        model.head.weight = model.embed.weight
    model.load_state_dict(whole | {"head.weight": whole["embed.weight"]})
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    note = take(seen, model, tmp_path / "job.shardviz")
    assert note.kind == "captured", note.text
    torch.distributed.barrier()
    found = [(one.kind, one.tensor) for one in check_dump(tmp_path / "job.shardviz").findings]
    assert found == ([] if ties else [("untied", "head.weight")])


@spmd(mesh={"fsdp": 2})
@pytest.mark.parametrize("differs", [True, False])
def test_a_job_that_ties_what_a_file_has_as_two_tensors_is_noted_where_they_differ(mesh, tmp_path, differs):
    torch.manual_seed(1)
    whole = {name: value.detach().clone() for name, value in Tied().state_dict().items() if "scale" not in name}
    whole["head.weight"] += differs * torch.randn(32, 16)
    if mesh.get_rank() == 0:
        save_file(whole, tmp_path / "weights.safetensors")
    torch.distributed.barrier()
    model, seen = Tied(), Watch(tmp_path / "job.shardviz").session
    seen.sources.append(Opened(tmp_path / "weights.safetensors"))
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(whole[name])
    seen.remember(model)
    fully_shard(model, mesh=mesh)
    assert take(seen, model, tmp_path / "job.shardviz").kind == "captured"
    torch.distributed.barrier()
    report = check_dump(tmp_path / "job.shardviz")
    assert not report.findings
    why = (
        "whether this is meant: the job opened weights.safetensors, and this tensor is tied to embed.weight, while the "
        "file has two different tensors; 3 tensors of the model are as there"
    )
    assert [(one.tensor, one.why) for one in report.not_checked] == [("head.weight", why)] * differs
