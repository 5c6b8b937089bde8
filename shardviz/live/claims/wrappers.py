"""Wrappers and engines around a model, which put `module.` and the like before every name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardviz.dump.records.step import Wrapper, WrapperRecord
from shardviz.live.compat.ddp import comm_hooks, lacks_parameters, params_of_ddp, ran_without_sync
from shardviz.live.compat.fsdp import (
    averages_flat_gradients,
    casts_inputs_to,
    flat_params,
    params_of_fsdp,
    reduce_dtypes,
)
from shardviz.live.compat.modules import clean_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping


ENGINES = {
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "module"),
    "torch._dynamo.eval_frame": ("OptimizedModule", "_orig_mod"),
    "megatron.core.distributed.data_parallel_base": ("_BaseDataParallel", "module"),
    "megatron.core.transformer.module": ("Float16Module", "module"),
    "lightning.fabric.wrappers": ("_FabricModule", "_forward_module"),
}
"""Classes that wrap a whole model, by module, each with the attribute that has the model. Only names are looked up."""


def inner(model: nn.Module) -> nn.Module | None:
    """Return the module inside DDP, an engine, a compiled or a PEFT model; else None."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        wrapped: nn.Module = model.module
        return wrapped
    for module, (kind, attribute) in ENGINES.items():
        if isinstance(model, getattr(sys.modules.get(module), kind, ())):
            inside = getattr(model, attribute)
            return inside if isinstance(inside, nn.Module) else None
    return _inside_peft(model)


def groups_of(model: nn.Module) -> dict[str, Any]:
    """Return the group over which DDP, or DeepSpeed's engine, averages gradients."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return {"ddp": module.process_group}
        group = getattr(module, "data_parallel_group", None) if _is_deepspeed(module) else None
        if group is not None:
            return {"dp": group}
    return {}


def reducing(model: nn.Module, prefix: str = "") -> list[WrapperRecord]:
    """Return the wrappers that reduce a model's gradients, with their groups and parameters.

    Args:
        prefix: What stands before every name in the dump.
    """
    names = {id(param): prefix + clean_name(name) for name, param in _innermost(model).named_parameters()}
    wrapped: dict[tuple[Wrapper, tuple[int, ...], float | None], list[str]] = {}
    of_ddp: Wrapper = "unfrozen" if lacks_parameters(model) else "no_sync" if ran_without_sync(model) else "ddp"
    for param, ranks in params_of_ddp(model):
        wrapped.setdefault((of_ddp, ranks, None), []).append(names.get(id(param), ""))
    for param, ranks, divides_by in params_of_fsdp(model):
        wrapped.setdefault(("fsdp", ranks, divides_by), []).append(names.get(id(param), ""))
    is_averaged = averages_flat_gradients(model)
    for flat in flat_params(_innermost(model)):
        ranks = tuple(sorted({*flat.shard_ranks, *flat.replicate_ranks}))
        divides_by = float(len(ranks)) if is_averaged else None
        wrapped.setdefault(("fsdp", ranks, divides_by), []).append(prefix + flat.name)
    wrapped |= {("zero", ranks, float(len(ranks))): params for ranks, params in _by_deepspeed(model, names)}
    with_ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    keeps = bool(with_ddp) and not any(module.broadcast_buffers for module in with_ddp)
    finds = any(module.find_unused_parameters or module.static_graph for module in with_ddp)
    casts_to = casts_inputs_to(_innermost(model))
    return [
        WrapperRecord(
            kind,
            ranks,
            tuple(filter(None, params)),
            by,
            keeps and kind not in ("fsdp", "zero"),
            finds and kind not in ("fsdp", "zero"),
            casts_to="" if casts_to is None or kind != "fsdp" else str(casts_to).removeprefix("torch."),
        )
        for (kind, ranks, by), params in wrapped.items()
    ]


def _by_deepspeed(model: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """Yield the ranks over which DeepSpeed's engines average gradients, and the parameters."""
    for module in filter(_is_deepspeed, model.modules()):
        group: Any = module.data_parallel_group
        params = [names.get(id(param), "") for param in module.parameters() if param.requires_grad]
        yield tuple(distributed.get_process_group_ranks(group)), params


COMPRESSED = {"bf16_compress": torch.bfloat16, "fp16_compress": torch.float16}
APPROXIMATE = ("powerSGD", "quantization_")
"""What names of torch's hooks have that compress gradients: to a dtype, and to an approximation."""


def reduced_in(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes that FSDP, or a hook of DDP, reduces gradients in, as far as it was told to."""
    hooks = comm_hooks(model)
    of_hooks = {dtype for part, dtype in COMPRESSED.items() if any(part in name for name in hooks)}
    return reduce_dtypes(model) | of_hooks


def rounded_to(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of eight bits to which torchao's linear modules round what they multiply."""
    kind: Any = getattr(sys.modules.get("torchao.float8.float8_linear"), "Float8Linear", None)
    configs = [module.config for module in model.modules() if kind is not None and isinstance(module, kind)]
    casts = (cast for config in configs for cast in (config.cast_config_input, config.cast_config_grad_output))
    return {cast.target_dtype for cast in casts}


def approximated_by(model: nn.Module) -> str:
    """Return the name of a hook by which DDP sends an approximation of gradients; empty if there is none."""
    return next((name for name in comm_hooks(model) if any(part in name for part in APPROXIMATE)), "")


def _innermost(model: nn.Module) -> nn.Module:
    inside = inner(model)
    return model if inside is None else _innermost(inside)


def _is_deepspeed(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    return kind is not None and isinstance(module, kind)


def _inside_peft(model: nn.Module) -> nn.Module | None:
    kind = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if kind is None or not isinstance(model, kind):
        return None
    inside: nn.Module = model.base_model
    tuner = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTuner", None)
    adapted: nn.Module = inside.model if tuner is not None and isinstance(inside, tuner) else inside
    return adapted


def adapted_layers(model: nn.Module) -> frozenset[str]:
    """Return the names of modules with PEFT adapters; the layer itself is their `base_layer`."""
    kind = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    return (
        frozenset(name for name, module in model.named_modules() if isinstance(module, kind)) if kind else frozenset()
    )


def without_adapter(name: str, adapted: Collection[str]) -> str:
    """Return what a tensor is called without the adapters around its layer.

    Args:
        adapted: The modules that have adapters.

    Example:
        >>> without_adapter("layers.0.q_proj.base_layer.weight", {"layers.0.q_proj"})
        'layers.0.q_proj.weight'
    """
    module, _, name_in_layer = name.partition(".base_layer.")
    return f"{module}.{name_in_layer}" if name_in_layer and module in adapted else name
