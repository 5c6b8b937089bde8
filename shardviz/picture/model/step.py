"""A step as a tree of calls compared with the unsharded model's, and its first wrong values.

The calls around the first wrong one are open, all others are closed. Its values are shown as three fields (actual,
expected, difference): the last dim across, all others down, reduced by taking the largest of each block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from shardviz.check.step.comparison import compared
from shardviz.check.step.evidence import Evidence
from shardviz.check.step.trace.calls import Calls, is_within
from shardviz.check.step.trace.causes import compared_at
from shardviz.layout.mesh import ranks_by
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.departure import StepDifference
    from shardviz.check.step.trace.calls import Call
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.trace import State, What
    from shardviz.explain.finding import Finding

SIDES: tuple[What, ...] = ("input", "output", "gradient of output", "gradient of input")
"""In the order in which they come to be."""

SHORT = {"input": "in", "output": "out", "gradient of output": "grad out", "gradient of input": "grad in"}

UNSHARDED = "the unsharded model"

IN_WORDS: dict[State, str] = {
    "right": "{}'s",
    "pending": "terms of a sum",
    "moved": "in a different order",
    "repeated": "slices several times",
    "odd": "something else",
    "cut": "cut from the graph",
    "none": "no gradient came",
}
"""What ranks have of the values that they are compared with, in words."""

Verdict = Literal["good", "error", "unknown"]


@dataclass(frozen=True)
class Node:
    """One call of a module.

    Attributes:
        depth: In how many others it was made.
        children: The calls made in it, in order.
        is_first: Whether it is the first wrong one.
        wrong: Parameters and buffers of the module itself that findings name, `weight`; on its first call.
    """

    call: Call
    depth: int
    children: tuple[Node, ...]
    is_first: bool = False
    wrong: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The module's name, with the number of the call if there are several."""
        number = f" (call {self.call.number + 1})" if self.call.number else ""
        return (self.call.module or "the model") + number

    @property
    def has_first(self) -> bool:
        """Whether the first wrong call was made in it."""
        return any(child.is_first or child.has_first for child in self.children)

    @property
    def wrong_inside(self) -> int:
        """How many parameters and buffers of modules called in it findings name."""
        return sum(len(child.wrong) + child.wrong_inside for child in self.children)

    @property
    def size(self) -> int:
        """How many calls were made in it."""
        return sum(1 + child.size for child in self.children)

    def state(self, side: What) -> State | None:
        """Return the worst that any rank has at a side; None if nothing is known of it."""
        return self.call.state(side)

    @property
    def verdict(self) -> Verdict:
        """Whether what the call returned, forward and backward, is the unsharded model's."""
        if self.call.is_bad("output") or self.call.is_bad("gradient of input"):
            return "error"
        known = any(self.call.is_good(side) for side in ("output", "gradient of input"))
        return "good" if known else "unknown"

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz show --step --format json` prints."""
        return {
            "module": self.call.module,
            "call": self.call.number,
            "type": self.call.type,
            "first_wrong": self.is_first,
            "states": {side: self.state(side) for side in SIDES if self.state(side)},
            "layouts": {side: text for side in SIDES if (text := self.layout(side))},
            "wrong": list(self.wrong),
            "calls": [child.to_json() for child in self.children],
        }

    def layout(self, side: What) -> str:
        """Return how ranks share a side, in the notation; empty if it is not known."""
        point = self.call.point(side, "right", "pending")
        return point.layout if point is not None else ""


@dataclass(frozen=True)
class StepTree:
    """The calls of a step.

    Attributes:
        finding: What is wrong first, if a finding names a module.
        reference: What its values are compared with.
    """

    roots: tuple[Node, ...]
    finding: Finding | None = None
    reference: str = UNSHARDED

    @property
    def num_calls(self) -> int:
        """How many calls there are."""
        return sum(1 + root.size for root in self.roots)

    def lines(self, opened: frozenset[tuple[str, int]] | None = None) -> list[Node]:
        """Return the calls that are seen: by default those around the first wrong one are open.

        Args:
            opened: The calls that are open, by module and number.
        """
        return list(_visible_nodes(self.roots, self.opened if opened is None else opened))

    @property
    def opened(self) -> frozenset[tuple[str, int]]:
        """Calls that are open by default: around the first wrong one, wrong weights, or the root."""
        nodes = list(_all_nodes(self.roots))
        found = {key_of(node) for node in nodes if node.has_first}
        found = found or {key_of(node) for node in nodes if node.wrong_inside}
        return frozenset(found or {key_of(root) for root in self.roots})

    def within(self, module: str) -> StepTree:
        """Return the calls of one module with everything inside them; empty if it wasn't called."""
        return replace(self, roots=tuple(node for node in _all_nodes(self.roots) if node.call.module == module))

    @property
    def keys(self) -> frozenset[tuple[str, int]]:
        """What all its calls are known by."""
        return frozenset(map(key_of, _all_nodes(self.roots)))


def key_of(node: Node) -> tuple[str, int]:
    """Return what a call is known by."""
    return node.call.module, node.call.number


def _all_nodes(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all_nodes(node.children)


def _visible_nodes(nodes: Sequence[Node], opened: frozenset[tuple[str, int]]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if key_of(node) in opened:
            yield from _visible_nodes(node.children, opened)


def step_tree(dump: Dump, findings: Sequence[Finding], reference: str = UNSHARDED) -> StepTree:
    """Return the calls of a dump's step; without any if it was not followed.

    Args:
        findings: What the check found; the first that names a module says which call is the first wrong one.
    """
    finding = next((finding for finding in findings if finding.module), None)
    calls = Calls.of(dump).in_order
    first = _first_wrong(calls, finding.module) if finding is not None else None
    tensors = [name for finding in findings for name in finding.tensors if _is_held(dump, name)]
    return StepTree(_nest(calls, _StepMarks(first, _by_module(calls, tensors))), finding, reference)


def _is_held(dump: Dump, name: str) -> bool:
    """Whether a tensor is a parameter or a buffer, and no output or loss of the model."""
    tensor = dump.first_captured.get(name)
    return tensor is None or tensor.role in ("param", "buffer")


class _StepMarks(NamedTuple):
    """What is wrong in a step: the first wrong call, and each module's own wrong tensors."""

    first: Call | None
    tensors: dict[str, list[str]]

    def of(self, call: Call) -> tuple[str, ...]:
        return tuple(self.tensors.get(call.module, ())) if not call.number else ()


def _by_module(calls: Sequence[Call], tensors: Iterable[str]) -> dict[str, list[str]]:
    """Group tensors by the called module that owns them; those of uncalled modules are dropped."""
    modules = {call.module for call in calls}
    by_module: dict[str, list[str]] = {}
    for name in dict.fromkeys(tensors):
        module, _, tensor = name.rpartition(".")
        if module in modules:
            by_module.setdefault(module, []).append(tensor)
    return by_module


def _first_wrong(calls: Sequence[Call], module: str) -> Call | None:
    own = [call for call in calls if call.module == module]
    bad = [call for call in own if any(call.is_bad(side) for side in SIDES)]
    return next(iter(bad or own), None)


def _nest(calls: Sequence[Call], marks: _StepMarks) -> tuple[Node, ...]:
    """Nest calls, which come in the order in which they ended."""
    stack: list[tuple[Call, list[Any]]] = []
    for call in calls:
        inner = []
        while stack and is_within(stack[-1][0].module, call.module):
            inner.append(stack.pop())
        stack.append((call, inner[::-1]))
    return tuple(_node(call, inner, 0, marks) for call, inner in stack)


def _node(call: Call, inner: Sequence[tuple[Call, list[Any]]], depth: int, marks: _StepMarks) -> Node:
    children = tuple(_node(made, more, depth + 1, marks) for made, more in inner)
    return Node(call, depth, children, call is marks.first, marks.of(call))


ROWS, COLUMNS = 8, 16
"""A field has no more of them."""

MOST_RANKS = 4
"""So many sets of ranks that have the same are shown."""

MAX_LAYOUTS = 16
"""Layouts that fit the shapes and are looked at: that one is drawn under which ranks that share a part agree most."""


@dataclass(frozen=True)
class StepHeat:
    """The values of some ranks, equal on all of them, with expected values and difference.

    Attributes:
        layout: How ranks share the whole, in the notation; empty if that is not known.
        shape: The shape of what each of them has.
        has: The sizes of their numbers, in blocks.
        due: The sizes of the unsharded model's.
        off: How far apart the two are.
        allowed: How far an element may be off.
        is_wrong: Whether they are off.
        side: Which side of the first wrong module's call it is, as the tree's columns are called.
    """

    ranks: tuple[int, ...]
    layout: str
    shape: tuple[int, ...]
    has: NDArray[np.float64]
    due: NDArray[np.float64]
    off: NDArray[np.float64]
    allowed: float
    is_wrong: bool
    side: str = ""

    @property
    def most(self) -> float:
        """The largest size in either."""
        return max(_largest_value(self.has), _largest_value(self.due))

    @property
    def farthest(self) -> float:
        """How far the element is off that is off farthest."""
        return _largest_value(self.off)

    def levels(self, field: str, count: int) -> list[list[int]]:
        """Return a field as integers below `count`, scaled to its largest value.

        A difference that rounding allows is 0, any other at least 1.
        """
        values: NDArray[np.float64] = getattr(self, field)
        top = self.farthest if field == "off" else self.most
        scaled = np.nan_to_num(values / (top or 1.0), nan=1.0, posinf=1.0)
        numbers = np.clip(np.rint(scaled * (count - 1)), 0, count - 1).astype(int)
        if field == "off":
            numbers = np.where(values <= self.allowed, 0, np.maximum(numbers, 1))
        rows: list[list[int]] = numbers.tolist()
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz show --step --format json` prints."""
        fields = {name: _as_lists(getattr(self, name)) for name in ("has", "due", "off")}
        return {"ranks": list(self.ranks), "layout": self.layout, "shape": list(self.shape), **fields}


def _as_lists(field: NDArray[np.float64]) -> list[list[float | None]]:
    return [[float(value) if np.isfinite(value) else None for value in row] for row in field]


def _largest_value(field: NDArray[np.float64]) -> float:
    return float(np.max(field, initial=0.0, where=np.isfinite(field)))


def step_heats(dump: Dump) -> list[StepHeat]:
    """Return what ranks have at the first wrong place; empty if its values aren't kept."""
    return heats_of(Evidence(dump, tuple(compared(dump))))


