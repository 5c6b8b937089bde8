"""Stamped copies under transformers' own loader: what it cuts, merges and skips is read back from the model.

Runs where transformers is installed. Checkpoints are tiny and have random weights.
"""

import pytest
import torch
from torch import distributed

import shardviz
from shardviz.check.run import check_dump
from shardviz.cli import main
from shardviz.testing import spmd

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")
configuration = pytest.importorskip(
    "transformers.distributed.configuration_utils", reason="needs transformers 5.21: pip install -e '.[frameworks]'"
)

TP = {"tp": 2}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def stamped(folder, kind, **options):
    """Save a small model as a checkpoint in two files, and return the folder of its stamped copy."""
    if distributed.get_rank() == 0:
        torch.manual_seed(0)
        model = getattr(transformers, kind)
        model = model(model.config_class(**SIZES, **options)).to(torch.bfloat16)
        model.save_pretrained(folder / "checkpoint", max_shard_size="40KB")
        assert main(["stamp-checkpoint", str(folder / "checkpoint"), "-o", str(folder / "stamped")]) == 0
    distributed.barrier()
    return folder / "stamped"


def loaded(folder, kind, plan="auto"):
    return getattr(transformers, kind).from_pretrained(
        folder, distributed_config=configuration.DistributedConfig(tp_size=2, tp_plan=plan)
    )


def findings(model, mesh, folder, copy):
    """Return what is found; of what is not checked only what transformers computes by itself."""
    shardviz.capture(model, folder, mesh=mesh, reference=copy, force=True)
    report = check_dump(folder)
    assert all(one.tensor.endswith("inv_freq") for one in report.not_checked)
    return report.findings


@spmd(mesh=TP)
def test_a_llama_loaded_under_its_plan_is_in_order_and_an_exchanged_shard_is_named(mesh, shard_dump):
    copy = stamped(shard_dump.parent, "LlamaForCausalLM")
    model = loaded(copy, "LlamaForCausalLM")
    assert not findings(model, mesh, shard_dump, copy)
    local = model.model.layers[1].self_attn.q_proj.weight.to_local()
    both = [torch.empty_like(local) for _ in range(2)]
    distributed.all_gather(both, local)
    with torch.no_grad():
        local.copy_(both[1 - mesh.get_rank()])
    (finding,) = findings(model, mesh, shard_dump, copy)
    assert (finding.kind, finding.tensor) == ("misordered", "model.layers.1.self_attn.q_proj.weight")


@spmd(mesh=TP)
def test_the_merged_experts_of_a_mixtral_are_in_order_and_a_wrong_plan_for_them_is_named(mesh, shard_dump):
    """With this plan transformers 5.23 trains right, and saves 16 of 41 tensors permuted."""
    copy = stamped(shard_dump.parent, "MixtralForCausalLM", **EXPERTS)
    assert not findings(loaded(copy, "MixtralForCausalLM"), mesh, shard_dump, copy)
    model = loaded(copy, "MixtralForCausalLM", {"model.layers.*.mlp.experts.gate_up_proj": "colwise"})
    (finding,) = findings(model, mesh, shard_dump, copy)
    assert finding.tensors == tuple(f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2))
    assert (finding.kind, finding.claimed, finding.held) == ("misordered", "[4, 96/tp, 32]", "[4, 96/2/tp, 32]")


@spmd(mesh=TP)
def test_weights_that_were_not_in_the_file_are_one_finding(mesh, shard_dump):
    copy = stamped(shard_dump.parent, "LlamaForCausalLM")
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(copy)).to(torch.bfloat16)
    (finding,) = findings(model, mesh, shard_dump, copy)
    assert len(finding.tensors) == 21
