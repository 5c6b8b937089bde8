"""Build a probe's model and shard it without values where that works, and as little with them as it takes."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.errors import ProbeError
from shardviz.live.compat import fake_mode, fakes_converted, has_ddp, parameters_are_held, replaced, split_alike
from shardviz.live.plan.forks import one_line
from shardviz.live.plan.reads import variables_read
from shardviz.live.plan.talks import Talks
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from torch.distributed.device_mesh import DeviceMesh

Means = Literal["meta", "fakes", "values"]
"""On what a model is built: the meta device, tensors without memory that say they are on a device, or real ones."""

MAX_VALUES = 1 << 28
"""Bytes of a model that may be built with its values."""

AT_FAULT = "make what it calls work on the meta device"

BY_HAND = "call build() and parallelize() by hand: the traceback shows where"
NO_GPU = "a plan has no GPU: leave out what asks for one, and take the device from mesh.device_type"
FOR_FSDP1 = "a plan has no GPU: give FullyShardedDataParallel device_id=torch.device(mesh.device_type)"

ONE_GROUP = "the ranks are there before parallelize() is called: leave out init_process_group, and take their mesh"

INSTEAD = {
    "fakes": "so the model is built on tensors without memory, under FakeTensorMode",
    "values": "so the model is built with its values",
}
"""What a plan says after the reasons for which a model is not built on the meta device."""

ON = {"meta": "on the meta device", "fakes": "under FakeTensorMode", "values": "with values"}
"""How a plan names each means."""


@dataclass(frozen=True)
class Built:
    """A model that was built and sharded.

    Attributes:
        model: The sharded model.
        means: How.
        mode: The mode in which its tensors live; None unless they are fakes.
        refused: Why no means with less memory worked, and what is not true of this one, a line each.
    """

    model: nn.Module
    means: Means
    mode: Any = None
    refused: tuple[str, ...] = ()


def unsharded(probe: ModuleType, build: str, *, double: bool = False) -> nn.Module:
    """Build a probe's model.

    Raises:
        ProbeError: It is not a module.
    """
    torch.manual_seed(0)
    model = _module(getattr(probe, build)(), f"{build}()", "return a torch.nn.Module")
    return model.double() if double else model


def _module(value: Any, call: str, hint: str) -> nn.Module:
    """Return what a probe's function returned.

    Raises:
        ProbeError: That is not a module.
    """
    if not isinstance(value, nn.Module):
        raise ProbeError(f"{call} returned {type(value).__name__}", hint)
    return value


class EarlyModel:
    """A model on the meta device that was built before there were any ranks, once for all of them.

    Args:
        build: Builds it.
        is_same: Whether it may be the same on all ranks; no model is built where it is not.
    """

    def __init__(self, build: Callable[[], nn.Module], *, is_same: bool = True) -> None:
        self.model: nn.Module | None = None
        if not is_same:
            return
        with (
            _checks_for_ranks() as checks,
            variables_read() as read,
            contextlib.suppress(Exception),
            torch.device("meta"),
            _without_warnings(),
        ):
            model = build()
            self.model = None if checks or read else model


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exception names what is wrong
        yield


class _Limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends what makes more new tensors than a plan's values may take, before a machine's memory does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count what it makes out of nothing."""
        returned = func(*args, **(kwargs or {}))
        if torch.is_tensor(returned) and not any(map(torch.is_tensor, args)):
            self.made += returned.numel() * returned.element_size()
            if self.made > MAX_VALUES:
                raise ProbeError(f"more than the {bytes_text(MAX_VALUES)} that are planned with values", AT_FAULT)
        return returned


@contextlib.contextmanager
def _checks_for_ranks() -> Iterator[list[bool]]:
    """Note whether code asks whether there are ranks, so that what it builds may depend on the answer."""
    checks: list[bool] = []
    before = distributed.is_initialized

    def is_initialized() -> bool:
        checks.append(True)
        return before()

    with replaced(distributed, "is_initialized", is_initialized):
        yield checks


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """Refuse a process group while a probe is imported: it would wait for ranks that are never started."""

    before: Any = distributed.init_process_group
    is_imported = False

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not is_imported:
            raise ProbeError("init_process_group() is called while the probe is imported", ONE_GROUP)
        before(*args, **kwargs)  # the probe keeps this function where it imports it by name

    with replaced(distributed, "init_process_group", init_process_group):
        yield
    is_imported = True


