"""Every private torch API that shardviz uses is called from here, and nowhere else.

Each function's docstring names the torch versions it was tried on. Also here: names that moved between versions.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from shardviz.layout import placements
from shardviz.live.claims.flat import FlatParam

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard  # type: ignore[attr-defined]
try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.debug import CommDebugMode

__all__ = [
    "CommDebugMode",
    "DTensor",
    "MixedPrecisionPolicy",
    "Partial",
    "Replicate",
    "Shard",
    "answered_alone",
    "asks_for_shapes",
    "clean_name",
    "computed_buffers",
    "count_groups",
    "ddp_alone",
    "ddp_buckets",
    "default_store",
    "distribute_tensor",
    "dividing_float64_once",
    "fake_mode",
    "fake_world",
    "flat_gradients_reduced",
    "flat_params",
    "flatten_mesh",
    "follow_modules_by",
    "fsdp_units",
    "fully_shard",
    "futures_answered",
    "has_ddp",
    "has_storage",
    "held_back",
    "id_without_memory",
    "in_backward",
    "inner_tensors",
    "is_compiled",
    "know_fakes",
    "load_hooks",
    "local_of",
    "looks_for_unused",
    "make_ranks_of_threads",
    "new_fakes",
    "pipelines_alone",
    "placement_of",
    "plain_tensors",
    "quiet_redistribution",
    "ranks_of_operator",
    "real_tensors",
    "root_mesh",
    "stages_of",
    "storages_resized",
    "torch_placement",
    "unit_of",
    "use_public_names",
    "without_compiling",
    "without_pinned_memory",
    "working_out_shapes",
    "world_of",
]


def __getattr__(name: str) -> Any:
    """Return `CommDebugMode`, imported when it is first asked for: with it comes all of torch's `_tools`."""
    if name != "CommDebugMode":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from torch.distributed.tensor.debug import CommDebugMode
    except ImportError:  # torch 2.4
        from torch.distributed._tensor.debug import CommDebugMode  # type: ignore[import-not-found,no-redef]
    return CommDebugMode


def use_public_names() -> None:
    """Let a probe import DTensor and FSDP2 by their public names on torch 2.4 and 2.5 too, which lack some of them.

    Called before a probe is loaded, and nowhere else, because it adds names to torch's own modules. It changes nothing
    on torch 2.6 and newer. Tried on 2.4.1 and 2.13.0.
    """
    from torch.distributed import fsdp, tensor

    for home, names in (
        (fsdp, {"MixedPrecisionPolicy": MixedPrecisionPolicy, "fully_shard": fully_shard}),
        (tensor, {one.__name__: one for one in (DTensor, Partial, Replicate, Shard, distribute_tensor)}),
    ):
        for name in names.keys() - vars(home).keys():
            setattr(home, name, names[name])


def make_ranks_of_threads() -> None:
    """Give each thread of this process a process group world of its own, backend "threaded". This cannot be undone.

    Tried on torch 2.4.1, 2.13.0 and 2.15.0.
    """
    from torch.testing._internal.distributed import multi_threaded_pg

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    multi_threaded_pg._install_threaded_pg()  # type: ignore[no-untyped-call]


def placement_of(placement: Any) -> placements.Placement:
    """Return one of torch's placements as a plain value.

    `_StridedShard`, a private name, is a subclass of `Shard` in torch 2.5.1 and a separate class in 2.13.0 and 2.15.0,
    so it is tested first.

    Raises:
        TypeError: The placement is of an unknown kind.
    """
    if hasattr(placement, "split_factor"):
        return placements.StridedShard(placement.dim, int(placement.split_factor))
    if placement.is_replicate():
        return placements.Replicate()
    if placement.is_partial():
        return placements.Partial(str(placement.reduce_op))
    if placement.is_shard():
        return placements.Shard(placement.dim)
    raise TypeError(f"unknown placement {placement!r}")


def torch_placement(placement: placements.Placement) -> Any:
    """Return a plain value as one of torch's placements.

    Raises:
        TypeError: This torch has no `_StridedShard`, which came after 2.4.1. Tried on 2.13.0 and 2.15.0.
    """
    if isinstance(placement, placements.StridedShard):
        from torch.distributed.tensor import placement_types

        if not hasattr(placement_types, "_StridedShard"):
            raise TypeError(f"torch {torch.__version__} has no placement for {placement}")
        return placement_types._StridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, placements.Shard):
        return Shard(placement.dim)
    return Partial(placement.op) if isinstance(placement, placements.Partial) else Replicate()


