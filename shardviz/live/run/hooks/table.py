"""Functions of torch and libraries that are wrapped: those that shard, load and step.

Wraps them as soon as their modules are imported, and imports nothing of them itself. A name that a script takes by
`from torch... import fully_shard` is bound at its import, so what it binds has to be the wrapped function: the module's
loader wraps it when it has run the module.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from shardviz.live.run.hooks import wrapping
from shardviz.live.run.hooks.observing import quietly
from shardviz.live.run.hooks.wrapping import Call, Hook, argument
from shardviz.live.run.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from shardviz.live.run.observer import Observer


def _in_a_job(call: Call) -> bool:
    return "WORLD_SIZE" in os.environ


def _always(call: Call) -> bool:
    return True


def _shards(name: str, index: int = 0, called: str = "module") -> Hook:
    """Hook a function that shards a module, or each of a list of them."""

    def modules(call: Call) -> list[Any]:
        given = argument(call, index, called)
        return list(given) if isinstance(given, list | tuple) else [given]

    def before(seen: Observer, call: Call) -> None:
        for module in modules(call):
            seen.session.sharding(module)

    def after(seen: Observer, call: Call, result: Any) -> None:
        for module in modules(call):
            seen.sharded(module)

    return Hook(name, before, after, _always)


def _clips(seen: Observer, call: Call, norm: Any) -> None:
    seen.clipped(norm, argument(call, 1, "max_norm"))


def _is_to_meta(call: Call) -> bool:
    target = argument(call, 1, "device")
    return str(getattr(target, "type", target)) == "meta" and _in_a_job(call)


def _loads(called: str) -> Callable[[Observer, Call], None]:
    """Keep what is loaded before it is: torch takes a state dict apart."""
    return lambda seen, call: seen.loaded_state_dict(argument(call, 0, "model"), argument(call, 1, called))


def _dcp(observer: Observer, call: Call, loaded: Any) -> None:
    """See what a folder was loaded into.

    `load` has asked each `Stateful` for its tensors by the time that it calls `_load_state_dict`, which is torch's own.
    Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    place = getattr(argument(call, 1, "storage_reader"), "path", None)
    if place is not None:
        observer.session.loaded_dcp(argument(call, 0, "state_dict"), str(place))


def _pretrained(observer: Observer, call: Call, loaded: Any) -> None:
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    (kind, *args), kwargs = call
    alone = {name: value for name, value in kwargs.items() if name not in PARALLEL and name != "output_loading_info"}
    place = str(argument(call, 1, "pretrained_model_name_or_path"))
    observer.loaded_pretrained(model, place, lambda: kind.from_pretrained(*args, **alone))


def _torch_loads(observer: Observer, call: Call, loaded: Any) -> None:
    file = argument(call, 0, "f")
    place = file if isinstance(file, os.PathLike) else getattr(file, "name", file)  # the job may have opened it itself
    if isinstance(place, str | os.PathLike):
        observer.session.opened_file(os.fspath(place), loaded)


PARALLEL = frozenset({"tp_plan", "tp_size", "device_mesh", "distributed_config", "device_map"})
"""Arguments of `from_pretrained` that shard a model."""


def _children_failed(observer: Observer, call: Call) -> None:
    """Note which ranks torchrun's agent saw fail, and how: it only exits with 1 itself."""
    for rank, failure in dict(argument(call, 2, "failures")).items():
        observer.session.leave("died", str(int(failure.exitcode)), int(rank))


