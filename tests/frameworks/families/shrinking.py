"""Configurations made tiny by a rule over the names of their fields: sizes divide by 4, every kind of layer stays."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

LAYERS, HEADS, COPIED_HEADS, WIDTH, INNER, HEAD = 4, 8, 4, 64, 96, 16

SIZES: tuple[tuple[str, int], ...] = (
    (r"(num|n)_(hidden_|encoder_|decoder_)?(layers?|blocks)|depth|(en|de)coder_layers|num_layers_per_stack", LAYERS),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r".*(token_id|token_index|token_idx|_id|_stream_.*id)", 3),
    (r".*vocab_size.*|codebook_size", 64),
    (r"(moe_)?(num|n)_(routed_|local_)?experts|zero_expert_num", 4),
    (r".*experts_per_tok(en)?|moe_topk|moe_k|top_k(_experts)?|num_selected_experts", 2),
    (r"n_group|num_expert_group|topk_group|n_groups|mamba_n_groups|o_groups", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"num_nextn_predict_layers|num_kv_shared_layers", 0),
    (r".*head_dim.*|mamba_d_head|rotary_dim|head_size|.*lora_rank|.*_rank|mamba_d_state|ssm_state_size", HEAD),
    (r".*_heads?|num_heads|.*attention_heads", HEADS),
    (r".*intermediate_size.*|.*ffn.*|share_expert_dim|mlp_dim", INNER),
    (
        r".*hidden_size.*|d_model|.*hidden_dim|.*embed_dim|.*ing_dim|projection_dim|.*(in|out)(put)?_dim|width",
        WIDTH,
    ),
    (r"image_size|max_position_embeddings|.*max_length|.*position_embedding_size", 128),
)
"""What a whole number becomes, by pattern over the field's name; the first that fits counts, and 0 stays 0."""

COPIED = re.compile(r".*(key_value|kv)_heads")
LAYER_BY_LAYER = re.compile(
    r".*layer_types|indexer_types|layer_rope_theta|no_rope_layers|activation_sparsity_pattern|kv_source_layers"
    r"|num_attention_heads_per_layer|intermediate_size|layers_block_type"
)
UNTOUCHED = frozenset({"id2label", "label2id", "transformers_version"})

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_YARN_FREE = {"rope_theta": 10000.0, "rope_type": "default"}
BY_KIND = {"full_attention": _YARN_FREE, "sliding_attention": _YARN_FREE}
INCOMPLETE: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": BY_KIND},
    "Cosmos3EdgeTextConfig": {"rope_parameters": {**_YARN_FREE, "mrope_section": [4, 2, 2]}},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_experts_per_tok": 2},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": INNER},
    "Dots1Config": {**EXPERTS, "n_shared_experts": 1},
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [INNER, INNER // 2],
        "rope_parameters": {**_YARN_FREE, "mrope_section": [1, 1, 2]},
    },
    "HunYuanMoEV1Config": {"head_dim": HEAD, "num_experts": 4, "moe_topk": 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "MinistralConfig": {"head_dim": HEAD},
    "NemotronConfig": {"num_key_value_heads": COPIED_HEADS},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": INNER},
    "Qwen4ExpTextConfig": {
        **{"indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4},
    },
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
}
"""What configurations lack by default that their models need."""


def shrunk(config: type[Any]) -> Any:
    """Return a tiny configuration of a class, nested ones tiny as well."""
    default = config()
    small = {name: _small(name, value, default) for name, value in vars(default).items() if _may_change(name)}
    changed = {name: value for name, value in small.items() if value is not vars(default)[name]}
    return config(**changed | INCOMPLETE.get(config.__name__, {}))


def _may_change(name: str) -> bool:
    return not name.startswith("_") and name not in UNTOUCHED


def _small(name: str, value: Any, default: Any) -> Any:
    if isinstance(value, PreTrainedConfig):
        return shrunk(type(value))
    if name == "eos_token_id" and isinstance(value, list):
        return 2
    if isinstance(value, (list, tuple)) and LAYER_BY_LAYER.fullmatch(name) and len(value) >= LAYERS:
        return _every_kind(name, list(value))
    return _size(name, value, default) if type(value) is int and value > 0 else value


def _size(name: str, value: int, default: Any) -> int:
    if COPIED.fullmatch(name):
        heads = vars(default).get(re.sub("key_value|kv", "attention", name))
        return HEADS if value == (heads or vars(default)["num_attention_heads"]) else COPIED_HEADS
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)


def _every_kind(name: str, values: list[Any]) -> list[Any]:
    """Return one value for each layer, each kind at least once, in the order in which they come."""
    if all(type(value) is int and value > INNER for value in values):
        return [INNER] * LAYERS
    kinds = list(dict.fromkeys(values))[:LAYERS]
    return sorted([*kinds, *[values[0]] * (LAYERS - len(kinds))], key=values.index)
