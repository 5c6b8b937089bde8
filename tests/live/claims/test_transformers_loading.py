"""Models that transformers' own loader shards, unedited: a reference is the folder that they were loaded from."""

import pytest
import torch
from torch import distributed, nn

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd
from tests.lanes import nightly

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
KINDS = {"Llama": {}, "Mixtral": {"num_local_experts": 12, "num_experts_per_tok": 2}}


def loaded(kind, folder, tp_plan=None):
    """Save a tiny model, and let transformers load it over two ranks."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")
    pytest.importorskip("transformers.distributed", reason="needs transformers 5: pip install -e '.[frameworks]'")
    from transformers.distributed import DistributedConfig

    model = getattr(transformers, f"{kind}ForCausalLM")
    path = folder.with_name("checkpoint")
    if distributed.get_rank() == 0:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
        model(config).to(torch.bfloat16).save_pretrained(path)
    distributed.barrier()
    options = DistributedConfig(tp_size=2, tp_plan=tp_plan) if tp_plan else DistributedConfig(tp_size=2)
    return model.from_pretrained(path, distributed_config=options, dtype=torch.bfloat16), path


@nightly
@pytest.mark.parametrize("kind", KINDS)
@spmd(mesh={"tp": 2})
def test_a_model_under_its_own_plan_is_in_order_and_all_of_it_checked(mesh, shard_dump, kind):
    model, path = loaded(kind, shard_dump)
    shardviz.capture(model, shard_dump, reference=path)
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())


@nightly
@spmd(mesh={"tp": 2})
def test_merged_gates_under_a_plain_colwise_are_named(mesh, shard_dump):
    model, path = loaded("Mixtral", shard_dump, {"model.layers.*.mlp.experts.gate_up_proj": "colwise"})
    shardviz.capture(model, shard_dump, reference=path)
    (finding,) = check_dump(shard_dump).findings
    assert finding.kind == "misordered"
    assert (finding.claimed, finding.held) == ("[12, 256/tp, 64]", "[12, 256/2/tp, 64]")
    assert {name.rpartition(".")[2] for name in finding.tensors} == {"gate_up_proj"}


@nightly
@spmd(mesh={"tp": 2})
def test_experts_that_one_rank_exchanged_are_named(mesh, shard_dump):
    model, path = loaded("Mixtral", shard_dump)
    weight = model.model.layers[0].mlp.experts.down_proj
    with torch.no_grad():
        weight.to_local().copy_(weight.to_local()[[1, 0, *range(2, 12)]].clone())
    shardviz.capture(model, shard_dump, reference=path)
    assert {name for one in check_dump(shard_dump).findings for name in one.tensors} == {
        "model.layers.0.mlp.experts.down_proj"
    }


class Rotary(nn.Linear):
    """A layer with frequencies that are in no checkpoint."""

    def __init__(self):
        super().__init__(16, 16)
        self.register_buffer("inv_freq", torch.arange(1.0, 9.0).reciprocal(), persistent=False)


@pytest.mark.parametrize("differs", [False, True])
@spmd(mesh={"dp": 2})
def test_a_buffer_in_no_checkpoint_is_quiet_unless_its_copies_differ(mesh, shard_dump, differs):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model, path = Rotary(), shard_dump.with_name("checkpoint.safetensors")
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    distributed.barrier()
    model.inv_freq += differs * mesh.get_rank()
    shardviz.capture(model, shard_dump, mesh=mesh, reference=path)
    report = check_dump(shard_dump)
    assert [(one.kind, one.tensor) for one in report.findings] == [("unreplicated", "inv_freq")] * differs
    assert report.not_checked == ()
