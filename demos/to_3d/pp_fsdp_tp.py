import torch
from fsdp_tp import expect
from model import batch, build
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

AXES = ("pp", "fsdp", "tp")
BATCH_AXES = ("fsdp",)
STAGE_AXES = ("pp",)
MICROBATCHES = 4


def parallelize(model, mesh):
    first, last = (2 * (mesh.get_local_rank("pp") + edge) for edge in (0, 1))
    for name in [name for name, _ in model.named_children() if not first <= int(name) < last]:
        delattr(model, name)  # the blocks of the other stage; those that stay keep their names
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["fsdp"], reshard_after_forward=False)


def stages(model, mesh):
    return {mesh.get_local_rank("pp"): model}


def step(model, rows, mesh):
    group, number = mesh.get_group("pp"), mesh.get_local_rank("pp")
    like = rows[: len(rows) // MICROBATCHES]
    given, sent = like.clone().requires_grad_(number > 0), like.clone().requires_grad_()
    stage = PipelineStage(model, number, 2, rows.device, input_args=given, output_args=sent, group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda output, _: output.square().mean())
    losses = []
    if number == 0:
        schedule.step(rows)
    else:
        schedule.step(target=rows, losses=losses)
    loss = torch.stack(losses).mean() if losses else rows.new_zeros(())
    distributed.broadcast(loss, src=distributed.get_global_rank(group, 1), group=group)
    return loss.detach()
