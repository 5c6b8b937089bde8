"""Folders as DeepSpeed's ZeRO writes them, made with torch alone: two groups of parameters of odd sizes."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = ({"0.weight": (5, 7), "2.weight": (3, 5, 2)}, {"0.bias": (5,), "2.bias": (3,), "scale": ()})
KINDS = ("exp_avg", "exp_avg_sq")


def wholes() -> dict[str, dict[str, torch.Tensor]]:
    """Return each parameter's master and moments, whole."""
    torch.manual_seed(0)
    shapes = {name: shape for group in GROUPS for name, shape in group.items()}
    return {kind: {name: torch.rand(shape) for name, shape in shapes.items()} for kind in ("fp32", *KINDS)}


def save_zero(root: Path, stage: int, world: int = 2) -> Path:
    """Write a checkpoint of a stage; return its folder."""
    step = root / "global_step2"
    step.mkdir(parents=True)
    (root / "latest").write_text("global_step2")
    for rank in range(world):
        if stage == 3 or rank == 0:
            before = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(_model(stage, rank, world), step / f"{before}mp_rank_00_model_states.pt")
        torch.save(_optim(stage, rank, world), step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return root


def save_universal(root: Path, stage: int) -> Path:
    """Write what `ds_to_universal` makes of a checkpoint of a stage: a file for each state of each parameter."""
    step = save_zero(root, stage) / "global_step2"
    (root / "latest").rename(root / "latest_universal")
    for path in step.glob("*_optim_states.pt"):
        path.unlink()
    for kind, each in wholes().items():
        for name, one in each.items():
            (step / "zero" / name).mkdir(parents=True, exist_ok=True)
            padded = torch.cat([one.flatten(), torch.zeros(-one.numel() % 4)])
            torch.save(padded if stage == 3 else {"cat_dim": 0, "param": one}, step / "zero" / name / f"{kind}.pt")
            if stage < 3:
                torch.save(torch.tensor(2.0), step / "zero" / name / "step.pt")
    return root


def _model(stage: int, rank: int, world: int) -> dict[str, object]:
    masters = wholes()["fp32"]
    module = OrderedDict((name, one.bfloat16() if stage < 3 else torch.empty(0)) for name, one in masters.items())
    module["buffer"] = torch.arange(4.0)
    frozen = torch.arange(6.0)
    if stage < 3:
        module["frozen"] = frozen.reshape(2, 3)
    return {
        "module": module,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in GROUPS],
        "frozen_param_shapes": {"frozen": torch.Size((2, 3))} if stage == 3 else None,
        "frozen_param_fragments": {"frozen": _part(frozen, rank, world)} if stage == 3 else None,
        "shared_params": {"tied": "0.weight"} if stage == 3 else {},
        "dp_world_size": world,
        "ds_config": {"zero_optimization": {"stage": stage}},
    }


def _optim(stage: int, rank: int, world: int) -> dict[str, object]:
    buffers = {
        kind: [_buffer(whole, group, stage, rank, world) for group in GROUPS] for kind, whole in wholes().items()
    }
    states = {number: {kind: buffers[kind][number] for kind in KINDS} for number in range(len(GROUPS))}
    masters = buffers["fp32"]
    if stage < 3:  # they are saved without the padding at the end, moments with it
        sizes = [sum(math.prod(shape) for shape in group.values()) for group in GROUPS]
        masters = [one[: max(0, size - rank * len(one))].clone() for one, size in zip(masters, sizes, strict=True)]
        inner = {"base_optimizer_state": {"state": states}, "single_partition_of_fp32_groups": masters}
        return {"optimizer_state_dict": {**inner, "zero_stage": stage, "partition_count": [world] * len(GROUPS)}}
    inner = {"optimizer_state_dict": {"state": states}, "fp32_flat_groups": masters}
    return {"optimizer_state_dict": {**inner, "zero_stage": 3, "partition_count": world}}


def _buffer(
    whole: dict[str, torch.Tensor], group: dict[str, tuple[int, ...]], stage: int, rank: int, world: int
) -> torch.Tensor:
    if stage == 3:
        return torch.cat([_part(whole[name].flatten(), rank, world) for name in group])
    flat = torch.cat([whole[name].flatten() for name in group])
    padded = torch.cat([flat, torch.zeros(-len(flat) % (2 * world))])
    return padded.chunk(world)[rank].clone()


def _part(flat: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    padded = torch.cat([flat, torch.full((-len(flat) % world,), 7.0)])
    return padded.chunk(world)[rank].clone()
