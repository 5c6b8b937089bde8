"""Build and shard a probe's model without values, or else with as few as it takes."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.errors import ProbeError
from shardviz.live.compat import fake_mode, fakes_converted, has_ddp, parameters_are_held, replaced, split_alike
from shardviz.live.plan.forks import is_own, one_line
from shardviz.live.plan.reads import variables_read
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
TALKS = (
    "parallelize() calls {}: a plan sends nothing, so what it returns is not true, nor are layouts that depend on it"
)

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


def unsharded(probe: Any, build: str, *, double: bool = False) -> nn.Module:
    """Build a probe's model, or raise a `ProbeError` if that is not a module."""
    torch.manual_seed(0)
    model = _module(getattr(probe, build)(), f"{build}()", "return a torch.nn.Module")
    return model.double() if double else model


def _module(value: Any, call: str, hint: str) -> nn.Module:
    """Call a probe's function and return its module; raise if it returns anything else."""
    if not isinstance(value, nn.Module):
        raise ProbeError(f"{call} returned {type(value).__name__}", hint)
    return value


def early_model(build: Callable[[], nn.Module]) -> nn.Module | None:
    """Build a model on the meta device before there are any ranks, once for all of them.

    Returns:
        None if it cannot be built there, or asks for a rank, and may not be the same on all.
    """
    checks: list[bool] = []
    before = distributed.is_initialized

    def is_initialized() -> bool:
        checks.append(True)
        return before()

    with (
        replaced(distributed, "is_initialized", is_initialized),
        variables_read() as read,
        contextlib.suppress(Exception),
        torch.device("meta"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the exception names what is wrong
        model = build()
        return None if checks or read else model
    return None


class _Limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends what makes too many new tensors for a plan, before the machine's memory does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count what it makes out of nothing."""
        returned = func(*args, **(kwargs or {}))
        if torch.is_tensor(returned) and not any(map(torch.is_tensor, args)):
            self.made += returned.numel() * returned.element_size()
            if self.made > MAX_VALUES:
                most = bytes_text(MAX_VALUES)
                raise ProbeError(f"with values it needs more than the {most} that a plan may use", AT_FAULT)
        return returned


class _UserCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes collectives that user code calls: here they send nothing and return no true values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; for a collective, note who called torch's outermost function."""
        if getattr(func, "namespace", "") == "c10d" and "barrier" not in str(func):
            frames = list(traceback.extract_stack())
            first = next((at for at, frame in enumerate(frames) if frame.filename.endswith("distributed_c10d.py")), 0)
            callers = [frame for frame in frames[:first] if not frame.filename.endswith("c10d_logger.py")]
            if callers and is_own(callers[-1].filename):
                caller = callers[-1]
                line = f"({Path(caller.filename).name}, line {caller.lineno}: {caller.line})"
                self.calls[TALKS.format(f"{frames[first].name} {line}")] = None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """Refuse a process group while a probe is imported: it would wait for absent ranks."""
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

    The bytes of the unsharded model are 0 if they are not known. `early` is that model on the meta device, if it was
    built already.

    Raises:
        ProbeError: No means works.
    """
    refused: list[str] = []
    reasons: list[str] = []
    talks = _UserCollectives()
    for kind in means:
        if kind == "values" and size > MAX_VALUES:
            needed, most = bytes_text(size), bytes_text(MAX_VALUES)
            limit = f"with values it needs {needed}, more than the {most} that a plan may use"
            raise ProbeError("; ".join((*refused, limit)), AT_FAULT)
        mode: Any = {"meta": contextlib.nullcontext, "fakes": fake_mode, "values": _Limit}[kind]()
        call, talks = "build()", _UserCollectives()
        try:
            with mode, fakes_converted(mode) if kind == "fakes" else contextlib.nullcontext():
                with torch.device("meta") if kind == "meta" else contextlib.nullcontext():
                    model = early if kind == "meta" and early is not None else build()
                call = "parallelize()"
                with talks, split_alike():  # what `parallelize` makes for itself has values
                    returned = parallelize(model, mesh)
                if returned is not None:
                    model = _module(returned, call, "return the model, or None")
        except ProbeError as error:
            raise ProbeError("; ".join((*refused, error.message)), error.hint) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is not derived from Exception
            reasons.append(f"{call} raised {one_line(error)}")
            refused.append(f"{call} {ON[kind]} raised {one_line(error)}")
            continue
        if kind == "meta" and (has_ddp(model) or parameters_are_held(model)):
            continue  # a step needs others, which are on a device
        instead = (INSTEAD[kind],) if refused else ()
        return Built(model, kind, mode if kind == "fakes" else None, (*refused, *instead, *talks.calls))
    why = reasons[-1] if len(set(reasons)) == 1 else refused[-1]
    raise ProbeError("; ".join((why, *talks.calls)), _hint(why))


def _hint(why: str) -> str:
    """Return what to do if a model cannot be built by any means."""
    if "needs a non-CPU accelerator" in why:
        return FOR_FSDP1
    if "default process group twice" in why:
        return ONE_GROUP
    return NO_GPU if any(word in why.lower() for word in ("cuda", "nccl")) else BY_HAND


def size_of(model: nn.Module | None) -> int:
    """Return the bytes of a model's tensors; 0 if there is none."""
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