def default_store() -> Any:
    """Return the store that the job's ranks met at. `_get_default_store` in torch 2.4.1 to 2.13.0."""
    return torch.distributed.distributed_c10d._get_default_store()


def stages_of(schedule: Any) -> list[tuple[nn.Module, Any]]:
    """Return this rank's stages of a pipeline's schedule, each with the process group of its pipeline.

    `_stage` of a schedule with one stage a rank, `_stages` of one with several, in torch 2.4.1 to 2.13.0.
    """
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    return [(stage.submod, stage.group) for stage in stages]


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a sub-mesh was sliced or flattened from; any other mesh is its own root.

    `_get_root_mesh` in torch 2.13.0 and 2.15.0; `_mesh_resources.get_root_mesh` and, in 2.4.1, `get_parent_mesh`.
    """
    if hasattr(mesh, "_get_root_mesh"):
        root: DeviceMesh = mesh._get_root_mesh()
        return root
    from torch.distributed import device_mesh

    resources: Any = device_mesh._mesh_resources
    find = getattr(resources, "get_root_mesh", None) or resources.get_parent_mesh
    return find(mesh) or mesh


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements of its own: sparse ones and subclasses that wrap other tensors do not.

    A wrapper's storage is there, but has no data pointer. Tried on torch 2.4.1 and 2.13.0.
    """
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return hasattr(tensor, "trigger_wait")  # a functional collective's result becomes plain once it is waited for
    return True


