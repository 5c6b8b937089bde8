"""What is wrapped of each module: functions that shard, load and step, and what the observer is told of each call.

A wrapper returns what the function returned and raises what it raised. Whatever goes wrong in shardviz is noted once.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.live.run.observing import is_awake, nested, observer, quietly, report

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from shardviz.live.run.observer import Observer

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Hook:
    """A function to wrap.

    Attributes:
        name: Its name in its module, `Class.method` for a method.
        before: Called with the call's arguments before the function runs.
        after: Called with the arguments and the result after it.
        wakes: Whether a call is the business of a process that has neither joined others nor sharded anything.
    """

    name: str
    before: Callable[[Observer, Call], None] | None = None
    after: Callable[[Observer, Call, Any], None] | None = None
    wakes: Callable[[Call], bool] | None = None


def _argument(call: Call, index: int, name: str) -> Any:
    args, kwargs = call
    return args[index] if len(args) > index else kwargs.get(name)


def _always(call: Call) -> bool:
    return True


def _shards(name: str, index: int = 0, called: str = "module") -> Hook:
    """Hook a function that shards a module, or each of a list of them."""

    def modules(call: Call) -> list[Any]:
        given = _argument(call, index, called)
        return list(given) if isinstance(given, list | tuple) else [given]

    def before(seen: Observer, call: Call) -> None:
        for module in modules(call):
            seen.sharding(module)

    def after(seen: Observer, call: Call, result: Any) -> None:
        for module in modules(call):
            seen.sharded(module)

    return Hook(name, before, after, _always)


def _distributing(seen: Observer, call: Call) -> None:
    seen.sharding_tensor(_argument(call, 0, "tensor"))


def _distributes(seen: Observer, call: Call, result: Any) -> None:
    seen.sharded_tensor()


def _to(seen: Observer, call: Call) -> None:
    """Keep the values of a model that moves to the meta device, as accelerate does before it shards."""
    if _is_to_meta(call):
        seen.sharding(call[0][0])


def _is_to_meta(call: Call) -> bool:
    target = _argument(call, 1, "device")
    return str(getattr(target, "type", target)) == "meta" and "WORLD_SIZE" in os.environ


def _loads(seen: Observer, call: Call) -> None:
    """Keep what is loaded before it is: torch takes a state dict apart."""
    seen.loaded_state_dict(_argument(call, 0, "model"), _argument(call, 1, "state_dict"))


def _sets(seen: Observer, call: Call) -> None:
    seen.loaded_state_dict(_argument(call, 0, "model"), _argument(call, 1, "model_state_dict"))


def _set_both(seen: Observer, call: Call) -> None:
    seen.loaded_state_dict(_argument(call, 0, "model"), call[1].get("model_state_dict"))


def _dcp(seen: Observer, call: Call, result: Any) -> None:
    place = call[1].get("checkpoint_id") or getattr(call[1].get("storage_reader"), "path", None)
    if place is not None:
        seen.loaded_dcp(_argument(call, 0, "state_dict"), str(place))


def _pretrained(seen: Observer, call: Call, result: Any) -> None:
    model = result[0] if isinstance(result, tuple) else result
    (kind, *args), kwargs = call
    alone = {name: value for name, value in kwargs.items() if name not in PARALLEL and name != "output_loading_info"}
    place = str(_argument(call, 1, "pretrained_model_name_or_path"))
    seen.loaded_pretrained(model, place, lambda: kind.from_pretrained(*args, **alone))


def _schedules(seen: Observer, call: Call) -> None:
    seen.scheduled(call[0][0])


def _joined(seen: Observer, call: Call, result: Any) -> None:
    seen.joined()


HOOKS: dict[str, tuple[Hook, ...]] = {
    "torch.distributed.fsdp._fully_shard._fully_shard": (_shards("fully_shard"),),
    "torch.distributed._composable.fsdp.fully_shard": (_shards("fully_shard"),),
    "torch.distributed.fsdp.fully_sharded_data_parallel": (_shards("FullyShardedDataParallel.__init__", 1),),
    "torch.distributed.tensor.parallel.api": (_shards("parallelize_module"),),
    "torch.distributed.tensor._api": (
        _shards("distribute_module"),
        Hook("distribute_tensor", _distributing, _distributes, _always),
    ),
    "torch.nn.parallel.distributed": (_shards("DistributedDataParallel.__init__", 1),),
    "deepspeed.runtime.engine": (_shards("DeepSpeedEngine.__init__", 2, "model"),),
    "torch.nn.modules.module": (Hook("Module.to", _to, None, _is_to_meta), Hook("Module.load_state_dict", _loads)),
    "torch.distributed.pipelining.schedules": (
        Hook("PipelineScheduleSingle.step", _schedules),
        Hook("PipelineScheduleMulti.step", _schedules),
    ),
    "torch.distributed.checkpoint.state_dict": (
        Hook("set_model_state_dict", _sets),
        Hook("set_state_dict", _set_both),
    ),
    "torch.distributed.checkpoint.state_dict_loader": (Hook("load", None, _dcp),),
    "torch.distributed.distributed_c10d": (Hook("init_process_group", None, _joined, _always),),
    "transformers.modeling_utils": (
        Hook("PreTrainedModel.from_pretrained", None, _pretrained, lambda call: "WORLD_SIZE" in os.environ),
    ),
}

PARALLEL = frozenset({"tp_plan", "tp_size", "device_mesh", "distributed_config", "device_map"})
"""Arguments of `from_pretrained` that shard a model."""

INNERMOST = frozenset({"init_process_group", "PipelineScheduleSingle.step", "PipelineScheduleMulti.step"})
"""Functions inside which further calls still count: others shard, load and so on by means of each other."""

MOVED = frozenset({"torch.distributed._composable.fsdp.fully_shard"})
"""Modules that a newer torch has for its older names only."""


def wrap(module: ModuleType) -> None:
    """Wrap what is hooked of a module that was just imported."""
    for hook in HOOKS[module.__name__]:
        *path, last = hook.name.split(".")
        owner: Any = module
        for name in path:
            owner = getattr(owner, name, None)
        function = getattr(owner, last, None)
        if function is not None and not hasattr(function, "__shardviz__"):
            setattr(owner, last, _wrapped_in(owner, last, hook))
        elif function is None and module.__name__ not in MOVED:
            report(f"{module.__name__} has no {hook.name}: what it does is not seen")


def _wrapped_in(owner: Any, name: str, hook: Hook) -> Any:
    """Return the function in the form that its class or module has it: a class method stays one."""
    raw = vars(owner).get(name, getattr(owner, name))
    if isinstance(raw, classmethod):
        return classmethod(_wrapped(raw.__func__, hook))
    return _wrapped(raw, hook)


def _wrapped(function: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        if not is_awake() and not (hook.wakes and quietly(hook.name, hook.wakes, given)):
            return function(*args, **kwargs)
        with nested(counts=hook.name not in INNERMOST) as is_outermost:
            if is_outermost and hook.before:
                quietly(hook.name, _tell, hook.before, given)
            result = function(*args, **kwargs)
            if is_outermost and hook.after:
                quietly(hook.name, _tell, hook.after, given, result)
        return result

    call.__shardviz__ = True  # type: ignore[attr-defined]
    return call


def _tell(function: Callable[..., None], *given: Any) -> None:
    function(observer(), *given)
