"""Code that the pipeline probes share: which layers a stage has, and one step of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage

from shardviz.errors import ProbeError
from shardviz.probes._models import Blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh

LAYERS = 8
FEATURES = 12


def refuse_idle_stages(mesh: Mesh, stages_per_rank: int = 1) -> None:
    """Refuse more stages than there are layers.

    Raises:
        ProbeError: There are more stages than layers.
    """
    stages = mesh.axis_size("pp") * stages_per_rank
    if stages > LAYERS:
        raise ProbeError(
            f"pp({mesh.axis_size('pp')}) * {stages_per_rank} = {stages} stages for {LAYERS} layers: "
            "a stage without parameters cannot run backward",
            f"choose pp of at most {LAYERS // stages_per_rank}",
        )


def layers_of(stage: int, num_stages: int) -> list[str]:
    """Return the names of a stage's layers: consecutive, with one more in the first stages if 8 does not divide."""
    return [str(number) for number in torch.arange(LAYERS).tensor_split(num_stages)[stage].tolist()]


def keep(model: Blocks, names: list[str]) -> None:
    """Drop all layers except the named ones, which keep their names."""
    model.layers = nn.ModuleDict({name: layer for name, layer in model.layers.items() if name in names})


def piece(model: Blocks, names: list[str]) -> Blocks:
    """Return some layers as a model of their own, which shares the model's parameters."""
    blocks = Blocks(0)
    blocks.layers = nn.ModuleDict({name: model.layers[name] for name in names})
    return blocks


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of one micro-batch, which ignores the target."""
    return output.square().mean()


def stage_of(
    blocks: nn.Module, number: int, count: int, rows: torch.Tensor, microbatches: int, mesh: DeviceMesh
) -> PipelineStage:
    """Return torch's stage `number` of `count`, with an example of its input and output."""
    like = rows[: len(rows) // microbatches].detach()
    received, sent = like.clone().requires_grad_(number > 0), like.clone().requires_grad_()
    group = mesh.get_group("pp")
    return PipelineStage(blocks, number, count, rows.device, input_args=received, output_args=sent, group=group)


def run(schedule: Any, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Run one step of a schedule: the first stage takes the rows, the last has the loss, which is sent to all ranks."""
    first, last = mesh.get_local_rank("pp") == 0, mesh.get_local_rank("pp") == mesh["pp"].size() - 1
    losses: list[torch.Tensor] = []
    schedule.step(*([rows] if first else []), **({"target": rows, "losses": losses} if last else {}))
    loss = torch.stack(losses).mean() if last else rows.new_zeros(())
    return send_to_all(loss.detach(), mesh)


def send_to_all(loss: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Broadcast the last stage's loss along pp."""
    group = mesh.get_group("pp")
    last = distributed.get_global_rank(group, mesh["pp"].size() - 1)
    distributed.broadcast(loss, src=last, group=group)
    return loss