def sharded(
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, DeviceMesh], Any],
    mesh: DeviceMesh,
    means: Sequence[Means],
    size: int,
    early: nn.Module | None = None,
) -> Built:
    """Build and shard a model by the first means that works.

    Args:
        build: Builds the unsharded model.
        parallelize: Shards it on this rank.
        mesh: The mesh.
        means: What to try.
        size: Bytes of the unsharded model; 0 where that is not known.
        early: The model on the meta device, if it was built already.

    Raises:
        ProbeError: No means works.
    """
    refused: list[str] = []
    reasons: list[str] = []
    for one in means:
        _refuse_large(one, size, refused)
        attempt = _Attempt(one)
        try:
            done = attempt.run(build, parallelize, mesh, early)
        except ProbeError as error:
            raise ProbeError("; ".join((*refused, error.message)), error.hint) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is not derived from Exception
            reasons.append(f"{attempt.call} raised {one_line(error)}")
            refused.append(f"{attempt.call} {ON[one]} raised {one_line(error)}")
            continue
        if one == "meta" and (has_ddp(done) or parameters_are_held(done)):
            continue  # a step needs others, which are on a device
        instead = (INSTEAD[one],) if refused else ()
        return Built(done, one, attempt.mode if one == "fakes" else None, (*refused, *instead, *attempt.talks.said))
    why = reasons[-1] if len(set(reasons)) == 1 else refused[-1]
    raise ProbeError("; ".join((why, *attempt.talks.said)), _hint(why))


def _refuse_large(means: Means, size: int, refused: Sequence[str]) -> None:
    """Refuse to build a large model with its values.

    Raises:
        ProbeError: It is too large; the message begins with why it is not built by other means.
    """
    if means == "values" and size > MAX_VALUES:
        limit = f"{bytes_text(size)} are more than the {bytes_text(MAX_VALUES)} that are planned with values"
        raise ProbeError("; ".join((*refused, limit)), AT_FAULT)


class _Attempt:
    """Builds and shards a model by one means.

    Args:
        means: The means.

    Attributes:
        mode: The mode in which tensors are made; None on the meta device.
        call: The probe's function that was called last.
        talks: The collectives that `parallelize` has called.
    """

    def __init__(self, means: Means) -> None:
        self._means = means
        self.mode: Any = {"meta": lambda: None, "fakes": fake_mode, "values": _Limit}[means]()
        self.call = "build()"
        self.talks = Talks()

    def run(
        self,
        build: Callable[[], nn.Module],
        parallelize: Callable[[nn.Module, DeviceMesh], Any],
        mesh: DeviceMesh,
        early: nn.Module | None,
    ) -> nn.Module:
        """Return the sharded model."""
        converted = fakes_converted(self.mode) if self._means == "fakes" else contextlib.nullcontext()
        with self.mode or contextlib.nullcontext(), converted:
            model = _built(build, self._means, early)
            self.call = "parallelize()"
            with self.talks, split_alike():
                returned = parallelize(model, mesh)
        return model if returned is None else _module(returned, "parallelize()", "return the model, or None")


def _hint(why: str) -> str:
    """Return what to do where a model cannot be built by any means."""
    if "needs a non-CPU accelerator" in why:
        return FOR_FSDP1
    if "default process group twice" in why:
        return ONE_GROUP
    return NO_GPU if any(word in why.lower() for word in ("cuda", "nccl")) else BY_HAND


def _built(build: Callable[[], nn.Module], means: str, early: nn.Module | None) -> nn.Module:
    """Build a model, on the meta device if that is how; what `parallelize` makes for itself has values."""
    if means != "meta":
        return build()
    if early is not None:
        return early
    with torch.device("meta"):
        return build()


def size_of(model: nn.Module | None) -> int:
    """Return the bytes of a model's tensors; 0 where there is none."""
    if model is None:
        return 0
    return sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
