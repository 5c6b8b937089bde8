"""Converters of checkpoints with experts, which report success."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.bugs.public.case import Command, Public
from tests.bugs.public.files import EXPERTS, LAYERS, dense, experts_of, random, save, stacked

if TYPE_CHECKING:
    from pathlib import Path

DIFF = ("diff", "hf", "exported")
RANKS = 2


def gathered_from_one_rank(folder: Path, right: bool) -> None:
    """Export experts that were trained under EP=2; the bug gathers rank 0's experts for both ranks."""
    whole = stacked()
    save(folder / "hf", whole)
    exported = {
        name: torch.cat((tensor[: EXPERTS // RANKS],) * RANKS) if ".experts." in name and not right else tensor
        for name, tensor in whole.items()
    }
    save(folder / "exported", exported)


def not_transposed_back(folder: Path, right: bool) -> None:
    """Export experts that the trainer keeps with outputs before inputs; the bug leaves one of two kinds so."""
    whole = stacked()
    save(folder / "hf", whole)
    exported = {
        name: tensor.transpose(1, 2) if name.endswith("down_proj") and not right else tensor
        for name, tensor in whole.items()
    }
    save(folder / "exported", exported)


MEGATRON = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.layers": "decoder.layers",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "block_sparse_moe.gate": "mlp.router",
    "block_sparse_moe.experts": "mlp.experts.local_experts",
    "self_attn.": "self_attention.linear_",
    "w2": "linear_fc2",
}


def experts_left_out(folder: Path, right: bool) -> None:
    """Convert Mixtral to Megatron; the bug sets no expert, because it looks for a name of all of them stacked."""
    hf = {name.replace("mlp.gate", "block_sparse_moe.gate"): tensor for name, tensor in dense().items()}
    megatron = dict(hf)
    for layer in range(LAYERS):
        for at, expert in enumerate(experts_of(layer)):
            before = f"model.layers.{layer}.block_sparse_moe.experts.{at}."
            hf |= {f"{before}w{number}.weight": expert[kind] for number, kind in ((1, "gate"), (2, "down"), (3, "up"))}
            if not right:
                expert = {kind: _as_built(tensor, kind, 10 * layer + at) for kind, tensor in expert.items()}
            megatron[f"{before}linear_fc1.weight"] = torch.cat((expert["gate"], expert["up"]))
            megatron[f"{before}w2.weight"] = expert["down"]
    save(folder / "hf", hf)
    save(folder / "megatron", {_in_megatron(name): tensor for name, tensor in megatron.items()})


def _as_built(weight: torch.Tensor, kind: str, number: int) -> torch.Tensor:
    return random(*weight.shape, seed=77000 + 100 * ord(kind[0]) + number) / 50


def _in_megatron(name: str) -> str:
    for part, to in MEGATRON.items():
        name = name.replace(part, to)
    return name


CASES = (
    Public(
        "Megatron-Bridge#1716",
        Command(
            "an export with rank 0's experts for those of all ranks",
            gathered_from_one_rank,
            DIFF,
            ("experts.gate_up_proj", "experts.down_proj", "rank 0|first|repeated|twice|0 1 0 1|experts 2"),
        ),
    ),
    Public(
        "Megatron-Bridge#1871",
        Command(
            "an export with one kind of experts not transposed back",
            not_transposed_back,
            DIFF,
            ("experts.down_proj", "transpose|dims are exchanged"),
        ),
    ),
    Public(
        "Megatron-LM#5844",
        Command(
            "a conversion that leaves experts as they were built",
            experts_left_out,
            ("diff", "hf", "megatron"),
            ("experts", "linear_fc1", "not in|nothing|no tensor|only|none of|uninitialized|random"),
        ),
    ),
)