HOOKS: dict[str, tuple[Hook, ...]] = {
    "torch.distributed.fsdp._fully_shard._fully_shard": (_shards("fully_shard"),),
    "torch.distributed._composable.fsdp.fully_shard": (replace(_shards("fully_shard"), is_optional=True),),
    "torch.distributed.fsdp.fully_sharded_data_parallel": (
        _shards("FullyShardedDataParallel.__init__", 1),
        Hook("FullyShardedDataParallel.clip_grad_norm_", None, _clips),
    ),
    "torch.distributed.tensor.parallel.api": (_shards("parallelize_module"),),
    "torch.distributed.tensor._api": (
        _shards("distribute_module"),
        Hook(
            "distribute_tensor",
            lambda seen, call: seen.session.sharding_tensor(argument(call, 0, "tensor")),
            lambda seen, call, result: seen.sharded_tensor(),
            _always,
        ),
    ),
    "torch.nn.parallel.distributed": (_shards("DistributedDataParallel.__init__", 1),),
    "deepspeed.runtime.engine": (
        replace(_shards("DeepSpeedEngine.__init__", 2, "model"), hides=False),  # it makes the optimizer
        Hook(
            "DeepSpeedEngine._take_model_step",
            lambda seen, call: seen.library_begins(call[0][0]),
            lambda seen, call, result: seen.library_ends(call[0][0]._global_grad_norm, call[0][0].gradient_clipping()),
            hides=False,
        ),
    ),
    "deepspeed.runtime.pipe.engine": (
        Hook(
            "PipelineEngine.train_batch", lambda seen, call: seen.scheduled_by_deepspeed(call[0][0].module), hides=False
        ),
    ),
    "deepspeed.runtime.utils": (Hook("clip_grad_norm_", None, _clips, hides=False),),
    "megatron.core.pipeline_parallel.schedules": tuple(
        Hook(
            f"forward_backward_pipelining_{how}_interleaving",
            lambda seen, call: seen.scheduled_by_megatron(call[1]["model"]),
            hides=False,
        )
        for how in ("with", "without")
    ),
    "megatron.core.optimizer.optimizer": tuple(
        Hook(
            f"{kind}.step",
            lambda seen, call: seen.library_begins(call[0][0]),
            lambda seen, call, result: seen.library_ends(result[1], call[0][0].config.clip_grad),
            hides=False,
        )
        for kind in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
    ),
    "torch.nn.modules.module": (
        # accelerate moves a model to the meta device before it shards it.
        Hook("Module.to", lambda seen, call: seen.session.sharding(call[0][0]), None, _is_to_meta),
        Hook(
            "Module.to_empty",
            lambda seen, call: seen.session.allocating(call[0][0]),
            lambda seen, call, result: seen.session.allocated(call[0][0]),
            _in_a_job,
            hides=False,
        ),
        Hook(
            "Module.load_state_dict",
            _loads("state_dict"),
            lambda seen, call, result: seen.session.skipped_keys(call[0][0], argument(call, 1, "state_dict"), result),
        ),
    ),
    "torch.distributed.pipelining.schedules": (
        Hook("PipelineScheduleSingle.step", lambda seen, call: seen.scheduled(call[0][0]), hides=False),
        Hook("PipelineScheduleMulti.step", lambda seen, call: seen.scheduled(call[0][0]), hides=False),
    ),
    "torch.distributed.checkpoint.state_dict": (
        Hook("set_model_state_dict", _loads("model_state_dict")),
        Hook(
            "set_state_dict",
            lambda seen, call: seen.loaded_state_dict(argument(call, 0, "model"), call[1].get("model_state_dict")),
        ),
        *map(Hook, ("get_state_dict", "get_optimizer_state_dict", "set_optimizer_state_dict")),
    ),
    "torch.distributed.checkpoint.state_dict_loader": (Hook("_load_state_dict", None, _dcp),),
    "torch.distributed.distributed_c10d": (
        Hook("init_process_group", None, lambda seen, call, result: seen.joined(), _always, hides=False),
        Hook("destroy_process_group", lambda seen, call: seen.leaving(argument(call, 0, "group")), hides=False),
    ),
    "transformers.modeling_utils": (Hook("PreTrainedModel.from_pretrained", None, _pretrained, _in_a_job),),
    "torch.distributed.elastic.multiprocessing.errors": (
        Hook("ChildFailedError.__init__", _children_failed, None, _always, hides=False),
    ),
    "torch.multiprocessing.spawn": (
        Hook(
            "ProcessExitedException.__init__",
            lambda seen, call: seen.session.leave(
                "died", str(int(argument(call, 4, "exit_code"))), int(argument(call, 2, "error_index"))
            ),
            None,
            _always,
            hides=False,
        ),
    ),
    "torch.serialization": (Hook("load", None, _torch_loads, _in_a_job, hides=False),),
    "safetensors": (
        Hook(
            "safe_open",
            None,
            lambda seen, call, result: seen.session.opened_file(str(argument(call, 0, "filename"))),
            _in_a_job,
            hides=False,
        ),
    ),
    "torch.optim.optimizer": (
        Hook("Optimizer.__init__", None, lambda seen, call, result: seen.optimizing(call[0][0]), _always, hides=False),
    ),
    "torch.nn.utils.clip_grad": (
        Hook(  # which `clip_grad_norm_` calls, too; in torch 2.6.0 to 2.13.0
            "_clip_grads_with_norm_",
            lambda seen, call: seen.clipped(argument(call, 2, "total_norm"), argument(call, 1, "max_norm")),
            hides=False,
        ),
    ),
}


