"""A small Llama by Meta's names, and two converters to Hugging Face's: one forgets what rotary embeddings need."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

DIM, HEADS, KV_HEADS, HIDDEN, VOCAB, LAYERS = 64, 8, 2, 96, 128, 2
HEAD = DIM // HEADS
NAMES = {
    "attention.wq": ("self_attn.q_proj", (DIM, DIM)),
    "attention.wk": ("self_attn.k_proj", (KV_HEADS * HEAD, DIM)),
    "attention.wv": ("self_attn.v_proj", (KV_HEADS * HEAD, DIM)),
    "attention.wo": ("self_attn.o_proj", (DIM, DIM)),
    "feed_forward.w1": ("mlp.gate_proj", (HIDDEN, DIM)),
    "feed_forward.w2": ("mlp.down_proj", (DIM, HIDDEN)),
    "feed_forward.w3": ("mlp.up_proj", (HIDDEN, DIM)),
    "attention_norm": ("input_layernorm", (DIM,)),
    "ffn_norm": ("post_attention_layernorm", (DIM,)),
}
OUTSIDE = {
    "tok_embeddings": ("model.embed_tokens", (VOCAB, DIM)),
    "norm": ("model.norm", (DIM,)),
    "output": ("lm_head", (VOCAB, DIM)),
}


def names():
    """Yield Meta's name, Hugging Face's and the shape of each weight."""
    for own, (other, shape) in OUTSIDE.items():
        yield f"{own}.weight", f"{other}.weight", shape
    for layer in range(LAYERS):
        for own, (other, shape) in NAMES.items():
            yield f"layers.{layer}.{own}.weight", f"model.layers.{layer}.{other}.weight", shape


def halves(weight):
    """Return rows of heads that rotate in pairs as rows of heads that rotate in halves."""
    return weight.view(-1, HEAD // 2, 2, DIM).transpose(1, 2).reshape(weight.shape)


def save(folder, tensors):
    Path(folder).mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/model.safetensors")


def convert(meta, right=True):
    hf = {other: meta[own] for own, other, _ in names()}
    for name in hf:
        if right and name.endswith(("q_proj.weight", "k_proj.weight")):
            hf[name] = halves(hf[name])
    return hf


if __name__ == "__main__":
    torch.manual_seed(0)
    meta = {own: torch.randn(shape) for own, _, shape in names()}
    save("meta", meta)
    save("hf", convert(meta, right="--right" in sys.argv))
    settings = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    Path("hf/config.json").write_text(json.dumps(settings))
