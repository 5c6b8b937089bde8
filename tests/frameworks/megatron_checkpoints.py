"""Checkpoints that Megatron-core writes with its distributed optimizer, on CPUs, though it asks for CUDA by name."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

from tests.live.claims.test_megatron_models import gpt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BETAS = (0.9, 0.999)


class OnCpus(TorchFunctionMode):
    """Makes tensors on the CPU where `device="cuda"` is asked for, and calls their types by CUDA's names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        found = func(*args, **options)
        return found.replace("torch.", "torch.cuda.") if name == "type" and len(args) == 1 else found


@contextmanager
def on_cpus() -> Iterator[None]:
    """Let Megatron's optimizer be built where there is no GPU; its files are the same."""
    kept = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device, torch.cuda.synchronize = (lambda: "cpu"), (lambda *_: None)  # type: ignore[assignment]
    try:
        with OnCpus():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = kept


def gradient(name: str, shape: torch.Size) -> torch.Tensor:
    """Return a parameter's gradient: drawn from its name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))).bfloat16().float()


def saved(folder: Path, sharding: str) -> dict[str, torch.Tensor]:
    """Train one step, and save model and optimizer; return every gradient. Every rank calls this."""
    with on_cpus():
        from megatron.core import dist_checkpointing
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        torch.manual_seed(0)
        model = gpt().bfloat16()
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(model.config, settings, model)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=True, clip_grad=0.0)
        optimizer = get_megatron_optimizer(config, [wrapped])
        gradients = {name: gradient(name, one.shape) for name, one in model.named_parameters()}
        for name, one in model.named_parameters():
            one.main_grad.copy_(gradients[name])
        optimizer.step()
        weights = model.sharded_state_dict()
        states = optimizer.sharded_state_dict(weights, metadata={"distrib_optim_sharding_type": sharding})
        if distributed.get_rank() == 0:
            folder.mkdir(parents=True)
        distributed.barrier()
        dist_checkpointing.save({"model": weights, "optimizer": states}, str(folder))
        distributed.barrier()
    return gradients
