"""FSDP1 and FSDP2: units, flat parameters, gradients held back, and who keeps parameters."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardviz.groups import in_groups, the_only
from shardviz.live.claims.local import FlatParam
from shardviz.live.compat.modules import clean_name, followed, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def give_cpu_streams_events() -> None:
    """Let FSDP2 run on a CPU: torch 2.6.0 lacks what its streams need there, and newer ones do nothing in it.

    HSDP of torch 2.6.0 and 2.7.1 asserts that a stream records an event; 2.13.0 and 2.15.0 do so only on other devices.
    """
    stream: Any = torch.cpu.Stream
    version: Any = torch.__version__
    if version < (2, 13):
        stream.record_event = lambda stream: stream
    if not hasattr(stream, "wait_event"):
        stream.wait_event = lambda stream, event: stream


@contextmanager
def dividing_float64_once() -> Iterator[None]:
    """Make FSDP2 divide float64 gradients as it divides float32 gradients: once.

    Over a group of one rank, as for experts, `foreach_reduce` divides by `set_gradient_divide_factor` in its copy, and
    for float16 and float64 a second time, by the result of `_get_gradient_divide_factors`. Tried on torch 2.13.0
    and 2.15.0. Torch 2.6.0 has no such factor.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    collectives: Any = _fsdp_collectives
    factors = collectives._get_gradient_divide_factors

    def once(group: Any, all_reduce_group: Any, dtype: torch.dtype, *more: Any, **named: Any) -> Any:
        pre, post, *ops = factors(group, all_reduce_group, dtype, *more, **named)
        factor = named.get("factor", more[1] if len(more) > 1 else None)
        is_copied = factor is not None and (group is None or group.size() == 1)
        return (None, None, *ops) if is_copied and dtype == torch.float64 else (pre, post, *ops)

    with replaced(collectives, "_get_gradient_divide_factors", once):
        yield


def unit_calling() -> nn.Module | None:
    """Return the module whose FSDP2 unit makes the collective that runs now; None without one, or if it is several.

    It is `FSDPParamGroup.modules` of the frame that calls. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    frame = sys._getframe(1) if PARAM_GROUPS in sys.modules else None
    while frame is not None and frame.f_globals.get("__name__") != PARAM_GROUPS:
        frame = frame.f_back
    group = frame.f_locals.get("self") if frame is not None else None
    modules: tuple[nn.Module, ...] = getattr(group, "modules", ())
    return the_only(modules)


PARAM_GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def held_back(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters whose gradient FSDP2 keeps until a later backward, with no `.grad`.

    After `set_requires_gradient_sync(False)` it is on the unsharded parameter, after `set_requires_all_reduce(False)`
    in `_partial_reduce_output`. Tried on torch 2.6.0, 2.13.0 and 2.15.0; if a name has moved, nothing is held back.
    """
    for group, param in _fsdp_params(model):
        whole = getattr(param, "_unsharded_param", None)
        grads = getattr(param, "unsharded_accumulated_grad", None), None if whole is None else whole.grad
        if any(grad is not None for grad in (getattr(group, "_partial_reduce_output", None), *grads)):
            yield param.sharded_param