def computed_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that are in no checkpoint, because every rank computes them.

    `_non_persistent_buffers_set` in torch 2.4.1 and 2.13.0.
    """
    return frozenset(
        clean_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )


def load_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield what a module runs on a state dict before it loads it, except for torch's own hooks.

    `_load_state_dict_pre_hooks` in torch 2.4.1 and 2.13.0: its values are wrappers that pass the module on.
    """
    for wrapped in module._load_state_dict_pre_hooks.values():
        hook = getattr(wrapped, "hook", wrapped)
        if not (getattr(hook, "__module__", None) or "torch.").startswith(("torch.", "functools")):
            yield wrapped


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Flatten a mesh's axes into one; torch may use the flattened mesh to merge collectives from then on.

    Calls `DeviceMesh._flatten`, tried on torch 2.13.0 and 2.15.0; 2.4.1 has none, and the mesh itself is returned.
    """
    flat: DeviceMesh = mesh._flatten() if hasattr(mesh, "_flatten") else mesh
    return flat


@contextmanager
def replaced(owner: Any, name: str, new: object) -> Iterator[None]:
    """Put something in the place of an attribute of a module or a class, for as long as the context lasts."""
    before = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def world_of(group: Any) -> Iterator[None]:
    """Let a process group be the whole world for its members: its first ranks are the job's first ranks.

    Names of groups are counted, and the members make groups that the others do not: their count is where the caller
    sets it right with `count_groups`. `_update_default_pg` and `_world.default_pg`, tried on torch 2.13.0.
    """
    c10d = torch.distributed.distributed_c10d
    before = c10d._world.default_pg
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(before)


def count_groups(at_least: int = 0) -> int:
    """Return how many process groups were named, after setting it to a number if it is smaller.

    `_world.group_count`, tried on torch 2.13.0.
    """
    world = torch.distributed.distributed_c10d._world
    world.group_count = max(world.group_count, at_least)
    return int(world.group_count)


def in_backward() -> bool:
    """Whether this thread is running a backward pass.

    Tried on torch 2.4.1, 2.13.0 and 2.15.0.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def groups_here() -> list[tuple[str, tuple[int, ...]]]:
    """Return the process groups that this rank is in, each with what its maker calls it.

    `_world.pg_group_ranks` and `group_desc` in torch 2.4.1 to 2.15.0; the groups of a mesh are called `mesh_` and the
    name of the axis.
    """
    ranks: dict[Any, dict[int, int]] = torch.distributed.distributed_c10d._world.pg_group_ranks
    rank = torch.distributed.get_rank()
    return [(str(getattr(group, "group_desc", "")), tuple(of)) for group, of in ranks.items() if rank in of]


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` made of one, or was compiled in place by `Module.compile`.

    `OptimizedModule` and `_compiled_call_impl` in torch 2.4.1 to 2.13.0.
    """
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def asks_for_shapes(inputs: tuple[Any, ...]) -> bool:
    """Whether torch is running a pipeline's stage only to infer the shapes of its outputs.

    torch 2.4.1 does so on meta tensors, 2.13.0 and 2.15.0 on uninitialised ones, in `_forward_metadata_inference`.

    Args:
        inputs: The inputs of the stage.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_forward_metadata_inference":
        frame = frame.f_back
    return frame is not None or any(torch.is_tensor(one) and one.is_meta for one in inputs)


def follow_modules_by(mode: CommDebugMode, tracker: Any) -> None:
    """Give a `CommDebugMode` a different tracker of the running module.

    The attribute exists in torch 2.4.1, 2.13.0 and 2.15.0.
    """
    mode.advanced_module_tracker = tracker


def ranks_of_operator(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks of the group that one of torch's collective operators runs over.

    `c10d` operators get the group as a script object, functional ones its name; both are private. Tried on torch
    2.4.1, 2.13.0 and 2.15.0.
    """
    from torch import distributed

    groups: Any = distributed.distributed_c10d
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group: Any = distributed.ProcessGroup.unbox(arg)
            return tuple(distributed.get_process_group_ranks(group))
        if isinstance(arg, str) and "functional" in str(func) and arg in groups._world.pg_names.values():
            return tuple(distributed.get_process_group_ranks(groups._resolve_process_group(arg)))
    return tuple(range(distributed.get_world_size()))


@contextmanager
def quiet_redistribution() -> Iterator[None]:
    """Silence torch's advice on slow redistributions during those that shardviz itself runs.

    The logger's name is private; torch 2.13.0 and 2.15.0 have it, 2.4.1 gives no such advice.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def dividing_float64_once() -> Iterator[None]:
    """Let FSDP2 divide float64 gradients as it divides float32 gradients, the dtype in which the model is trained.

    Over a group of one rank, as for experts, `foreach_reduce` divides by `set_gradient_divide_factor` in its copy, and
    for float16 and float64 a second time, by the result of `_get_gradient_divide_factors`. Tried on torch 2.13.0 and
    2.15.0; 2.4.1 has no such factor.
    """
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    except ImportError:
        yield
        return
    collectives: Any = _fsdp_collectives
    factors = collectives._get_gradient_divide_factors

    def once(group: Any, all_reduce_group: Any, dtype: torch.dtype, *rest: Any, **named: Any) -> Any:
        pre, post, *ops = factors(group, all_reduce_group, dtype, *rest, **named)
        factor = named.get("factor", rest[1] if len(rest) > 1 else None)
        is_copied = factor is not None and (group is None or group.size() == 1)
        return (None, None, *ops) if is_copied and dtype == torch.float64 else (pre, post, *ops)

    with replaced(collectives, "_get_gradient_divide_factors", once):
        yield


def held_back(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters whose gradient FSDP2 keeps to itself until a later backward, so that `.grad` is None.

    After `set_requires_gradient_sync(False)` it is on the unsharded parameter, after `set_requires_all_reduce(False)`
    in `_partial_reduce_output`. Tried on torch 2.13.0; where a name has moved, nothing is held back.
    """
    for module in model.modules():
        find: Any = getattr(module, "_get_fsdp_state", None)
        state = find() if callable(find) else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            partial = getattr(group, "_partial_reduce_output", None) is not None
            for param in getattr(group, "fsdp_params", ()):
                whole = getattr(param, "_unsharded_param", None)
                kept = getattr(param, "unsharded_accumulated_grad", None), None if whole is None else whole.grad
                if partial or any(grad is not None for grad in kept):
                    yield param.sharded_param


def flat_params(model: nn.Module) -> Iterator[FlatParam]:
    """Yield the original parameters of every FSDP1 flat parameter in a model.

    Reads `FullyShardedDataParallel._handle`, `FlatParamHandle` and, of `FlatParameter`, `_param_infos`, the
    `_param_extensions` of tensor-parallel ones, and `_shared_param_infos`, which has the other names of a parameter.
    Tried on torch 2.4.1, 2.13.0 and 2.15.0.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield from _of_handle(prefix, module._handle, getattr(module, "_inter_node_pg", None))


def _of_handle(prefix: str, handle: Any, replicate_group: Any) -> Iterator[FlatParam]:
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
    shared: dict[tuple[Any, str], list[Any]] = {}
    for info in flat._shared_param_infos:
        shared.setdefault((info.prim_module, info.prim_param_name), []).append(info)
    offset = 0
    infos = iter(zip(flat._param_infos, flat._shapes, flat._param_extensions, strict=True))
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            own, shape, of_tp = next(infos)
            for info in (own, *shared.get((own.module, own.param_name), ())):
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
                    grad,
                )
        offset += numel


@contextmanager
def fake_world(rank: int, num_ranks: int) -> Iterator[None]:
    """Be one rank of a world that does not exist: its collectives send nothing, and leave their outputs as they were.

    `FakeStore` of `torch.testing._internal`, and the backend "fake", tried on torch 2.13.0.
    """
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        with _ddp_unasked(), _one_empty_part():
            yield
    finally:
        distributed.destroy_process_group()


def fake_mode() -> Any:
    """Return a mode in which tensors have shapes, element types and devices, and no memory. Tried on torch 2.13.0."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    has_entries = hasattr(FakeTensorMode, "_make_cache_entry")
    mode: Any = _with_quick_keys(FakeTensorMode) if has_entries else FakeTensorMode
    return mode(allow_non_fake_inputs=True)


def new_fakes() -> list[tuple[Any, Any]]:
    """Return what `fake_mode` has found out since it was last asked, for `know_fakes` in another process."""
    found = [((str(key[0]), *key[1:]), _FAKES[key]) for key in _NEW_FAKES]
    _NEW_FAKES.clear()
    return found


def know_fakes(found: Iterable[tuple[Any, Any]]) -> None:
    """Know what operators return on tensors without values, so that it need not be found out again."""
    for (name, *rest), entry in found:
        space, packet, overload = name.split(".")
        func = getattr(getattr(getattr(torch.ops, space), packet), overload)
        key = (func, *rest)
        _FAKES[key] = entry


_FAKES: dict[tuple[Any, ...], Any] = {}
"""What operators return, by operator and arguments: entries of torch's cache."""

_NEW_FAKES: list[tuple[Any, ...]] = []

_PLAIN_ARGUMENTS = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments, beside tensors and lists, whose values are part of an operator's key as they are."""


@cache
def _with_quick_keys(kind: Any) -> Any:
    """Return a `FakeTensorMode` that finds what it has in its cache in a third of the time.

    torch makes a key of 17 attributes of every tensor, one by one in Python, for each operator of a step. The key here
    has those of them that do not follow from others, and leads to the same entry of torch's cache; where it is not
    sure, torch decides. `_cached_dispatch_impl`, `_make_cache_entry` and `_output_from_cache_entry` in torch 2.13.0.
    """

    class Quick(kind):  # type: ignore[misc]
        _used: tuple[Any, Any, Any] = None, None, None

        def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            key = _quick_key(self, func, args, kwargs)
            entry = _FAKES.get(key) if key is not None else None
            if entry is not None:
                return super()._output_from_cache_entry(None, entry, None, func, args)
            try:
                returned = super()._cached_dispatch_impl(func, types, args, kwargs)
                if key is not None and args and self._used[0] is func and self._used[1] is args:
                    _FAKES[key] = self._used[2]
                    _NEW_FAKES.append(key)
            finally:
                self._used = None, None, None  # kept, its tensors would count as memory of the step
            return returned

        def _make_cache_entry(self, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
            entry = super()._make_cache_entry(state, key, func, args, kwargs, output)
            self._used = func, args, entry
            return entry

        def _output_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
            self._used = func, args, entry
            return super()._output_from_cache_entry(state, entry, key, func, args)

    return Quick


def _quick_key(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return what tells an operator on these arguments from others; None where plain attributes do not."""
    parts: list[Any] = [func, torch.get_default_dtype(), torch._C._get_default_device()]
    if torch.is_inference_mode_enabled() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
        return None
    if not _add_to_key(mode, parts, args) or not _add_to_key(mode, parts, [*kwargs, *kwargs.values()]):
        return None
    return tuple(parts)


def _add_to_key(mode: Any, parts: list[Any], values: Any) -> bool:
    """Add arguments to a key; returns whether that is all there is to them."""
    parts += type(values), len(values)
    for one in values:
        kind = type(one)
        if kind in _PLAIN_ARGUMENTS and one == one:  # NaN is not
            parts += kind, one
        elif kind is list or kind is tuple:
            if not _add_to_key(mode, parts, one):
                return False
        elif getattr(one, "fake_mode", None) is not mode or not _add_tensor(parts, one):
            return False
    return True


def _add_tensor(parts: list[Any], fake: Any) -> bool:
    if fake.constant is not None or fake.layout is not torch.strided or fake.is_quantized or fake.is_inference():
        return False
    if fake._has_symbolic_sizes_strides:
        return False
    parts += fake.dtype, fake.shape, fake.stride(), fake.storage_offset(), fake.untyped_storage().nbytes()
    parts += fake.fake_device, fake.requires_grad, fake.is_conj(), fake.is_neg()
    return True


def answered_alone(func: Any, args: Any) -> Any:
    """Return the device of a fake tensor, which it asks every mode for; None if another operator is run.

    `prim.device` and `FakeTensor.fake_device`, tried on torch 2.13.0: half of all that modes see in a step.
    """
    if func is not torch.ops.prim.device.default or not hasattr(args[0], "fake_device"):
        return None
    return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device


class _Vote:
    """A stage's vote, which is read as a number."""

    def __init__(self, vote: int) -> None:
        self.vote = vote

    def item(self) -> int:
        """Return the vote."""
        return self.vote


@contextmanager
def pipelines_alone() -> Iterator[None]:
    """Let a stage of a pipeline take its own vote for that of all: whether it was given the shapes of what it receives.

    `PipelineStage._warmup_backward_result`, which sends and receives votes, and `_user_meta`, in torch 2.13.0; where
    there are no votes, nothing is done.

    Raises:
        RuntimeError: A stage was not given the shapes, which only the stage before it knows.
    """
    from torch.distributed.pipelining import stage as pipelining

    kind: Any = pipelining.PipelineStage
    before = getattr(kind, "_warmup_backward_result", None)
    if before is None:
        yield
        return

    def alone(self: Any, received_result: Any = None) -> _Vote:
        like = torch.zeros(1, dtype=torch.int32) if isinstance(received_result, _Vote) else received_result
        before(self, like)
        modes: Any = pipelining
        if modes.InferenceMode.needs_dynamic(self._user_meta, True):
            raise RuntimeError(
                "PipelineStage asks the stage before it for shapes: give it input_args and output_args to be planned"
            )
        return _Vote(1)

    with replaced(kind, "_warmup_backward_result", alone):
        yield


class _PartOfBucket:
    """What a hook of DistributedDataParallel sees of a bucket: the interface of torch's `GradBucket`."""

    def __init__(self, buffer: torch.Tensor, params: Sequence[torch.Tensor], at: int, *, is_last: bool) -> None:
        self._buffer = buffer
        self._params = list(params)
        self._at = at
        self._is_last = is_last

    def index(self) -> int:
        """Return its place in the order in which buckets are reduced."""
        return self._at

    def buffer(self) -> torch.Tensor:
        """Return its gradients, one after the other."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Take another tensor instead."""
        self._buffer = buffer

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it has."""
        return self._params

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, each in the shape of its parameter."""
        cut = torch.split(self._buffer, [one.numel() for one in self._params])
        return [own.view(one.shape) for own, one in zip(cut, self._params, strict=True)]

    def is_last(self) -> bool:
        """Whether no other bucket comes after it."""
        return self._is_last


def ddp_alone(model: nn.Module) -> list[torch.Tensor]:
    """Let DistributedDataParallel reduce its buckets by calls of `all_reduce`: a fake world's own answers crash it.

    Its first step has one bucket for all gradients; they are reduced as in the steps that follow, by the model's own
    hook where it has one. `_comm_hooks` and `_register_comm_hook`, tried on torch 2.13.0, whose `FakeWork` has a
    future without tensors.

    Returns:
        The buckets that were reduced, once they are.
    """
    found: list[torch.Tensor] = []

    def reduce(ddp: Any, bucket: Any) -> Any:
        found.append(bucket.buffer())
        later = _buckets(ddp, bucket.parameters()[::-1]) if _builds_again(ddp) else [bucket.parameters()]
        parts = torch.split(bucket.buffer(), [sum(map(torch.numel, own)) for own in later])
        hook, state = next(iter(ddp._comm_hooks), (_all_reduced, ddp.process_group))
        for at, (part, own) in enumerate(zip(parts, later, strict=True)):
            hook(state, _PartOfBucket(part, own, at, is_last=at == len(later) - 1))
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    for module in _ddps(model):
        with suppress(RuntimeError):
            torch._C._distributed_c10d._register_comm_hook(module.reducer, module, reduce)
    return found


def _all_reduced(group: Any, bucket: _PartOfBucket) -> None:
    torch.distributed.all_reduce(bucket.buffer(), group=group)


class _Answered:
    """What an `all_reduce` that does not wait returns, with a future that has its tensors."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def get_future(self) -> Any:
        """Return a future that is there."""
        done: Any = torch.futures.Future()
        done.set_result([self._tensor])
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def futures_answered() -> Iterator[None]:
    """Let futures of `all_reduce` have their tensors, for hooks that go on with them: a fake world's have none."""
    from torch import distributed

    before: Any = distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = before(tensor, *args, **kwargs)
        return None if work is None else _Answered(work, tensor)

    with replaced(distributed, "all_reduce", all_reduce):
        yield


def ddp_buckets(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield the bytes of DistributedDataParallel's buckets after its first step, and whether they are the gradients.

    `_build_params_for_reducer`, in torch 2.4.1 to 2.13.0.
    """
    for ddp in _ddps(model):
        params = ddp._build_params_for_reducer()[0]
        for own in _buckets(ddp, params[::-1]) if _builds_again(ddp) else _buckets(ddp, params)[::-1]:
            yield sum(one.numel() * one.element_size() for one in own), bool(ddp.gradient_as_bucket_view)


def _ddps(model: nn.Module) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _builds_again(ddp: Any) -> bool:
    """Whether buckets are built again after the first step, as gradients came: nearly the last parameters first."""
    return _is_static(ddp) or not ddp.find_unused_parameters


_ASKED_TO_BE_STATIC: WeakSet[Any] = WeakSet()
"""Models for which `static_graph=True` was given where no other rank could agree to it."""


def _is_static(ddp: Any) -> bool:
    return bool(ddp.static_graph) or ddp in _ASKED_TO_BE_STATIC


def _buckets(ddp: Any, params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return parameters by buckets, filled in their order.

    `bucket_bytes_cap` and `_compute_bucket_assignment_by_size`, in torch 2.4.1 to 2.13.0.
    """
    distributed: Any = torch.distributed
    is_default = getattr(ddp, "bucket_bytes_cap_default", True)
    first = distributed._DEFAULT_FIRST_BUCKET_BYTES if is_default else ddp.bucket_bytes_cap
    limits = list(getattr(ddp, "bucket_bytes_cap_list", ())) or [first, ddp.bucket_bytes_cap]
    found = distributed._compute_bucket_assignment_by_size(list(params), limits, [False] * len(params))[0]
    return [[params[at] for at in own] for own in found]


@contextmanager
def _ddp_unasked() -> Iterator[None]:
    """Let DistributedDataParallel not ask other ranks, which do not exist, nor hold back what its first step reduces.

    Its hooks are called by `ddp_alone`, and may be those that need a GPU. `_verify_param_shape_across_processes`,
    `_sync_module_states`, `_set_static_graph`, `_register_comm_hook` and `_check_comm_hook`, in torch 2.4.1 to 2.13.0.
    """
    from torch import distributed
    from torch.nn.parallel import distributed as ddp

    kind: Any = ddp.DistributedDataParallel
    check = kind._check_comm_hook

    def checked(self: Any, hook: Any) -> None:
        if not getattr(hook, "__name__", "").startswith("bf16_compress"):  # which torch refuses where it has no CUDA
            check(self, hook)

    def skipped(*_: object, **__: object) -> None: ...

    instead = (
        (ddp, "_verify_param_shape_across_processes", skipped),
        (ddp, "_sync_module_states", skipped),
        (kind, "_set_static_graph", lambda ddp: _ASKED_TO_BE_STATIC.add(ddp)),
        (distributed, "_register_comm_hook", skipped),
        (kind, "_check_comm_hook", checked),
    )
    with ExitStack() as stack:
        for owner, name, own in instead:
            stack.enter_context(replaced(owner, name, own))
        yield


@contextmanager
def _one_empty_part() -> Iterator[None]:
    """Let FSDP2 give all ranks that have nothing of a parameter one empty tensor: torch makes one for each of them.

    `_chunk_with_empty`, in torch 2.6 to 2.13.0: two minutes of a plan on 100,000 ranks.
    """
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param as params
    except ImportError:  # torch 2.4 and 2.5
        yield
        return

    def chunked(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        found = list(torch.chunk(tensor, num_chunks, dim=dim))
        return found + [found[0].new_empty(0)] * (num_chunks - len(found))

    with replaced(params, "_chunk_with_empty", chunked):
        yield


def without_compiling() -> Any:
    """Return a context in which compiled code runs as it was written: what has no values cannot be compiled.

    `torch.compiler.set_stance`, from torch 2.6 on.
    """
    stance: Any = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if stance is None else stance("force_eager")


def real_tensors() -> Any:
    """Return a context in which new tensors have values, inside `fake_mode` too. Tried on torch 2.4.1 and 2.13.0."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def id_without_memory(storage: torch.UntypedStorage) -> int:
    """Return what tells one storage on the meta device from others: `_cdata`, in torch 2.4.1 to 2.13.0."""
    return -int(storage._cdata)


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a wrapper such as a quantized tensor holds, by name; nothing for a tensor with elements of its own.

    By `__tensor_flatten__`, in torch 2.4.1 to 2.13.0.
    """
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    found: dict[str, torch.Tensor] = {}
    for name in names:
        part = getattr(tensor, name)
        inside = inner_tensors(part)
        found |= {f"{name}.{inner}": value for inner, value in inside.items()} or {name: part}
    return found


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with elements of their own that a tensor is made of: a DTensor's part, or a tensor itself.

    Wrappers say what they hold by `__tensor_flatten__`, in torch 2.4.1 to 2.13.0.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if torch.is_tensor(part):  # a DTensor's mesh is a part of it too
                yield from plain_tensors(part)
    else:
        yield tensor


@contextmanager
def storages_resized(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call back with every storage that got another size, which no operator shows.

    `torch.UntypedStorage.resize_` is replaced for this long, as torch's own `MemTracker` does. Tried on torch 2.13.0.
    """
    before = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        returned = before(storage, size)
        note(storage)
        return returned

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def flat_gradients_reduced(note: Callable[[torch.Tensor | None], None]) -> Iterator[Callable[[], bool]]:
    """Call back with every gradient that FSDP1 is about to reduce, and yield a function that says whether it does.

    It is the whole one of a flat parameter, which autograd has made. `_runtime_utils._post_backward_hook` is replaced
    for this long, in torch 2.13.0; where it has another name, nothing is called and the answer is always no.
    """
    from torch.distributed.fsdp import _runtime_utils

    before: Any = getattr(_runtime_utils, "_post_backward_hook", None)
    if before is None:
        yield lambda: False
        return
    depth = 0

    def reducing(state: Any, handle: Any, *rest: Any) -> Any:
        nonlocal depth
        note(handle.flat_param.grad)
        depth += 1
        try:
            return before(state, handle, *rest)
        finally:
            depth -= 1

    with replaced(_runtime_utils, "_post_backward_hook", reducing):
        yield lambda: depth > 0


@contextmanager
def working_out_shapes() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether DTensor runs an operator only to know the shape of its result.

    It runs it on tensors of the whole shape, without values: `ShardingPropagator._propagate_tensor_meta_non_cached`, in
    torch 2.13.0; where it has another name, the answer is always no.
    """
    from torch.distributed.tensor import _sharding_prop

    kind: Any = _sharding_prop.ShardingPropagator
    before = getattr(kind, "_propagate_tensor_meta_non_cached", None)
    if before is None:
        yield lambda: False
        return
    depth = 0

    def noting(*args: Any, **named: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return before(*args, **named)
        finally:
            depth -= 1

    with replaced(kind, "_propagate_tensor_meta_non_cached", noting):
        yield lambda: depth > 0


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's own part without waiting for it or recording it for autograd; another tensor is returned.

    `DTensor._local_tensor` in torch 2.4.1 to 2.13.0.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def version_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often a tensor and this rank's part of it were written to in place, as far as torch counts it.

    Writes to a DTensor count on itself, those to its part on that: `Tensor._version` in torch 2.4.1 to 2.13.0.
    """
    return tensor._version, local_of(tensor)._version


def looks_for_unused(model: nn.Module) -> bool:
    """Whether DistributedDataParallel looks for parameters that a step does not use: it reads them from a tensor."""
    return any(ddp.find_unused_parameters for ddp in _ddps(model))


def only_in_first_step(model: nn.Module) -> int:
    """Return the bytes that DistributedDataParallel reduces only in its first step, with `static_graph=True`.

    That is an int32 for each parameter: whether it was used. Measured on torch 2.13.0.
    """
    static = [ddp for ddp in _ddps(model) if _is_static(ddp)]
    return sum(torch.int32.itemsize * len(ddp._build_params_for_reducer()[0]) for ddp in static)


def has_ddp(model: nn.Module) -> bool:
    """Whether a model is, or has in it, DistributedDataParallel, which hooks the parameters that it is given."""
    return bool(_ddps(model))


def fsdp_units(model: nn.Module) -> Iterator[tuple[str, int, bool, bool]]:
    """Yield what FSDP gathers together: a module's name, bytes on one rank, and how it is kept.

    That is whether it stays gathered until backward, and whether its shards are in the CPU's memory.

    Reads `_fsdp_param_group` of FSDP2's state, its `mp_policy` and `post_forward_mesh_info`, `_orig_size` and
    `offload_to_cpu` of its parameters; of FSDP1 the length of a handle's flat parameter, and `_offload_params`.
    `_auto_reshard_after_forward` of FSDP2 keeps a module inside of no other one gathered, from its first forward on;
    FSDP1 always does (`_post_forward_reshard`).
    Tried on torch 2.13.0.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        state = _fsdp_state(module)
        is_kept = getattr(state, "_auto_reshard_after_forward", False) and module not in inside
        inside.update(module.modules() if state is not None and module not in inside else ())
        for group in _fsdp_groups(state):
            params = getattr(group, "fsdp_params", ())
            dtype = getattr(getattr(group, "mp_policy", None), "param_dtype", None)
            sizes = (_gathered_bytes(one, dtype) for one in params)
            if params:
                stays = is_kept or group.post_forward_mesh_info is None
                yield clean_name(name), sum(sizes), stays, all(one.offload_to_cpu for one in params)
        if isinstance(module, FullyShardedDataParallel):
            is_root = module not in inside
            inside.update(module.modules())
            if getattr(module, "_handle", None) is not None:
                yield from _unit_of_handle(name, module._handle, is_root=is_root)


def _gathered_bytes(param: Any, dtype: torch.dtype | None) -> int:
    """Return the bytes that FSDP2 gathers of a parameter; where that is in a form of its own, a step has shown them."""
    if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") and param.all_gather_outputs:
        return sum(one.numel() * one.itemsize for one in param.all_gather_outputs)
    size: int = param._orig_size.numel() * (dtype or param.sharded_param.dtype).itemsize
    return size


def _unit_of_handle(name: str, handle: Any, *, is_root: bool) -> Iterator[tuple[str, int, bool, bool]]:
    flat, strategy = handle.flat_param, handle._sharding_strategy.name
    if handle.uses_sharded_strategy:
        dtype = handle._fwd_bwd_param_dtype or flat.dtype
        size = flat._unpadded_unsharded_size.numel() * dtype.itemsize
        stays = is_root or strategy not in ("FULL_SHARD", "HYBRID_SHARD")
        yield clean_name(name), size, stays, bool(getattr(handle, "_offload_params", False))


def without_pinned_memory(model: nn.Module) -> None:
    """Let FSDP2 not pin what it offloads, which takes a GPU: `pin_memory` of its parameters, in torch 2.13.0."""
    groups = (group for module in model.modules() for group in _fsdp_groups(_fsdp_state(module)))
    for group in groups:
        for param in getattr(group, "fsdp_params", ()):
            param.pin_memory = False


def _fsdp_state(module: nn.Module) -> Any:
    find: Any = getattr(module, "_get_fsdp_state", None)
    return find() if callable(find) else None


def _fsdp_groups(state: Any) -> list[Any]:
    return list(getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)])


def unit_of(name: str) -> str | None:
    """Return the module whose flat parameter has this name; None for the name of any other parameter.

    FSDP1 names it `_flat_param`: tried on torch 2.4.1, 2.13.0 and 2.15.0.
    """
    path, _, last = name.rpartition(".")
    return clean_name(path) if last == "_flat_param" else None


WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """Drop what wrappers add to a name: FSDP1, torch.compile and activation checkpointing.

    DistributedDataParallel's `module` is a public name and stays.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
