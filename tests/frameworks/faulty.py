"""Runs somebody's unedited script with a fault put in around its library: `faulty.py FAULT LIBRARY TENSOR SCRIPT ...`.

The fault is done to one tensor at the moment when the library has sharded and loaded the model, before its first step.
"""

from __future__ import annotations

import importlib
import inspect
import os
import runpy
import sys

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def exchanged(tensor):
    """Ranks 0 and 1 have each other's shards, as in a loader that counts ranks from the other end."""
    mine, rank = local(tensor), distributed.get_rank()
    of_all = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_all, mine.contiguous())
    if rank < 2:
        mine.copy_(of_all[1 - rank])


def unstrided(tensor):
    """A loader that takes `_StridedShard` for `Shard`: it cuts axis by axis from left to right."""
    part = tensor.full_tensor().detach()
    for axis, placement in enumerate(tensor.placements):
        coord = tensor.device_mesh.get_local_rank(axis)
        part = part.chunk(tensor.device_mesh.size(axis), placement.dim)[coord]
    local(tensor).copy_(part)


def strides(tensor):
    """A loader that takes the memory of a transposed weight for the weight's own rows."""
    mine = local(tensor)
    mine.copy_(mine.transpose(-1, -2).contiguous().view(mine.shape))


def skipped(tensor):
    """Rank 1 never loads this tensor: it has what was in memory before."""
    if distributed.get_rank() == 1:
        local(tensor).normal_()


def dealt(tensor):
    """A plan that deals experts, or rows, out in turn, where the label says that each rank has a block of them."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    local(tensor).copy_(tensor.full_tensor().detach()[rank::size])


FAULTS = {one.__name__: one for one in (exchanged, unstrided, strides, skipped, dealt)}


def _first_module(results):
    given = results if isinstance(results, list | tuple) else (results,)
    return next((one for one in given if isinstance(one, nn.Module)), nn.Module())


MOMENTS = {
    "transformers": ("transformers.modeling_utils", "PreTrainedModel.from_pretrained", lambda self, done: done),
    "accelerate": ("accelerate.accelerator", "Accelerator.prepare", lambda self, done: _first_module(done)),
    "lightning": (
        "lightning.pytorch.strategies.model_parallel", "ModelParallelStrategy.setup", lambda self, done: self.model,
    ),
    "torchtitan": (
        "torchtitan.components.checkpoint", "CheckpointManager.load", lambda self, done: self.states["model"].model[0],
    ),
    "torch": ("torch.distributed.fsdp", "fully_shard", lambda self, done: done),
}  # fmt: skip
"""The function of each library after which a model is sharded and loaded, and how the model is found then."""


def put_in(fault, library, name):
    """Wrap a library's function: when it has returned, one tensor of its model is harmed. Returns a list of such."""
    module, path, find = MOMENTS[library]
    owner = importlib.import_module(module)
    *inside, last = path.split(".")
    for one in inside:
        owner = getattr(owner, one)
    raw, calls, done_to = inspect.getattr_static(owner, last), [], []
    function = raw.__func__ if isinstance(raw, classmethod) else raw

    def and_harm(*args, **kwargs):
        calls.append(name)
        done = function(*args, **kwargs)
        is_inner = len(calls) > 1  # as where the model is loaded once more to compare with
        calls.pop()
        tensor = None if is_inner else _named(find(args[0], done), name)
        if tensor is not None:
            with torch.no_grad():
                FAULTS[fault](tensor)
            done_to.append(name)
        return done

    setattr(owner, last, classmethod(and_harm) if isinstance(raw, classmethod) else and_harm)
    return done_to


def _named(model, name):
    found = {_clean(one): tensor for one, tensor in model.named_parameters(remove_duplicate=False)}
    return found.get(name)


def _clean(name):
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


if __name__ == "__main__":
    fault, library, tensor, script, *words = sys.argv[1:]
    sys.argv = [script, *words]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    if library == "torchtitan":  # it looks for a device when it is imported
        importlib.import_module("torchtitan_llama").imitate_a_gpu()
    harmed = put_in(fault, library, tensor)
    runpy.run_path(script, run_name="__main__")
    assert harmed, f"{library} never had a {tensor}"