def flat_params(model: nn.Module) -> Iterator[FlatParam]:
    """Yield the original parameters of every FSDP1 flat parameter in a model.

    Reads `FullyShardedDataParallel._handle`, `FlatParamHandle` and, of `FlatParameter`, `_param_infos`, the
    `_param_extensions` of tensor-parallel ones, and `_shared_param_infos`, which has the other names of a parameter.
    Its gradient has numbers for parameters of the user's that are frozen, too (`_params`), which nobody is given.
    Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield from _flat_params_of_handle(prefix, module._handle, getattr(module, "_inter_node_pg", None))


def _flat_params_of_handle(prefix: str, handle: Any, replicate_group: Any) -> Iterator[FlatParam]:
    from torch import distributed

    flat = handle.flat_param
    split = handle.uses_sharded_strategy
    shard_ranks = tuple(distributed.get_process_group_ranks(handle.process_group))
    me = (distributed.get_rank(),)
    shard_group, replicas = (shard_ranks, me) if split else (me, shard_ranks)
    if replicate_group is not None:
        replicas = tuple(distributed.get_process_group_ranks(replicate_group))
    # Before the first forward the parameter is the shard.
    local = getattr(flat, "_local_shard", flat) if split else flat
    size = local.numel()
    grad = getattr(flat, "_saved_grad_shard", None) if split else flat.grad
    grad = flat.grad if grad is None else grad
    shared = in_groups(((info.prim_module, info.prim_param_name), info) for info in flat._shared_param_infos)
    offset = 0
    params = flat._params or [flat] * len(flat._param_infos)
    infos = iter(zip(flat._param_infos, flat._shapes, flat._param_extensions, params, strict=True))
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            own_info, shape, of_tp, param = next(infos)
            for info in (own_info, *shared.get((own_info.module, own_info.param_name), ())):
                yield FlatParam(
                    clean_name(".".join(part for part in (prefix, info.module_name, info.param_name) if part)),
                    clean_name(prefix),
                    tuple(shape),
                    tuple(shape if of_tp is None else of_tp.shape),
                    offset,
                    size * len(shard_group),
                    local.detach(),
                    size * shard_group.index(me[0]),
                    shard_group,
                    replicas,
                    grad if param.requires_grad else None,
                )
        offset += numel


def averages_flat_gradients(model: nn.Module) -> bool:
    """Whether FSDP1 divides what it sums by the number of ranks, and no hook reduces instead.

    `_comm_hook` of its modules, in torch 2.6.0 to 2.15.0.
    """
    return all(getattr(module, "_comm_hook", None) is None for module in model.modules())


def flat_gradients_reduced(note: Callable[[torch.Tensor | None], None]) -> AbstractContextManager[Callable[[], bool]]:
    """Report each gradient that FSDP1 will reduce; yield a function that says if it is reducing.

    It is the whole one of a flat parameter, which autograd has made. `_runtime_utils._post_backward_hook`, in torch
    2.6.0 to 2.15.0; if it has another name, nothing is reported and the answer is always no.
    """
    from torch.distributed.fsdp import _runtime_utils

    return followed(_runtime_utils, "_post_backward_hook", lambda _, handle, *more: note(handle.flat_param.grad))


@contextmanager
def flat_params_without_memory() -> Iterator[None]:
    """Make FSDP1 take a storage without memory for allocated if its size is not 0.

    FSDP1 looks for a data pointer.

    `_flat_param._data_ptr_allocated`, which `SHARD_GRAD_OP` with `use_orig_params=True` asks, in torch 2.6.0 to 2.15.0.
    """
    from torch.distributed.fsdp import _flat_param

    with replaced(_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0):
        yield


def fsdp_units(model: nn.Module) -> Iterator[tuple[str, int, bool, bool]]:
    """Yield what FSDP gathers together: a module's name, bytes on one rank, and how it is kept.

    That is whether it stays gathered until backward, and whether its shards are in the CPU's memory.

    Reads `_fsdp_param_group` of FSDP2's state, its `mp_policy` and `post_forward_mesh_info`, `_orig_size` and
    `offload_to_cpu` of its parameters; of FSDP1 the length of a handle's flat parameter, and `_offload_params`.
    `_auto_reshard_after_forward` of FSDP2 keeps a module inside of no other one gathered, from its first forward on;
    FSDP1 always does (`_post_forward_reshard`), and FSDP2 of torch 2.6.0, which has no such attribute.
    Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        state = _fsdp_state(module)
        is_kept = getattr(state, "_auto_reshard_after_forward", True) and module not in inside
        inside.update(module.modules() if state is not None and module not in inside else ())
        for group in _fsdp_groups(state):
            params = getattr(group, "fsdp_params", ())
            dtype = getattr(getattr(group, "mp_policy", None), "param_dtype", None)
            sizes = (_gathered_bytes(param, dtype) for param in params)
            if params:
                stays = is_kept or group.post_forward_mesh_info is None
                yield clean_name(name), sum(sizes), stays, all(param.offload_to_cpu for param in params)
        if isinstance(module, FullyShardedDataParallel):
            is_root = module not in inside
            inside.update(module.modules())
            if getattr(module, "_handle", None) is not None:
                yield from _unit_of_handle(name, module._handle, is_root=is_root)


def _gathered_bytes(param: Any, dtype: torch.dtype | None) -> int:
    """Return the bytes that FSDP2 gathers of a parameter, as a step has shown if it is encoded."""
    if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") and param.all_gather_outputs:
        return sum(output.numel() * output.itemsize for output in param.all_gather_outputs)
    size: int = param._orig_size.numel() * (dtype or param.sharded_param.dtype).itemsize
    return size


def _unit_of_handle(name: str, handle: Any, *, is_root: bool) -> Iterator[tuple[str, int, bool, bool]]:
    flat, strategy = handle.flat_param, handle._sharding_strategy.name
    if handle.uses_sharded_strategy:
        dtype = handle._fwd_bwd_param_dtype or flat.dtype
        size = flat._unpadded_unsharded_size.numel() * dtype.itemsize
        stays = is_root or strategy not in ("FULL_SHARD", "HYBRID_SHARD")
        yield clean_name(name), size, stays, bool(getattr(handle, "_offload_params", False))


