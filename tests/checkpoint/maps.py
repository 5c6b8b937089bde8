"""Small checkpoints for tests of maps: a Llama by Meta's names, what a conversion makes of it, and both on disk."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from shardviz.checkpoint.comparing.compare import compare_checkpoints
from shardviz.checkpoint.maps.families import find_map
from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.open import open_checkpoint

DIM, HEADS, KV, HEAD, HIDDEN, VOCAB, LAYERS = 32, 8, 2, 8, 48, 40, 3
SETTINGS = {"num_attention_heads": HEADS, "num_key_value_heads": KV, "hidden_size": DIM, "head_dim": HEAD}


def weight(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def save(folder, tensors, settings=None):
    """Write a folder with one safetensors file, and a config.json if there are settings."""
    folder.mkdir(parents=True)
    save_file({name: one.clone().contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


def meta():
    """Return a Llama's weights by Meta's names."""
    sizes = {"tok_embeddings.weight": (VOCAB, DIM), "norm.weight": (DIM,), "output.weight": (VOCAB, DIM)}
    for layer in range(LAYERS):
        sizes |= {
            f"layers.{layer}.attention.wq.weight": (HEADS * HEAD, DIM),
            f"layers.{layer}.attention.wk.weight": (KV * HEAD, DIM),
            f"layers.{layer}.attention.wv.weight": (KV * HEAD, DIM),
            f"layers.{layer}.attention.wo.weight": (DIM, HEADS * HEAD),
            f"layers.{layer}.feed_forward.w1.weight": (HIDDEN, DIM),
            f"layers.{layer}.feed_forward.w2.weight": (DIM, HIDDEN),
            f"layers.{layer}.feed_forward.w3.weight": (HIDDEN, DIM),
            f"layers.{layer}.attention_norm.weight": (DIM,),
            f"layers.{layer}.ffn_norm.weight": (DIM,),
        }
    return {name: weight(*size, seed=at) for at, (name, size) in enumerate(sizes.items())}


def permuted(w, heads):
    """Return rows of heads from pairs to halves, as Hugging Face's script does it."""
    return w.view(heads, w.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(w.shape)


def to_hf(tensors):
    """Convert Meta's names and order to Hugging Face's."""
    found = {
        "model.embed_tokens.weight": tensors["tok_embeddings.weight"],
        "model.norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    for layer in range(LAYERS):
        own, other = f"layers.{layer}.", f"model.layers.{layer}."
        found |= {
            f"{other}self_attn.q_proj.weight": permuted(tensors[f"{own}attention.wq.weight"], HEADS),
            f"{other}self_attn.k_proj.weight": permuted(tensors[f"{own}attention.wk.weight"], KV),
            f"{other}self_attn.v_proj.weight": tensors[f"{own}attention.wv.weight"],
            f"{other}self_attn.o_proj.weight": tensors[f"{own}attention.wo.weight"],
            f"{other}mlp.gate_proj.weight": tensors[f"{own}feed_forward.w1.weight"],
            f"{other}mlp.up_proj.weight": tensors[f"{own}feed_forward.w3.weight"],
            f"{other}mlp.down_proj.weight": tensors[f"{own}feed_forward.w2.weight"],
            f"{other}input_layernorm.weight": tensors[f"{own}attention_norm.weight"],
            f"{other}post_attention_layernorm.weight": tensors[f"{own}ffn_norm.weight"],
        }
    return found


def compared(one, other, rules=(), **options):
    """Return what is different: verdict, reason and cause by name. Rules are a family, or the lines of a map."""
    if isinstance(rules, str):
        rules = parse_rules(rules, "my.map") if "=" in rules else find_map(rules)
    found = compare_checkpoints(open_checkpoint(one), open_checkpoint(other), rules, **options)
    return {each.name: (each.verdict, each.why, each.cause) for each in found.outcomes if each.verdict != "equal"}


def notes(one, other, rules=()):
    return compare_checkpoints(open_checkpoint(one), open_checkpoint(other), find_map(rules) if rules else ()).notes


def both(tmp_path, one, other, settings=None):
    """Write two checkpoints."""
    return save(tmp_path / "one", one), save(tmp_path / "other", other, settings)
