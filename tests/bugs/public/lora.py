"""Adapters that are saved without the shards of most ranks."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING

from torch.distributed import checkpoint as dcp

from tests.bugs.public.case import Command, Public
from tests.bugs.public.files import random, save
from tests.checkpoint.jobs import Held, job

if TYPE_CHECKING:
    from pathlib import Path

    import torch

A, B = "base_model.model.layers.{}.q_proj.lora_A.weight", "base_model.model.layers.{}.q_proj.lora_B.weight"
RANKS, LOW, FEATURES = 2, 8, 24
LAYERS = range(2)


def adapters() -> dict[str, torch.Tensor]:
    """Return both factors of each layer."""
    first = {A.format(layer): random(LOW, FEATURES, seed=700 + layer) for layer in LAYERS}
    return first | {B.format(layer): random(FEATURES, LOW, seed=710 + layer) for layer in LAYERS}


def rank_0_saved(folder: Path, right: bool) -> None:
    """Save the adapters of a job under FSDP2; the bug saves what rank 0 has of each."""
    whole = adapters()
    held = {
        name: Held(tensor.numpy(), f"[{tensor.shape[0]}/fsdp, {tensor.shape[1]}]") for name, tensor in whole.items()
    }
    job(folder / "job.shardviz", f"fsdp={RANKS}", held)
    save(folder / "adapter", {name: tensor if right else tensor.chunk(RANKS)[0] for name, tensor in whole.items()})


def one_shard_saved(folder: Path, right: bool) -> None:
    """Save adapters under tensor parallel with DCP; the bug takes shards of lora_B for replicas, and saves rank 0's."""
    whole = adapters()
    is_lost = {name: "lora_B" in name and not right for name in whole}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        saved = {name: tensor.chunk(RANKS)[0].clone() if is_lost[name] else tensor for name, tensor in whole.items()}
        dcp.save(saved, checkpoint_id=folder / "adapter")
    index = folder / "adapter" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for name, tensor in whole.items():
        metadata.state_dict_metadata[name].size = tensor.shape
    index.write_bytes(pickle.dumps(metadata))


CASES = (
    Public(
        "accelerate#4206",
        Command(
            "an adapter file with rank 0's slice of each factor",
            rank_0_saved,
            ("diff", "job.shardviz", "adapter"),
            ("lora_A", "lora_B", "rank 0|first|rows 0"),
        ),
    ),
    Public(
        "Megatron-Bridge#2240",
        Command(
            "an adapter with one tensor-parallel shard of lora_B",
            one_shard_saved,
            ("check", "adapter"),
            ("lora_B", "missing|no chunk|not in|gap|nowhere"),
            ("lora_A",),
        ),
    ),
)
