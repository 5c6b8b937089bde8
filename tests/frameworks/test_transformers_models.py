"""Hugging Face models of several families, sharded as transformers itself shards them, and FSDP2: no false alarm.

Runs where transformers is installed; it is no dependency. Weights are random, nothing is loaded.
"""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from shardviz.testing import assert_layout, assert_ordered, assert_reduced, assert_replicated, assert_same, spmd, stamp

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")

DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "eager",
}  # fmt: skip
ENCODER = {name: DECODER[name] for name in DECODER if name != "num_key_value_heads"}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "attn_implementation": "eager"}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MODELS = {
    "Qwen2ForCausalLM": DECODER | {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": DECODER | {"head_dim": 8},
    "GemmaForCausalLM": DECODER | {"head_dim": 8},
    "MixtralForCausalLM": DECODER | EXPERTS,
    "GPT2LMHeadModel": GPT2,
    "BertForMaskedLM": ENCODER,
    "T5ForConditionalGeneration": T5 | {"decoder_start_token_id": 0},
}
WITH_A_PLAN = [name for name in MODELS if name.endswith("CausalLM")]


def build(name):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**MODELS[name])).double().eval()


def apply_plan(model, mesh):
    """Shard a model over a mesh as `from_pretrained(..., tp_plan="auto")` does before it loads the weights."""
    parallel = pytest.importorskip(
        "transformers.distributed.tensor_parallel", reason="needs transformers 5.21: pip install -e '.[frameworks]'"
    )
    from transformers.distributed.configuration_utils import DistributedConfig

    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    names = {name for name, _ in [*model.named_parameters(), *model.named_modules()]}
    parallel.apply_tensor_parallelism(model, mesh, {name: plan[name] for name in plan if name in names})
    model.tie_weights()


def shard(model, mesh):
    """Apply FSDP2 layer by layer."""
    for module in list(model.modules()):
        if type(module).__name__.endswith(("DecoderLayer", "GPT2Block", "BertLayer", "T5Block")):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def assert_one_step_is_the_unsharded_one(model, reference, parts, mine):
    tokens = torch.randint(64, (4, 8))
    own = tokens.chunk(parts)[mine]
    model(input_ids=own, labels=own).loss.backward()
    reference(input_ids=tokens, labels=tokens).loss.backward()
    assert_reduced(model)
    assert_same(model, reference, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", WITH_A_PLAN)
@spmd(mesh={"fsdp": 2, "tp": 2})
def test_under_its_own_plan_and_fsdp2_every_weight_is_in_order_and_a_step_the_same(mesh, name):
    reference = build(name)
    model = copy.deepcopy(reference)
    stamp(model)
    apply_plan(model, mesh["tp"])
    shard(model, mesh["fsdp"])
    assert_layout(model, {"*q_proj.weight": "[*/tp/fsdp, *]", "*o_proj.weight": "[*/fsdp, */tp]", "*": None})
    assert_ordered(model)
    model = copy.deepcopy(reference)
    apply_plan(model, mesh["tp"])
    shard(model, mesh["fsdp"])
    assert_one_step_is_the_unsharded_one(model, reference, 2, mesh.get_local_rank("fsdp"))


@pytest.mark.parametrize("name", MODELS)
@spmd(mesh={"replicate": 2, "shard": 2})
def test_under_hsdp_every_weight_is_in_order_and_a_step_the_same(mesh, name):
    reference = build(name)
    model = copy.deepcopy(reference)
    stamp(model)
    shard(model, mesh)
    assert_ordered(model)
    model = shard(copy.deepcopy(reference), mesh)
    rank = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
    assert_one_step_is_the_unsharded_one(model, reference, 4, rank)
    assert_replicated(model, axis="replicate")


@spmd(mesh={"fsdp": 2, "tp": 2})
def test_the_packed_experts_of_mixtral_are_split_gate_by_gate_and_up_by_up(mesh):
    model = build("MixtralForCausalLM")
    stamp(model)
    apply_plan(model, mesh["tp"])
    shard(model, mesh["fsdp"])
    assert_layout(model, {"*.gate_up_proj": "[4/fsdp, 96/2/tp, 32]", "*.down_proj": "[4/fsdp, 32, 48/tp]", "*": None})
    assert_ordered(model)