def heats_of(evidence: Evidence) -> list[StepHeat]:
    """Return what ranks have at the first wrong place that evidence shows."""
    first = evidence.divergence
    if first is None:
        return []
    # With two axes of one size several layouts fit the shapes; under a wrong one copies of a part would differ.
    fitting = [fit for fit in islice(compared_at(evidence, first), MAX_LAYOUTS) if fit.values]
    one = min(fitting, key=lambda fit: len(fit.copies_differ_along), default=None)
    heats = _heats(one) if one is not None and not one.incomparable else []
    side = SHORT[first.point.what] if first.point is not None else ""
    return [replace(heat, side=side) for heat in heats]


def _heats(result: Compared) -> list[StepHeat]:
    wrong_first = sorted(equal_ranks(result), key=lambda ranks: (ranks[0] not in result.wrong, ranks[0]))
    return [_heat(result, tuple(ranks)) for ranks in wrong_first[:MOST_RANKS] if result.reduced[ranks[0]].size]


def equal_ranks(result: Compared) -> list[list[int]]:
    """Group ranks that have equal values of the same part."""
    parts = ((rank, (result.regions[rank], (held + 0.0).tobytes())) for rank, held in result.reduced.items())
    return list(ranks_by(parts).values())


def _heat(result: Compared, ranks: tuple[int, ...]) -> StepHeat:
    got, due = result.reduced[ranks[0]], result.wanted_of(ranks[0])
    layout = write(result.claimed) if result.claimed is not None else ""
    has, whole, off = (_blocks(np.abs(values)) for values in (got, due, got - due))
    return StepHeat(ranks, layout, got.shape, has, whole, off, result.tolerance, ranks[0] in result.wrong)


def _blocks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest of each block of values."""
    field = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    rows = np.array_split(np.arange(field.shape[0]), min(ROWS, field.shape[0]))
    columns = np.array_split(np.arange(field.shape[1]), min(COLUMNS, field.shape[1]))
    return np.array([[np.max(field[np.ix_(down, across)]) for across in columns] for down in rows])


def step_of(step: StepDifference) -> tuple[StepTree | None, Sequence[StepHeat]]:
    """Return the tree and the numbers; no tree if no two jobs' steps were laid side by side."""
    steps = step.sides
    if steps is None:
        return None, ()
    tree = step_tree(steps.evidence.dump, steps.findings, steps.reference)
    return tree, heats_of(steps.evidence) if tree.finding is not None else ()


def step_json(step: StepDifference) -> dict[str, Any]:
    """Return the calls and numbers of a step, as `shardviz diff --format json` prints them."""
    tree, heats = step_of(step)
    if tree is None:
        return {}
    return {"calls": [root.to_json() for root in tree.roots], "heat": [heat.to_json() for heat in heats]}
