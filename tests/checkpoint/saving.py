"""What the ranks of the fixture do: train a step on a mesh of 2 x 2, and save model and optimizer in every format."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz

HAS_HF = hasattr(checkpoint, "HuggingFaceStorageWriter")
"""Whether torch writes Hugging Face's format, as 2.6 does not."""
FORMATS = ("dcp", "flat", *(("hf",) if HAS_HF else ()), "whole", "half", "moved")


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 10))


def save(world: object, folder: str) -> None:
    """Write `folder/FORMAT` for each of `FORMATS`."""
    root = Path(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = built()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
    parts = get_state_dict(model, optimizer)
    checkpoint.save(
        {"app": dict(zip(("model", "optimizer"), parts, strict=True)), "step": 2}, checkpoint_id=root / "dcp"
    )
    shardviz.capture(model, root / "job.shardviz", mesh=mesh)
    flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    checkpoint.save(dict(zip(("model", "optim"), flat, strict=True)), checkpoint_id=root / "flat")
    if HAS_HF:
        writer = checkpoint.HuggingFaceStorageWriter(path=str(root / "hf"), save_distributed=True)
        checkpoint.save(parts[0], storage_writer=writer)
    full = {name: value.full_tensor().contiguous() for name, value in parts[0].items()}
    moved = {**full, "0.weight": torch.cat(full["0.weight"].chunk(2)[::-1])}
    if distributed.get_rank() == 0:
        torch.save(parts[0], root / "shards.pt")
        for name, tensors in (("whole", full), ("half", {one: full[one].bfloat16() for one in full}), ("moved", moved)):
            (root / name).mkdir()
            save_file(tensors, root / name / "model.safetensors")
    distributed.barrier()
