"""Engines and wrappers around a model leave its tensors the names that they have in a checkpoint."""

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import shardviz
from shardviz.check.run import check_dump
from shardviz.live.claims.registry import unwrapped
from shardviz.testing import spmd
from tests.lanes import nightly

DP = {"dp": 2}


class Block(nn.Module):
    """Two layers by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, rows):
        return self.down(self.up(rows).relu())


def saved(folder, model):
    path = folder.with_name("checkpoint.safetensors")
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    distributed.barrier()
    return path


@spmd(mesh=DP)
def test_ddp_of_a_compiled_model_is_unwrapped_to_the_model_itself(mesh):
    model = Block()  # compiled by a backend that is imported already: the wrapper is the same
    assert unwrapped(DistributedDataParallel(torch.compile(model, backend="eager"))) is model
    assert unwrapped(torch.compile(DistributedDataParallel(model), backend="eager")) is model


@nightly
@pytest.mark.parametrize("wrong", [False, True])
@spmd(mesh=DP)
def test_a_lora_model_is_compared_under_the_names_of_its_base(mesh, shard_dump, wrong):
    peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[frameworks]'")
    model = Block()
    reference = saved(shard_dump, model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up"], r=2, init_lora_weights=True))
    if wrong:
        with torch.no_grad():
            model.up.base_layer.weight.copy_(model.up.base_layer.weight.flip(0))
    with torch.random.fork_rng():
        shardviz.capture(DistributedDataParallel(adapted), shard_dump, mesh=mesh, reference=reference)
    report = check_dump(shard_dump)
    of_base = [one for one in report.findings if "lora" not in one.tensor]
    assert [(one.kind, one.tensor) for one in of_base] == [("misordered-within-shard", "up.weight")] * wrong
    assert {one.tensor for one in report.not_checked} == {"up.lora_A.default.weight", "up.lora_B.default.weight"}


@nightly
@pytest.mark.parametrize("wrong", [False, True])
@spmd(mesh=DP)
def test_a_model_that_got_lora_after_it_was_stamped_is_checked(mesh, shard_dump, wrong):
    peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[frameworks]'")
    model = Block()
    stamps = shardviz.stamp(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up"], r=2))
    if wrong and mesh.get_rank():
        with torch.no_grad():
            model.up.base_layer.weight.copy_(model.up.base_layer.weight.flip(0))
    shardviz.capture(adapted, shard_dump, mesh=mesh, stamps=stamps)
    report = check_dump(shard_dump)
    assert [one.tensor for one in report.findings if "lora" not in one.tensor] == ["up.weight"] * wrong
    assert all("lora" in one.tensor for one in report.not_checked)
