"""The proof on somebody else's code: a Hugging Face Llama under its own tensor-parallel plan, and FSDP2 over it.

Runs where transformers and accelerate are installed; they are no dependency. Weights are random, nothing is loaded.
"""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardviz.testing import (
    assert_layout,
    assert_ordered,
    assert_reduced,
    assert_replicated,
    assert_same,
    assert_tied,
    spmd,
    stamp,
)

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
LAYOUTS = {
    "*.self_attn.[qkv]_proj.weight": "[*/tp/fsdp, *]",
    "*.mlp.gate_proj.weight": "[*/tp/fsdp, *]",
    "*.mlp.up_proj.weight": "[*/tp/fsdp, *]",
    "*.self_attn.o_proj.weight": "[*/fsdp, */tp]",
    "*.mlp.down_proj.weight": "[*/fsdp, */tp]",
    "*norm.weight": "[*/fsdp]",
    "*embed_tokens.weight": "[*/fsdp, *]",
    "lm_head.weight": "[*/fsdp, *]",
}


def build(**options):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, attn_implementation="eager", **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


def apply_plan(model, mesh):
    """Apply the tensor-parallel plan that transformers has for the model."""
    plan = {f"model.{name}": STYLES[style]() for name, style in model.config.base_model_tp_plan.items()}
    parallelize_module(model, mesh, plan)


def parallelize(model, mesh):
    """Apply the model's own plan, and FSDP2 layer by layer."""
    apply_plan(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return model


@spmd(mesh={"fsdp": 2, "tp": 2})
def test_every_weight_of_llama_is_where_its_plan_puts_it(mesh):
    model = build()
    stamp(model)
    parallelize(model, mesh)
    assert_layout(model, LAYOUTS)
    assert_ordered(model)


@spmd(mesh={"fsdp": 2, "tp": 2})
def test_a_sharded_step_of_llama_is_the_unsharded_one(mesh):
    reference = build()
    model = parallelize(copy.deepcopy(reference), mesh)
    tokens = torch.randint(64, (4, 8))
    own = tokens.chunk(2)[mesh.get_local_rank("fsdp")]
    loss = model(own, labels=own).loss
    loss.backward()
    reference(tokens, labels=tokens).loss.backward()
    assert_same(model, reference, of=("param",))
    assert_reduced(model)
    assert_same(model, reference, of=("grad",), rtol=1e-7, atol=1e-9)
    assert_replicated({"rotary": model.model.rotary_emb.inv_freq}, axis="tp")


@spmd(mesh={"fsdp": 4})
def test_tied_embeddings_of_llama_stay_tied_under_fsdp(mesh):
    model = build(tie_word_embeddings=True)
    assert_tied(model, "model.embed_tokens.weight", "lm_head.weight")
    fully_shard(model, mesh=mesh)
    assert_tied(model, "model.embed_tokens.weight", "lm_head.weight")


@spmd(mesh={"dp_shard": 2, "tp": 2})
def test_accelerates_own_fsdp2_over_its_own_mesh_keeps_every_weight_in_order(mesh):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[frameworks]'")
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    model = build()
    stamp(model)
    accelerator = accelerate.Accelerator(cpu=True)
    config = accelerator.state.parallelism_config = ParallelismConfig(tp_size=2, dp_shard_size=2)
    own_mesh = accelerator.state.device_mesh = config.build_device_mesh("cpu")
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    apply_plan(model, own_mesh["tp"])
    model = fsdp2_prepare_model(accelerator, model)
    assert_layout(model, {name: text.replace("fsdp", "dp_shard") for name, text in LAYOUTS.items()})
    assert_ordered(model)
