"""What user's code reads: its rank's place, torchrun's variables, and values.

A plan has no values: it answers some of these reads, and refuses others.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.errors import ShardvizError
from shardviz.live.compat.fakes import has_known_value, is_fake
from shardviz.live.compat.modules import followed
from shardviz.live.plan.forks import is_own, own_line
from shardviz.live.world.torchrun import variables
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from shardviz.layout.mesh import Mesh


VARIABLES = frozenset(variables(0, 1, 1))
"""The names of what torchrun sets."""

OF_RANK = frozenset(("RANK", "LOCAL_RANK", "GROUP_RANK"))
"""Those of them that are not the same on all ranks."""

LOOKUPS = ("os", "collections.abc")
"""Modules through which `os.environ.get(...)` and `os.getenv(...)` come."""

QUERIES = {query.__code__ for query in (distributed.get_rank, DeviceMesh.get_rank, DeviceMesh.get_local_rank)}
"""Functions of torch that ask a group for this rank's place in it."""


@contextlib.contextmanager
def variables_read() -> Iterator[dict[str, str]]:
    """Note which of torchrun's variables user code reads, and the line that reads each."""
    lines: dict[str, str] = {}

    def note(_: Any, name: Any) -> None:
        if name in VARIABLES:
            frame: FrameType = sys._getframe(2)
            while frame.f_back is not None and frame.f_globals.get("__name__") in LOOKUPS:
                frame = frame.f_back
            if is_own(frame.f_code.co_filename):
                lines.setdefault(name, own_line())

    with followed(type(os.environ), "__getitem__", note):
        yield lines


@contextlib.contextmanager
def places_read(mesh: Mesh) -> Iterator[dict[str, str]]:
    """Note along which axes the user's own code reads where this rank is, and the line that did.

    Its number in a group is its place along those axes along which the group's ranks differ. Outside of a mesh it has
    no place there, which is a place in the world.
    """
    lines: dict[str, str] = {}
    get_coordinate = DeviceMesh.get_coordinate

    def note(group: Any) -> None:
        if len(lines) < mesh.ndim:
            for axis in mesh.axes_within(distributed.get_process_group_ranks(group)):
                lines.setdefault(axis, own_line())

    def note_rank(group: Any) -> None:
        frame, read_group = sys._getframe(2), group
        while frame.f_code in QUERIES and frame.f_back is not None:
            read_group = frame.f_locals.get("group") or read_group
            frame = frame.f_back
        if is_own(frame.f_code.co_filename):
            note(read_group)

    def note_coordinate(device_mesh: DeviceMesh) -> None:
        if is_own(sys._getframe(2).f_code.co_filename):
            is_inside = get_coordinate(device_mesh) is not None
            for group in device_mesh.get_all_groups() if is_inside else [distributed.group.WORLD]:
                note(group)

    with (
        variables_read() as read,
        followed(distributed.ProcessGroup, "rank", note_rank),
        followed(DeviceMesh, "get_coordinate", note_coordinate),
    ):
        yield lines
    for name in sorted(OF_RANK & read.keys()):
        for axis in mesh.axes:
            lines.setdefault(axis, read[name])


READS_NUMBER = torch.ops.aten._local_scalar_dense.default
"""What `item()`, `tolist()`, `float()` and `if tensor:` come down to."""

COMPARES = {torch.ops.aten.equal.default, torch.ops.aten.allclose.default}
"""Operators that return whether values are alike."""

TRIED = ((0.0, 0), (1.0, 100), (math.inf, 1), (-1.0, 2))
"""What a number that a step reads is taken as, and what an integer, one pair after the other."""

NOT_TRUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Operators whose results are not the real ones if a value is not."""

MOST = 1 << 12
"""How often a line is answered at most that does something in between: a loop may wait for another answer for ever."""

NO_OPERATOR = {torch.Tensor.numpy: "numpy()", torch.Tensor.__array__: "numpy", torch.Tensor.__dlpack__: "dlpack"}
"""What hands values out that no operator shows, and its name."""


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers each read of an unknown number with the same number, or the same integer.

    Attributes:
        lines: How often each line of code has read one; the line is empty for code of a library.
    """

    def __init__(self, number: float, integer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number = number
        self._integer = integer
        self.lines: dict[str, int] = {}
        self._has_worked = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or answer a read; raise after `MOST` reads by the same line."""
        reads = func in COMPARES or (func is READS_NUMBER and not has_known_value(args[0]))
        if not reads:
            self._has_worked = True
            return func(*args, **(kwargs or {}))
        line = own_line().strip()
        self.lines[line] = self.lines.get(line, 0) + self._has_worked
        self._has_worked = False
        if self.lines[line] > MOST:
            raise ShardvizError(f"the step goes on reading values, and a plan has none {line}".rstrip())
        dtype = torch.bool if func in COMPARES else args[0].dtype
        if dtype == torch.bool:
            return bool(self._number)
        if dtype.is_complex:
            return complex(self._number)
        return self._number if dtype.is_floating_point else self._integer

    @property
    def reads(self) -> str:
        """Which values were read, in words."""
        first, *more_lines = self.lines
        more = f" and on {counted(len(more_lines), 'more line')}" if more_lines else ""
        return f"{'values' if more_lines else 'a value'}{first and f' {first}'}{more}"

    @property
    def tried(self) -> str:
        """What is answered, in words."""
        return f"{self._number:g} (integers {self._integer})"


class Refusal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to read values in a step that has some: a plan's collectives send nothing real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if NOT_TRUE & set(func.tags):
            raise ShardvizError(f"the step reads a value, and a plan has no true one{own_line()}")
        return func(*args, **(kwargs or {}))


class NoOperator(TorchFunctionMode):
    """Sees reads without an operator: refuses numpy and dlpack, and runs one for text.

    A list of values is refused as well if the step has some.
    """

    def __init__(self, *, has_values: bool) -> None:
        super().__init__()
        self._refused = NO_OPERATOR | ({torch.Tensor.tolist: "tolist()"} if has_values else {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._refused:
            raise ShardvizError(f"the step reads values by {self._refused[func]}, and a plan has none{own_line()}")
        if func is torch.Tensor.__format__ and is_fake(args[0]) and not args[0].dim():
            return format(args[0].item(), *args[1:])  # as torch does, but for tensors that are only its own
        return func(*args, **(kwargs or {}))
