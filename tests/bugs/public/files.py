"""Small checkpoints, as libraries write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Tensors = Mapping[str, torch.Tensor]

LAYERS, EXPERTS, FEATURES, WIDE, WORDS = 2, 4, 16, 12, 40


def random(*shape: int, seed: int) -> torch.Tensor:
    """Return numbers that no tensor of a different seed has."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def save(folder: Path, tensors: Tensors) -> None:
    """Write a folder of one safetensors file."""
    folder.mkdir(parents=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def dense(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return what a model with experts has besides them, by Hugging Face's names."""
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, FEATURES),
        "model.norm.weight": (FEATURES,),
        "lm_head.weight": (WORDS, FEATURES),
    }
    for layer in range(LAYERS):
        before = f"model.layers.{layer}."
        sizes |= {f"{before}self_attn.{part}_proj.weight": (FEATURES, FEATURES) for part in "qkvo"}
        sizes |= {f"{before}input_layernorm.weight": (FEATURES,), f"{before}mlp.gate.weight": (EXPERTS, FEATURES)}
    return {name: random(*size, seed=100 * seed + at) for at, (name, size) in enumerate(sizes.items())}


def experts_of(layer: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return the matrices of each expert of a layer: gate, up and down."""
    sizes = {"gate": (WIDE, FEATURES), "up": (WIDE, FEATURES), "down": (FEATURES, WIDE)}
    return [
        {
            kind: random(*size, seed=10000 * seed + 1000 + 100 * layer + 10 * expert + at)
            for at, (kind, size) in enumerate(sizes.items())
        }
        for expert in range(EXPERTS)
    ]


def stacked(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a model with the experts of a layer in one tensor each, inputs before outputs, as Qwen3-VL has them."""
    tensors = dense(seed)
    for layer in range(LAYERS):
        experts, before = experts_of(layer, seed), f"model.layers.{layer}.mlp.experts."
        tensors[f"{before}gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])).T for one in experts])
        tensors[f"{before}down_proj"] = torch.stack([one["down"].T for one in experts])
    return tensors
