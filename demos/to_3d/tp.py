from model import batch, build
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

AXES = ("tp",)
expect = {"*.up.weight": "[*/tp, *]", "*.down.weight": "[*, */tp]", "*.up.bias": "[*/tp]", "*.down.bias": "[*]"}


def parallelize(model, mesh):
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
