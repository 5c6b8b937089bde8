"""What a recorder of lines keeps: tensors, calls, what is there before one, and what each call sends back.

The gradient of a tensor is the sum of what all its readers send back. Nodes of the graph tell a call's own share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records.trace import FrameRecord, LineRecord, ValueRecord
from shardviz.live.claims.registry import of_tensor
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Node = Any
    """One of autograd's, whose inputs go on to the edges in its `next_functions`."""

SENT_BACK = "sent back"
"""The origin of what one of a tensor's readers sends back to it."""

Frames = tuple[tuple[FrameRecord, ...], int, FrameRecord | None]


@dataclass
class Value:
    """A tensor, with a copy of this rank's part and of its gradient."""

    number: int
    tensor: torch.Tensor
    version: tuple[int, int]
    epoch: int
    origin: str = ""
    values: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    shape: tuple[int, ...] = ()
    placements: str = ""
    axes: tuple[str, ...] = ()
    needs_grad: bool = False
    again: Value | None = None
    memory: int = 0

    def record(self) -> ValueRecord:
        """Return it without its numbers."""
        gradient = self.back is not None
        needs_grad = any(value.needs_grad and value.values is not None for value in (self, self.again) if value)
        left_out = self.values is None
        sides = needs_grad, self.placements, left_out, gradient, self.memory, self.axes, self.again is not None
        return ValueRecord(self.number, self.shape, self.origin, *sides)

    @property
    def back(self) -> torch.Tensor | None:
        """The gradient that came back, to the call or to its recomputation."""
        return self.gradient if self.gradient is not None or self.again is None else self.again.gradient


@dataclass
class Event:
    """One call."""

    call: int
    function: str
    frames: Frames
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    is_collective: bool = False
    numbers: str = ""
    sent: tuple[tuple[int, int], ...] = ()

    def record(self) -> LineRecord:
        """Return it as it stands in a dump."""
        frames, own, since = self.frames
        tensors = self.inputs, self.outputs, self.ranks
        collective, numbers = self.is_collective, self.numbers
        return LineRecord(self.call, self.function, frames, own, *tensors, collective, numbers, since, self.sent)


@dataclass(frozen=True)
class Before:
    """What is there before a call.

    Attributes:
        inputs: The numbers of the tensors in its arguments.
        versions: Their versions.
        edges: Where their gradients go.
        num_events: How many calls were recorded.
    """

    inputs: tuple[int, ...]
    versions: list[tuple[int, int]]
    edges: list[Edge | None]
    num_events: int


def tensors_kept(tensors: Any, *, wait: bool = True) -> list[torch.Tensor]:
    """Return the tensors in some arguments that can be kept; functional collectives among them are waited for."""
    tensors_kept = []
    for tensor in tensors_in(tensors):
        if hasattr(tensor, "trigger_wait"):
            if wait:
                tensor.trigger_wait()
            tensor = tensor.elem  # type: ignore[attr-defined]
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta):
            tensors_kept.append(tensor)
    return tensors_kept


def has_memory(local: torch.Tensor) -> bool:
    """Whether a tensor can be read; FSDP2 frees the storage of whole weights that it has split again."""
    return hasattr(local, "trigger_wait") or not local.numel() or local.untyped_storage().nbytes() > 0


def real_of(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor, of complex numbers as pairs: what relates real numbers relates those too."""
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local


def storage_of(tensor: torch.Tensor) -> int:
    """Return where the storage of this rank's part of a tensor begins; the tensor's identity if it has no memory."""
    local = of_tensor("", "activation", tensor).values
    if hasattr(local, "trigger_wait"):  # a DTensor's own part may be waited for, too
        local = local.elem  # type: ignore[attr-defined]
    return local.untyped_storage().data_ptr() or id(tensor)


Edge = tuple["Node", int]
"""Where a tensor's gradient goes: the node that made the tensor, and which of that node's results it is."""

MAX_NODES = 64
"""A call whose graph is larger is not followed."""


def aliased(inputs: Any, named: Any) -> tuple[Any, Any]:
    """Return a module's arguments with an alias of each tensor, whose gradient is what the module alone sends back."""
    aliases: dict[int, Any] = {}

    def alias_of(argument: Any) -> Any:
        if not torch.is_tensor(argument) or not argument.requires_grad or argument.is_leaf:
            return argument
        if id(argument) not in aliases:
            aliases[id(argument)] = torch.ops.aten.alias(argument)
        return aliases[id(argument)]

    return tuple(map(alias_of, inputs)), {name: alias_of(argument) for name, argument in named.items()}


def edges_of(tensors: Iterable[torch.Tensor]) -> list[Edge | None]:
    """Return where the gradient of each tensor goes; None for one without a gradient, or a leaf."""
    return [(tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else None for tensor in tensors]


class Ways:
    """The ways back through calls: if several calls read a tensor, what each sends back to it is kept apart.

    Args:
        share: Takes a tensor's number and returns what is to be called with each gradient that a call sends back to it.
    """

    def __init__(self, share: Callable[[Any, int], Callable[[torch.Tensor | None], None]]) -> None:
        self._share = share
        self._by_number: dict[int, list[tuple[Any, list[tuple[Node, int]]]]] = {}

    def add(
        self,
        readers: Mapping[int, Any],
        numbers: Sequence[int],
        edges: Sequence[Edge | None],
        made: Sequence[torch.Tensor],
    ) -> None:
        """Follow the ways back through a call.

        Args:
            readers: The call that reads each tensor, by the tensor's number; None if that is not kept.
            edges: Where their gradients go, as that was before the call.
        """
        by_edge = {edge: number for edge, number in zip(edges, numbers, strict=True) if edge is not None}
        ways: dict[int, list[tuple[Node, int]]] = {}
        for edge, node, index in _ways_between(by_edge, made):
            ways.setdefault(by_edge[edge], []).append((node, index))
        for number, nodes in ways.items():
            if readers[number] is None:
                continue
            of_tensor = self._by_number.setdefault(number, [])
            of_tensor.append((readers[number], nodes))
            if len(of_tensor) < 2:
                continue  # a tensor's only reader sends back all of its gradient
            for reader, reader_nodes in of_tensor if len(of_tensor) == 2 else of_tensor[-1:]:
                came_back = self._share(reader, number)
                for node, index in reader_nodes:
                    node.register_hook(lambda given, _, index=index, came_back=came_back: came_back(given[index]))


def _ways_between(edges: Iterable[Edge], made: Iterable[torch.Tensor]) -> list[tuple[Edge, Node, int]]:
    """Return each node that sends a gradient to one of some edges, with the edge and the index of that gradient.

    Return none if the graph is too large: some of the ways would be taken for all of them.
    """
    wanted = set(edges)
    waiting = [tensor.grad_fn for tensor in made if tensor.grad_fn is not None] if wanted else []
    visited = {node for node, _ in wanted}
    ways: list[tuple[Edge, Node, int]] = []
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        if len(visited) >= MAX_NODES:
            return []
        visited.add(node)
        for index, (behind, result) in enumerate(node.next_functions):
            if (behind, result) in wanted:
                ways.append(((behind, result), node, index))
            elif behind is not None:
                waiting.append(behind)
    return ways