TRACED = ("torch.optim.optimizer", "torch.nn.utils.clip_grad")
"""The modules that are hooked under `--trace` only: an optimizer says which model is trained."""


def _saves(name: str, what: str, index: int = 0, called: str = "", *, is_optional: bool = False) -> Hook:
    """Hook a function that saves; `called` is the argument that says where to."""

    def before(seen: Observer, call: Call) -> None:
        target = argument(call, index, called) if called else None
        seen.saving(what if target is None else f"{what} to {target}")

    return Hook(name, before, None, _always, is_optional)


def _torch_saves(seen: Observer, call: Call) -> None:
    from shardviz.live.run.references.sources import has_tensors

    file = argument(call, 1, "f")
    place = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    if isinstance(place, str | os.PathLike) and has_tensors(argument(call, 0, "obj")):  # torch sends tensors as streams
        seen.saving(f"torch.save to {place}")


SAVES: dict[str, tuple[Hook, ...]] = {
    "safetensors": (
        _saves("serialize_file", "a save of safetensors", 1, "filename"),
        _saves("serialize", "a save of safetensors"),
    ),
    "torch.distributed.checkpoint.state_dict_saver": (
        _saves("save", "torch.distributed.checkpoint.save"),
        _saves("async_save", "torch.distributed.checkpoint.async_save", is_optional=True),
        _saves("save_state_dict", "torch.distributed.checkpoint.save_state_dict", is_optional=True),
    ),
    "torch.serialization": (Hook("save", _torch_saves, None, _always),),
    "transformers.modeling_utils": (_saves("PreTrainedModel.save_pretrained", "save_pretrained"),),
}
"""The functions that end a job which has loaded a stamped copy; what `safetensors.torch` has calls these."""


@cache
def hooked() -> dict[str, tuple[Hook, ...]]:
    """Return the hooks of this process, by module."""
    options = Options.of_environment()
    hooks = {name: hook for name, hook in HOOKS.items() if options.trace != "off" or name not in TRACED}
    for name, saves in SAVES.items() if options.is_stamped else ():
        hooks[name] = (*(replace(hook, wakes=hook.wakes and _always) for hook in hooks.get(name, ())), *saves)
    return hooks


class _Finder(MetaPathFinder):
    """Lets the other finders find a module, and wraps its functions once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in hooked():
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _wrap_after(spec.loader)
        return spec


def _wrap_after(loader: Any) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        if module.__name__ in hooked():  # the loader of an archive is that of all of its modules
            wrap(module)

    with suppress(AttributeError):  # a loader without a __dict__: the module stays as it is
        loader.exec_module = exec_module


def wrap(module: ModuleType) -> None:
    """Wrap the hooked functions of a newly imported module; failures are reported, not raised."""
    quietly(module.__name__, wrapping.wrap, module, hooked()[module.__name__])


def install() -> None:
    """Watch imports from now on; modules that are there already are wrapped at once."""
    sys.meta_path.insert(0, _Finder())
    for name in sorted(hooked().keys() & sys.modules.keys()):
        wrap(sys.modules[name])
