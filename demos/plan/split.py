"""The same decoder, with its embedding and its output split over tp too."""

from decoder import AXES, BATCH_AXES, MESH, batch, build, loss
from decoder import parallelize as before
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["AXES", "BATCH_AXES", "MESH", "batch", "build", "loss"]


def parallelize(model, mesh):
    words = {"0": RowwiseParallel(input_layouts=Replicate()), "9": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], words)
    before(model, mesh)
