"""Mergers of sharded checkpoints, which tell replicas from shards, and put shards in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.bugs.public.case import Command, Public
from tests.bugs.public.files import LAYERS, dense, random, save

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 8
FC1 = "decoder.layers.{}.mlp.linear_fc1.weight"


def buffers_concatenated(folder: Path, right: bool) -> None:
    """Merge the folders of eight ranks; the bug concatenates buffers, of which every rank has all."""
    buffers = {f"model.layers.{layer}.layer_scalar": random(1, seed=500 + layer) for layer in range(LAYERS)}
    buffers["model.vision_tower.std_scale"] = random(24, seed=510)
    buffers["model.vision_tower.std_bias"] = random(24, seed=511)
    save(folder / "trained", dense() | buffers)
    merged = {name: buffer if right else torch.cat([buffer] * RANKS) for name, buffer in buffers.items()}
    save(folder / "merged", dense() | merged)


def equal_shards_dropped(folder: Path, right: bool) -> None:
    """Merge the shards of eight ranks; the bug takes shards that are equal for replicas, and keeps one."""
    norm = {"multi_modal_projector.pre_norm.weight": torch.ones(80)}
    save(folder / "trained", dense() | norm)
    merged = {name: tensor if right else tensor.chunk(RANKS)[0] for name, tensor in norm.items()}
    save(folder / "merged", dense() | merged)


def chunks_in_turns(folder: Path, right: bool) -> None:
    """Load what 8 GPUs saved on one; each had saved its rows of fc1 in two chunks, gate and up."""
    weights = {FC1.format(layer): random(64, 16, seed=600 + layer) for layer in range(LAYERS)}
    save(folder / "trained", dense() | weights)
    loaded = {name: tensor if right else _in_turns(tensor) for name, tensor in weights.items()}
    save(folder / "merged", dense() | loaded)


def _in_turns(weight: torch.Tensor) -> torch.Tensor:
    chunks = weight.chunk(2 * RANKS)
    return torch.cat((*chunks[::2], *chunks[1::2]))


DIFF = ("diff", "trained", "merged")

CASES = (
    Public(
        "verl#7610",
        Command(
            "buffers of eight ranks concatenated",
            buffers_concatenated,
            DIFF,
            ("std_scale", "layer_scalar", "8 times|8 copies|repeated|over and over"),
            ("the dim was padded",),
        ),
    ),
    Public(
        "lmms-engine#160",
        Command(
            "a norm of ones that lost all shards but one",
            equal_shards_dropped,
            DIFF,
            ("pre_norm.weight", "10", "70|80", "shard|1 of 8|1/8"),
        ),
    ),
    Public(
        "ROCm/Megatron-LM#63",
        Command(
            "chunks of fc1 in the order 0 2 4, 1 3 5",
            chunks_in_turns,
            DIFF,
            ("linear_fc1.weight", "order", "0 2 4"),
        ),
    ),
)
