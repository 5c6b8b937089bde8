"""A module whose state dict splits its weight is compared with the checkpoint that has the pieces."""

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd


class Fused(nn.Module):
    """Query, key and value in one weight, head by head, that a checkpoint has as three."""

    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(16, 48, bias=False)
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.merge)

    @staticmethod
    def split(module, state, prefix, metadata):
        heads = state.pop(f"{prefix}wqkv.weight").reshape(4, 3, 4, 16)
        for number, name in enumerate(("wq", "wk", "wv")):
            state[f"{prefix}{name}.weight"] = heads[:, number].reshape(16, 16).contiguous()

    @staticmethod
    def merge(module, state, prefix, *args):
        pieces = [state.pop(f"{prefix}{name}.weight").reshape(4, 1, 4, 16) for name in ("wq", "wk", "wv")]
        state[f"{prefix}wqkv.weight"] = torch.cat(pieces, 1).reshape(48, 16)


@spmd(mesh={"tp": 2})
def test_a_hook_that_does_not_take_the_checkpoint_is_reported(mesh, shard_dump):
    model, path = nn.ModuleDict({"attention": Fused(), "head": nn.Linear(16, 8)}), shard_dump.with_name("a.safetensors")
    state = {f"head.{name}": one.contiguous() for name, one in model["head"].state_dict().items()}
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state | {"attention.wq.weight": torch.zeros(16, 16)}, path)
    distributed.barrier()
    shardviz.capture(model, shard_dump, mesh=mesh, reference=path)
    why = {one.tensor: one.why for one in check_dump(shard_dump).not_checked}
    assert set(why) == {"attention.wqkv.weight"}
    assert "the load hooks of Fused refuse its state: KeyError" in why["attention.wqkv.weight"]


@pytest.mark.parametrize("wrong", [False, True])
@spmd(mesh={"tp": 2})
def test_a_fused_weight_is_put_together_as_its_own_hook_does(mesh, shard_dump, wrong):
    torch.manual_seed(0)
    model, path = nn.ModuleDict({"attention": Fused()}), shard_dump.with_name("checkpoint.safetensors")
    state = model.state_dict()
    assert "attention.wqkv.weight" not in state
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, path)
    distributed.barrier()
    whole = model["attention"].wqkv.weight.detach()
    if wrong:  # the pieces one after the other, instead of head by head
        whole = torch.cat([state[f"attention.{name}.weight"] for name in ("wq", "wk", "wv")])
    mine = whole.chunk(2)[mesh.get_rank()].contiguous()
    model["attention"].wqkv.weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
    shardviz.capture(model, shard_dump, mesh=mesh, reference=path)
    report = check_dump(shard_dump)
    assert report.not_checked == ()
    assert [(one.kind, one.tensor) for one in report.findings] == [("misordered", "attention.wqkv.weight")] * wrong
