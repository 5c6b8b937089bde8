"""Weights that a trainer sends to an engine, which has other ones afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.bugs.public.case import Command, Public
from tests.bugs.public.files import EXPERTS, LAYERS, dense, experts_of, save

if TYPE_CHECKING:
    from pathlib import Path

    Tensors = dict[str, torch.Tensor]

MOVED = 0.01
"""What training moved weights by, next to what they are."""


def trained(base: Tensors) -> Tensors:
    """Return a model a few steps later."""
    moved = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(90000 + at))
        for at, (name, tensor) in enumerate(base.items())
    }
    return {name: tensor + MOVED * moved[name] for name, tensor in base.items()}


def asleep(folder: Path, right: bool) -> None:
    """Sync an engine that slept; the bug wakes it up with the weights of the checkpoint that it began with."""
    base = dense()
    save(folder / "base", base)
    save(folder / "trainer", trained(base))
    save(folder / "engine", trained(base) if right else base)


def with_experts(seed: int = 0) -> Tensors:
    """Return a model by an engine's names: the experts of a layer in two tensors, gate above up."""
    tensors = dense(seed)
    for layer in range(LAYERS):
        experts, before = experts_of(layer, seed), f"model.layers.{layer}.mlp.experts."
        tensors[f"{before}w13_weight"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in experts])
        tensors[f"{before}w2_weight"] = torch.stack([one["down"] for one in experts])
    return tensors


def prepared_again(folder: Path, right: bool) -> None:
    """Sync an engine whose kernel wants up above gate; the bug lets it exchange what is in that order already."""
    sent = with_experts()
    save(folder / "sent", sent)
    held = {
        name: torch.cat(tensor.chunk(2, 1)[::-1], 1) if "w13" in name and not right else tensor
        for name, tensor in sent.items()
    }
    save(folder / "engine", held)


def in_small_buckets(folder: Path, right: bool) -> None:
    """Sync an engine in buckets; the bug forgets experts of which a bucket has not all."""
    before = with_experts()
    save(folder / "before", before)
    after = trained(before)
    save(folder / "trainer", after)
    held = {
        name: torch.cat((tensor[: EXPERTS // 2], before[name][EXPERTS // 2 :]))
        if ".experts." in name and not right
        else tensor
        for name, tensor in after.items()
    }
    save(folder / "engine", held)


CASES = (
    Public(
        "trl#5312, trl#5313",
        Command(
            "an engine that wakes up with the weights it began with",
            asleep,
            ("diff", "trainer", "engine", "--also", "base"),
            ("base", "left over|stale|still|are those of|equal to"),
        ),
    ),
    Public(
        "SkyRL#1680",
        Command(
            "gate and up of experts exchanged once more at each sync",
            prepared_again,
            ("diff", "sent", "engine"),
            ("w13_weight", "exchange|order|halves|swap"),
            ("w2_weight",),
        ),
    ),
    Public(
        "sglang#14178",
        Command(
            "experts that a small bucket did not bring",
            in_small_buckets,
            ("diff", "trainer", "engine", "--also", "before"),
            ("w13_weight", "w2_weight", "before", "left over|stale|still|are those of|equal to"),
        ),
    ),
)
