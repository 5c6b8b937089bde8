"""Puts wrappers around functions of a module, and calls the observer from them.

A wrapper returns what the function returned and raises what it raised. Whatever goes wrong in shardviz is noted once.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.groups import in_groups
from shardviz.live.run.hooks.observing import nested, quietly, report
from shardviz.live.run.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    from shardviz.live.run.observer import Observer

Call = tuple[tuple[Any, ...], dict[str, Any]]


@functools.cache
def observer() -> Observer:
    """Return what sees the calls of this process."""
    from shardviz.live.run.observer import Observer

    return Observer(Options.of_environment())


def is_awake() -> bool:
    """Whether this process has an observer; before parallel work, hooks only pass calls on."""
    return bool(observer.cache_info().currsize)


# What a rank forks is not a rank: a loader's workers, for one. Unless it joins others itself, it is left alone.
os.register_at_fork(after_in_child=observer.cache_clear)


@dataclass(frozen=True, slots=True)
class Hook:
    """A function whose calls are seen.

    Attributes:
        name: Its name in its module, `Class.method` for a method.
        before: Called with the call's arguments before the function runs.
        after: Called with the arguments and the result after it.
        wakes: Whether a call is the business of a process that has neither joined others nor sharded anything.
        is_optional: Whether the module may lack the function: a newer one has its older names only.
        hides: Whether calls inside of a call are its own business: functions shard and load by means of each other.
    """

    name: str
    before: Callable[[Observer, Call], None] | None = None
    after: Callable[[Observer, Call, Any], None] | None = None
    wakes: Callable[[Call], bool] | None = None
    is_optional: bool = False
    hides: bool = True

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one and tells the observer."""

        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = args, kwargs
            if not is_awake() and not (self.wakes and quietly(self.name, self.wakes, arguments)):
                return function(*args, **kwargs)
            with nested(counts=self.hides) as is_outermost:
                if is_outermost and self.before:
                    quietly(self.name, _call_observer, self.before, arguments)
                returned = function(*args, **kwargs)
                if is_outermost and self.after:
                    quietly(self.name, _call_observer, self.after, arguments, returned)
            return returned

        if not isinstance(function, type):
            call.__dict__.update(getattr(function, "__dict__", {}))  # a built-in function has none
        return call


def argument(call: Call, index: int, name: str) -> Any:
    """Return an argument of a call, given by position or by name; None if it is not given."""
    args, kwargs = call
    return args[index] if len(args) > index else kwargs.get(name)


def wrap(module: ModuleType, hooks: Iterable[Hook]) -> None:
    """Wrap the hooked functions of a newly imported module; the last hook is outermost."""
    for full, same in in_groups((hook.name, hook) for hook in hooks).items():
        *path, last = full.split(".")
        owner: Any = module
        for name in path:
            owner = getattr(owner, name, None)
        function = getattr(owner, last, None)
        if function is not None and not hasattr(function, "__shardviz__"):
            setattr(owner, last, _wrapped_in(owner, last, same))
        elif function is None and not all(hook.is_optional for hook in same):
            report(f"{module.__name__} has no {full}: what it does is not seen")


def _wrapped_in(owner: Any, name: str, hooks: Iterable[Hook]) -> Any:
    """Return a wrapped function in its original form: a class method or a class stays one."""
    raw = vars(owner).get(name, getattr(owner, name))
    function: Any = raw.__func__ if isinstance(raw, classmethod) else raw
    for hook in hooks:
        function = hook.around(function)
    if isinstance(raw, type):
        return _stand_in(raw, function)
    function.__dict__["__shardviz__"] = True
    return classmethod(function) if isinstance(raw, classmethod) else function


def _stand_in(kind: type, make: Callable[..., Any]) -> type:
    """Return a stand-in for a class that can't be derived from; a function makes instances."""

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, kind)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return Kind(kind.__name__, (), {**names, "__shardviz__": True})


def _call_observer(function: Callable[..., None], *given: Any) -> None:
    function(observer(), *given)
