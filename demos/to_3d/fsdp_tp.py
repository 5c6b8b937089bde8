from model import batch, build
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

AXES = ("fsdp", "tp")
BATCH_AXES = ("fsdp",)
expect = {"*.up.weight": "[*/tp/fsdp, *]", "*.down.weight": "[*/fsdp, */tp]"}


def parallelize(model, mesh):
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