def wide_reductions(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes in which FSDP2 reduces gradients of a narrower compute dtype.

    `FSDPParam.mp_policy`. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    policies = (param.mp_policy for _, param in _fsdp_params(model))
    pairs = [(policy.param_dtype, policy.reduce_dtype) for policy in policies]
    return {wide for narrow, wide in pairs if narrow and wide and wide.itemsize > narrow.itemsize}


def casts_inputs_to(model: nn.Module) -> torch.dtype | None:
    """Return the dtype to which FSDP2 casts numbers that a model itself is given; None if it casts none.

    `_mp_policy` of FSDP2's state. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    policy = getattr(_fsdp_state(model), "_mp_policy", None)
    dtype: torch.dtype | None = getattr(policy, "param_dtype", None)
    return dtype if getattr(policy, "cast_forward_inputs", False) else None


def reduce_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes that FSDP was told to reduce gradients in.

    `FSDPParam.mp_policy` of FSDP2, and `mixed_precision` of FSDP1. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    policies = [param.mp_policy for _, param in _fsdp_params(model)]
    policies += [module.mixed_precision for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    return {dtype for policy in policies if (dtype := getattr(policy, "reduce_dtype", None)) is not None}


def without_pinned_memory(model: nn.Module) -> None:
    """Keep FSDP2 from pinning offloaded memory, which takes a GPU (torch 2.6.0 to 2.15.0)."""
    for _, param in _fsdp_params(model):
        param.pin_memory = False


@contextmanager
def writes_to_gathered(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that names the parameters whose gathered copy is written and then freed.

    FSDP2 gathers into `_unsharded_param` before `to_unsharded`, and frees it in `to_sharded`: both are replaced for
    this long, in torch 2.6.0 to 2.15.0. A write to `.data` counts in no version and is not seen.
    """
    written: list[Any] = []
    versions: dict[int, int] = {}

    def gathered(param: Any) -> None:
        to_unsharded(param)
        versions[id(param)] = param._unsharded_param._version

    def freed(param: Any) -> None:
        if id(param) in versions and param._unsharded_param._version != versions.pop(id(param)):
            written.append(param.sharded_param)
        to_sharded(param)

    def names() -> list[str]:
        return [clean_name(name) for name, own in model.named_parameters() if any(own is param for param in written)]

    kind: Any = next((type(param) for _, param in _fsdp_params(model)), None)
    if kind is None:
        yield list
        return
    to_unsharded, to_sharded = kind.to_unsharded, kind.to_sharded
    with replaced(kind, "to_unsharded", gathered), replaced(kind, "to_sharded", freed):
        yield names


def params_of_fsdp(model: nn.Module) -> Iterator[tuple[torch.Tensor, tuple[int, ...], float | None]]:
    """Yield FSDP2's sharded parameters, the ranks it reduces over, and its divisor.

    `mesh_info` of a parameter, and `gradient_divide_factor` of its group, which `set_gradient_divide_factor` sets, in
    torch 2.13.0 and 2.15.0. Torch 2.6.0 has no such factor: what it divides by is not known, and None.
    """
    for group, param in _fsdp_params(model):
        mesh = getattr(getattr(param, "mesh_info", None), "mesh", None)
        if mesh is not None:
            ranks = tuple(mesh.mesh.flatten().tolist())
            yield param.sharded_param, ranks, _divisor(group, len(ranks))


def _divisor(group: Any, num_ranks: int) -> float | None:
    """Return FSDP2's divisor of summed gradients: the number of ranks, or a set factor."""
    if not hasattr(group, "gradient_divide_factor"):
        return None
    return float(num_ranks if group.gradient_divide_factor is None else group.gradient_divide_factor)


def _fsdp_params(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's parameters, each with its group."""
    for module in model.modules():
        for group in _fsdp_groups(_fsdp_state(module)):
            yield from ((group, param) for param in getattr(group, "fsdp_params", ()))


def _fsdp_state(module: nn.Module) -> Any:
    find: Any = getattr(module, "_get_fsdp_state", None)
    return find() if callable(find) else None


def _fsdp_groups(state: Any) -> list[Any]:
    return list(getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)])


def parameters_are_held(model: nn.Module) -> bool:
    """Whether hooks, optimizers or lists keep parameters that `to_empty` replaces.

    It replaces plain parameters. A parameter that wraps a tensor, such as a DTensor, stays the same object but loses
    its hooks, unless it is FSDP2's, which calls them itself (`sharded_param` in torch 2.6.0 to 2.15.0).
    """
    by_fsdp = {id(param.sharded_param) for _, param in _fsdp_params(model)}
    places = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in by_fsdp:
                continue
            # Modules know it, and so do this loop and the call.
            is_replaced = not is_traceable_wrapper_subclass(parameter)
            if _is_hooked(parameter) or (is_replaced and sys.getrefcount(parameter) > places[id(parameter)] + 2):
                return True
    return False


def _is_hooked(parameter: Any) -> bool:
    """Whether a parameter has hooks, or its autograd node is kept by someone who may hook it.

    torch finds the node by a view of the parameter, which a DTensor whose placements are wrong refuses.
    `_backward_hooks`, `_post_accumulate_grad_hooks` and `_DisableTorchDispatch`, tried on torch 2.6.0, 2.13.0 and
    2.15.0.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return True
    with torch._C._DisableTorchDispatch():
        return parameter.requires_grad and sys.getrefcount(get_gradient_edge(parameter).node) > 1
