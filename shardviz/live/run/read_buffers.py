"""Buffers that a model's own forward reads, or writes: a bias that balances experts, a codebook, a queue of keys.

Statistics that a forward writes, as those of BatchNorm, are of a rank's own rows, and evaluation alone reads them. What
is written between steps and read in training makes another model of each rank if it differs. No program can be asked
what it reads: a forward reads the buffers that its code, or that of methods which it names, names.

Where its source can be read, it says whether a buffer is read before it is written: then it carries something from one
step to the next. One that is written first is scratch, and one that is never read is for others to look at. A buffer
that is given to a function of the user's says nothing.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

import torch

from shardviz.live.claims.registry import local_tensors, unwrapped
from shardviz.live.compat.modules import clean_name, name_in
from shardviz.live.run.step_files import sampled
from shardviz.live.world.group import random_states

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import nn

    from shardviz.live.claims.local import Local


class ReadBuffers:
    """The buffers of a model that a step reads or writes.

    Attributes:
        written: Those that a forward wrote, each with the line that writes it; empty if that is not known.
        carried: Those of them that it reads in training before it writes them.
    """

    def __init__(self, root: nn.Module, most: int, beside: Mapping[str, nn.Module] | None = None) -> None:
        """Copy them, of large ones a sample of that many elements.

        Args:
            beside: Modules that the job calls beside it, such as a loss, by the name before their buffers'.
        """
        self._models, self._most = {"": unwrapped(root)} | dict(beside or {}), most
        kinds = {type(module) for model in self._models.values() for module in model.modules()}
        self._named = {name for kind in kinds for name in _named_by(kind)}
        uses = {kind: uses_of(kind) for kind in kinds}
        self._uses = {
            name_in(before, name_in(path, name)): use
            for before, model in self._models.items()
            for path, module in model.named_modules()
            for name, use in uses[type(module)].items()
        }
        self._states = dict(self._current())
        self._before = list(self._copies(self._states))
        self._random = random_states()
        self.written: dict[str, str] = {}
        self.carried: list[str] = []

    @property
    def beside(self) -> list[str]:
        """The names of those that are of no module of the model."""
        return [name for name in self._states if any(name.startswith(f"{each}.") for each in self._models if each)]

    @property
    def before(self) -> list[Local]:
        """Copies from before the step of those that a forward wrote, or names and did not write."""
        return [local for local in self._before if local.name in self.written or self._is_read(local)]

    @property
    def kept(self) -> list[str]:
        """The names of those that no forward wrote, not even through `.data`, of which only the values tell."""
        now = {local.name: local.values for local in self._copies(self._states)}
        return [
            local.name
            for local in self._before
            if local.name not in self.written and local.name in now and torch.equal(local.values, now[local.name])
        ]

    @property
    def is_drawn(self) -> bool:
        """Whether random numbers were drawn since the last forward."""
        return not all(map(torch.equal, self._random, random_states()))

    def note_written(self) -> None:
        """Note those that were written, or replaced, since they were copied."""
        current = dict(self._current())
        for name in (name for name, state in self._states.items() if current.get(name) != state):
            is_carried, line = self._uses.get(name, (False, ""))
            self.carried += [name] if is_carried and name not in self.written else []
            self.written[name] = line
        self._random = random_states()

    def written_after(self) -> list[Local]:
        """Return copies as they are now of those that a forward wrote."""
        return list(self._copies(self.written))

    def after(self) -> list[Local]:
        """Return copies of the others as they are now."""
        names = [local.name for local in self._before if local.name not in self.written and self._is_read(local)]
        return list(self._copies(names))

    def _is_read(self, local: Local) -> bool:
        return local.name.rpartition(".")[-1] in self._named and local.values.is_floating_point()

    def _current(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for before, model in self._models.items():
            for name, buffer in model.named_buffers():
                if type(buffer) is torch.Tensor and not buffer.is_complex() and not buffer.is_meta:
                    yield name_in(before, clean_name(name)), (id(buffer), buffer._version)

    def _copies(self, names: Collection[str]) -> Iterator[Local]:
        for before, model in self._models.items() if names else ():
            for local in local_tensors(model):
                name = name_in(before, local.name)
                if local.role == "buffer" and name in names:
                    yield replace(local, name=name, values=sampled(local.values, self._most))


def _named_by(kind: type[nn.Module]) -> set[str]:
    """Return the attributes that a class's forward names, and the methods that it names; none of torch's own classes.

    The class that `fully_shard` derives has no forward of its own.
    """
    names: set[str] = set()
    waiting = ["forward"]
    while waiting:
        method = inspect.unwrap(getattr(kind, waiting.pop()))
        if not isinstance(method, FunctionType) or method.__module__.startswith("torch."):
            continue
        new = {*method.__code__.co_names} - names
        names |= new
        waiting += [name for name in new if isinstance(getattr(kind, name, None), FunctionType)]
    return names


ABOUT = frozenset(("shape", "size", "ndim", "dim", "numel", "dtype", "device", "new_zeros", "new_empty", "stride"))
"""Attributes of a tensor that say nothing of its numbers."""

NAMES_OF_NUMBERS = ("data", "T", "mT")
"""Attributes of a tensor that are a view of it."""


def uses_of(kind: type[nn.Module]) -> Mapping[str, tuple[bool, str]]:
    """Return how the forward of a class uses what `self` has.

    Returns:
        By name: whether the forward reads it in training before it writes it, and the line that writes it first, as
        `moco.py:42`; empty if none does.
    """
    uses = _Uses(kind)
    uses.follow("forward")
    return {name: (use == "read", uses.written_in.get(name, "")) for name, use in uses.first.items()}


class _Uses(ast.NodeVisitor):
    """Visits a method in the order in which it runs, and those that it calls.

    Attributes:
        first: By name, what is done with it first: `read`, `write`, or `given` to another function.
        written_in: By name, the first line that writes it.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        self.first: dict[str, str] = {}
        self.written_in: dict[str, str] = {}
        self._kind, self._followed = kind, set[str]()
        self._code, self._before = "", 0
        self._aliases: dict[str, str] = {}

    def follow(self, method: str) -> None:
        """Visit the body of a method, once; none of torch's own."""
        function = getattr(self._kind, method, None)
        if method in self._followed or function is None:
            return
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
            return
        self._followed.add(method)
        try:
            lines, number = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            return
        outer = self._code, self._before, self._aliases
        self._code, self._before, self._aliases = Path(function.__code__.co_filename).name, number - 1, {}
        for statement in tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else ():
            self.visit(statement)
        self._code, self._before, self._aliases = outer

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        """Visit what runs in training."""
        test, is_not = node.test, False
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, is_not = test.operand, True
        is_of_training = isinstance(test, ast.Attribute) and test.attr == "training"
        branches = [node.test, node.body, node.orelse]
        if is_of_training:
            branches = [node.orelse if is_not else node.body]
        for branch in branches:
            for child in branch if isinstance(branch, list) else [branch]:
                self.visit(child)

    visit_IfExp = visit_If  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        """Visit the value before the targets; another name of a buffer stands for it."""
        name, target = self._direct(node.value), node.targets[0]
        if name and isinstance(target, ast.Name):
            self._aliases[target.id] = name
            return
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Count `x += y` as a write alone: what it reads goes nowhere else."""
        self.visit(node.value)
        self._write(node.target)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Write what slices are assigned to."""
        self.visit(node.slice)
        if isinstance(node.ctx, ast.Store):
            self._write(node)
        else:
            self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Read a buffer, or write it if it is replaced."""
        if node.attr in ABOUT and self._direct(node.value):
            return
        name = self._direct(node)
        if name and isinstance(node.ctx, ast.Store):
            self._write(node)
        elif name:
            self.first.setdefault(name, "read")
        else:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        """Read a buffer by its other name."""
        if node.id in self._aliases and isinstance(node.ctx, ast.Load):
            self.first.setdefault(self._aliases[node.id], "read")

    def visit_Call(self, node: ast.Call) -> None:
        """Visit the arguments; go into methods of `self`; write what a function whose name ends in `_` is called of."""
        function = node.func
        method = function.attr if isinstance(function, ast.Attribute) else ""
        is_of_self = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "self"
        is_unknown = is_of_self or (isinstance(function, ast.Name) and not hasattr(builtins, function.id))
        for argument in node.args:
            if is_unknown and (name := self._direct(argument)):
                self.first.setdefault(name, "given")
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg == "out":
                self._write(keyword.value)
            self.visit(keyword.value)
        if is_of_self:
            self.follow(method)
        elif method.endswith("_") and isinstance(function, ast.Attribute) and self._base(function.value):
            self._write(function.value)
        else:
            self.visit(function)

    def _write(self, node: ast.expr) -> None:
        if name := self._base(node):
            self.first.setdefault(name, "write")
            self.written_in.setdefault(name, f"{self._code}:{self._before + node.lineno}")
        elif isinstance(node, ast.Subscript | ast.Attribute):
            self.visit(node.value)

    def _base(self, node: ast.expr) -> str:
        """Return the buffer that an expression is a part of; empty if it is of none."""
        while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in NAMES_OF_NUMBERS):
            node = node.value
        return self._direct(node)

    def _direct(self, node: ast.expr) -> str:
        """Return the buffer that an expression names; empty if it names none."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, "")
        is_of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        return node.attr if is_of_self and isinstance(node, ast.Attribute) else ""
