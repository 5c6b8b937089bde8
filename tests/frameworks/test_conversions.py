"""The maps that come with shardviz against the libraries' own converters: torchtitan's adapters, transformers' loader.

A right conversion is in order in both directions; what a converter loses is named.
"""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.maps.families import family_of, find_map
from shardviz.checkpoint.open import open_checkpoint

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[frameworks]'")

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "LlamaForCausalLM": SMALL,
    "Qwen2ForCausalLM": SMALL | {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": SMALL | {"head_dim": 8},
    "Qwen3MoeForCausalLM": SMALL | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "MixtralForCausalLM": SMALL | {"num_local_experts": 12},
    "GptOssForCausalLM": SMALL | {"num_local_experts": 4, "head_dim": 8},
    "DeepseekV3ForCausalLM": SMALL
    | {"n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
       "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
       "num_key_value_heads": 4},
}  # fmt: skip
FAMILIES = {
    "Llama": "llama",
    "Qwen2": "qwen",
    "Qwen3": "qwen",
    "Mixtral": "mixtral",
    "GptOss": "gpt_oss",
    "Deepseek": "deepseek",
}


def save(folder, tensors, settings=None):
    folder.mkdir()
    save_file({name: one.detach().clone().contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


def verdicts(one, other, family):
    found = compare_checkpoints(open_checkpoint(one), open_checkpoint(other), find_map(family))
    return {outcome.name: (outcome.verdict, outcome.why) for outcome in found.outcomes if outcome.verdict != "equal"}


def assert_clean(one, other, family, *, but=()):
    for pair in ((one, other), (other, one)):
        found = verdicts(*pair, family)
        assert {name for name, (verdict, _) in found.items() if verdict != "tied"} == set(but), found
        assert family_of(*(open_checkpoint(path).tensors for path in pair)) == family


# torchtitan's adapters


def needs_torchtitan():
    """Skip a test where torchtitan is missing, or triton, which torch for CPUs does not bring."""
    for name in ("torchtitan", "triton"):
        pytest.importorskip(name, reason="needs torchtitan and triton: pip install torchtitan triton")


@pytest.fixture(scope="module", params=["llama3", "qwen3", "qwen3:debugmodel_moe", "deepseek_v3"])
def titan(request):
    needs_torchtitan()
    return request.param, *exported(request.param)


def exported(which):
    """Return a debug model's weights, and what the adapter makes of them for Hugging Face."""
    from importlib import import_module

    kind, _, flavor = which.partition(":")
    spec = import_module(f"torchtitan.models.{kind}").model_registry(flavor or "debugmodel")
    with torch.device("meta"):
        names = spec.model.build().state_dict()
    torch.manual_seed(0)
    weights = {name: torch.randn(one.shape).bfloat16() for name, one in names.items() if not is_late(name)}
    if spec.model.enable_weight_tying:
        weights["lm_head.weight"] = weights["tok_embeddings.weight"]
    return weights, spec.state_dict_adapter(spec.model, None).to_hf(dict(weights))


def is_late(name):
    """Whether a tensor is of a layer that only costs time here."""
    found = re.search(r"layers\.(\d+)\.", name)
    return found is not None and int(found[1]) > 2


FAMILY_OF = {"llama3": "llama", "qwen3": "qwen", "qwen3:debugmodel_moe": "qwen", "deepseek_v3": "deepseek"}


def test_what_torchtitan_exports_is_in_order(tmp_path, titan):
    which, weights, hf = titan
    no_place = [name for name in weights if name.endswith("expert_bias_E") and which.startswith("qwen")]
    assert_clean(save(tmp_path / "titan", weights), save(tmp_path / "hf", hf), FAMILY_OF[which], but=no_place)


def test_experts_that_torchtitan_0_3_does_not_export_are_missing(tmp_path):
    needs_torchtitan()
    weights, hf = exported("gpt_oss")
    found = verdicts(save(tmp_path / "titan", weights), save(tmp_path / "hf", hf), "gpt_oss")
    lost = {name for name in weights if "inner_experts" in name or "expert_bias" in name}
    if any("experts" in name for name in hf):
        pytest.fail("torchtitan exports the experts again: test that they are in order")
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(lost, "missing")


# transformers


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_loads_is_what_it_saved(tmp_path, name):
    """The model's own tensors, experts joined, beside the checkpoint that `save_pretrained` writes of them."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**MODELS[name]))
    for one in model.parameters():
        torch.nn.init.normal_(one)
    model.save_pretrained(tmp_path / "hf")
    memory = save(tmp_path / "memory", model.state_dict())
    family = next(FAMILIES[start] for start in FAMILIES if name.startswith(start))
    for pair in ((tmp_path / "hf", memory), (memory, tmp_path / "hf")):
        found = verdicts(*pair, family)
        assert {verdict for verdict, _ in found.values()} <= {"tied"}, found
