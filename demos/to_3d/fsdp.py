from model import batch, build
from torch.distributed.fsdp import fully_shard

AXES = BATCH_AXES = ("fsdp",)
expect = {"*.weight": "[*/fsdp, *]", "*.bias": "[*/fsdp]"}


def parallelize(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
