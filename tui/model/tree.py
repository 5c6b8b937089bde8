"""Which tensors are listed, and their tree of modules: layers that are alike all through are one line."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shardviz.check.verdicts import worst
from shardviz.text import join_numbers, printable

from .names import label, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardviz.check.verdicts import Verdict

    from .document import TensorEntry
    from .names import Part
    from .stored import StoredEntry
    from .usage import UsageEntry

    Entry: TypeAlias = TensorEntry | StoredEntry
    """A tensor of a dump or of a checkpoint."""


Kept = dict[int, "Sequence[str]"]
"""The names that are listed, by the index of their entry."""

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Filters:
    """The conditions under which a tensor is listed; an empty one is always met.

    Attributes:
        text: A part of its name or of its layout; upper and lower case are the same.
        findings: Whether only tensors with findings are listed.
        role: The role it must have; `all` for any. Empty for the model's own tensors, and for those of the step's
            results that have findings: a gradient, a state and an output for every layer would bury the rest. With a
            text all roles are searched.
        axis: The mesh axis that must split it, or over which a sum must be pending.
        rank: The rank that must have a part of it.
    """

    text: str = ""
    findings: bool = False
    role: str = ""
    axis: str = ""
    rank: int | None = None

    def passes(self, entry: Entry) -> bool:
        """Whether an entry is listed."""
        return (
            (not self.findings or bool(entry.findings))
            and (self.role in ("all", entry.role) if self.role else entry.listed or bool(self.text))
            and (not self.axis or self.axis in entry.axes)
            and (self.rank is None or entry.is_on(self.rank))
            and (
                not self.text
                or self.is_in(entry.title)
                or self.is_in(entry.layout)
                or any(map(self.is_in, entry.names))
            )
        )

    def is_in(self, name: str) -> bool:
        """Whether the text is in a name or a layout."""
        return self.text.lower() in printable(name).lower()

    def kept(self, entries: Sequence[Entry]) -> Kept:
        """Return the names that are listed; all of them if nothing is asked for and nothing is the model's own.

        Of several layers only those are listed that have the text in their names, unless all do or it is in the layout.
        """
        passing = [at for at, entry in enumerate(entries) if self.passes(entry)]
        if not passing and self == Filters():
            passing = list(range(len(entries)))
        kept: Kept = {}
        for at in passing:
            names = entries[at].names
            matching = names if self.is_in(entries[at].layout) else [name for name in names if self.is_in(name)]
            kept[at] = matching or names
        return kept

    def __str__(self) -> str:
        parts = ["findings only"] * self.findings + [f"role {self.role}"] * bool(self.role)
        return " · ".join([*parts, *[f"axis {self.axis}"] * bool(self.axis)])


def after(choices: Sequence[Choice], current: Choice) -> Choice:
    """Return the choice after the current one; after the last comes the first."""
    return choices[(choices.index(current) + 1) % len(choices)] if current in choices else choices[0]


ModulePath = tuple[str, ...]
Apart = frozenset[tuple[ModulePath, int | None]]
"""Layers that stand on their own though others are like them: the path around with their name, and their number.

None instead of a number is all of them.
"""


@dataclass(slots=True, eq=False)
class Node:
    """A module, or a tensor with its entry.

    Attributes:
        parts: What is in it, in model order.
        names: Of a tensor, its names: several if identical layers are one.
        verdict: The worst in it.
        counts: Whether it counts in the verdict of its module: what is unknown of a result or a state does not.
        kind: A number that modules have in common which are alike all through: in parts, entries and verdicts.
    """

    parts: dict[Part, Node] = field(default_factory=dict)
    entry: int | None = None
    names: list[str] = field(default_factory=list)
    verdict: Verdict = "good"
    counts: bool = True
    kind: int = -1


@dataclass(frozen=True)
class TreeLine:
    """One line of the tree.

    Attributes:
        path: The names from the root down.
        verdict: The worst verdict in it.
        count: How many identical layers it is.
        names: The tensor's names; empty for a module.
        key: Where its layers stand: the path of the module around with the layers' name.
        number: Its own number, or the first of several; None if it has none.
        nodes: The modules or tensors that it is.
    """

    path: ModulePath
    verdict: Verdict
    count: int = 1
    entry: int | None = None
    names: tuple[str, ...] = ()
    key: ModulePath = ()
    number: int | None = None
    nodes: tuple[Node, ...] = field(default=(), compare=False, repr=False)


def tree_of(entries: Sequence[Entry | UsageEntry], shown: Mapping[int, Sequence[str]] | None = None) -> Node:
    """Return the tree of some entries, with the names that are shown by the index of each; by default all of them."""
    if shown is None:
        shown = {index: entry.names for index, entry in enumerate(entries)}
    root = Node()
    modules: dict[tuple[Part, ...], Node] = {(): root}
    for index, names in shown.items():
        entry = entries[index]
        role, verdict_of = entry.role, entry.verdict_of
        for name in names:
            path, part = place_of(name, role)
            verdict = verdict_of(name)
            counts = verdict != "unknown" or entry.listed
            module, tensor = modules.get(path) or _module(modules, path), Node({}, index, [name], verdict, counts)
            while module.parts.setdefault(part, tensor) is not tensor:  # one name of a tensor and a module, or of two
                part = (f"{part[0]} ", part[1])
    _align([root])
    _settle(root, {})
    return root


def _module(modules: dict[tuple[Part, ...], Node], path: tuple[Part, ...]) -> Node:
    """Return the module at a path from the root, made if it is not there yet."""
    if path not in modules:
        modules[path] = _module(modules, path[:-1]).parts.setdefault(path[-1], Node())
    return modules[path]


def _align(modules: Sequence[Node]) -> None:
    """Give layers with the same parts the order that most of them have: what one alone has came last, as an entry."""
    orders = Counter(tuple(module.parts) for module in modules)
    if len(orders) > 1:
        _reorder(modules, orders)
    below: dict[Part | str, list[Node]] = {}
    for module in modules:
        for part, inside in module.parts.items():
            if inside.parts:
                below.setdefault(part if part[1] is None else part[0], []).append(inside)
    for nodes in below.values():
        _align(nodes)


def _reorder(modules: Sequence[Node], orders: Counter[tuple[Part, ...]]) -> None:
    """Give modules the order of parts that most of those with the same ones have."""
    usual: dict[frozenset[Part], tuple[Part, ...]] = {}
    for order, _ in orders.most_common():
        usual.setdefault(frozenset(order), order)
    for module in modules:
        parts, order = tuple(module.parts), usual[frozenset(module.parts)]
        if parts != order:
            module.parts = {part: module.parts[part] for part in order}


def _settle(node: Node, alike: dict[object, int]) -> None:
    """Work out the worst verdict in a module, and give modules that are alike all through the same number."""
    for inside in node.parts.values():
        if inside.parts:
            _settle(inside, alike)
        else:
            inside.kind = alike.setdefault((inside.entry, inside.verdict), len(alike))
    if node.entry is None:
        node.counts = any(inside.counts for inside in node.parts.values())
        verdicts = {inside.verdict for inside in node.parts.values() if inside.counts or not node.counts}
        node.verdict = verdicts.pop() if len(verdicts) == 1 else worst(verdicts)
    content = (node.entry, node.verdict, tuple(node.parts), tuple([inside.kind for inside in node.parts.values()]))
    node.kind = alike.setdefault(content, len(alike))


def errors_first(alike: Sequence[Node]) -> int:
    """Return a key that sorts what is wrong first."""
    order = ["error", "warning", "unknown"]
    return order.index(alike[0].verdict) if alike[0].verdict in order else len(order)


def lines_of(
    root: Node, apart: Apart = frozenset(), order: Callable[[Sequence[Node]], float] | None = None
) -> list[TreeLine]:
    """Return all lines of a tree, each module before its parts, which are sorted by an order if one is given."""
    lines: list[TreeLine] = []

    def add(modules: Sequence[Node], path: ModulePath) -> None:
        parts = modules[0].parts
        groups = _groups(modules[0], path, apart)
        if order is not None:
            groups.sort(key=lambda group: order([parts[part] for part in group]))
        for group in groups:
            line = _line([module.parts[part] for module in modules for part in group], path, group)
            lines.append(line)
            add(line.nodes, line.path)

    add((root,), ())
    return lines


def visible(lines: Sequence[TreeLine], is_open: Callable[[TreeLine], bool]) -> list[TreeLine]:
    """Return the lines that are not in a closed module."""
    shown, deepest = [], math.inf
    for line in lines:
        if len(line.path) <= deepest:
            shown.append(line)
            deepest = math.inf if line.entry is not None or is_open(line) else len(line.path)
    return shown


def _line(inside: list[Node], path: ModulePath, group: list[Part]) -> TreeLine:
    """Return the line of modules or tensors that are alike, which are a group of the parts at a path."""
    first, (prefix, number) = inside[0], group[0]
    title, numbers = label(group[0]), [layer for _, layer in group if layer is not None]
    if len(numbers) > 1:
        title = f"{prefix}{'.' if prefix else ''}[{join_numbers(numbers, ',')}]"
    names = () if first.entry is None else tuple([name for node in inside for name in node.names])
    return TreeLine(
        (*path, title), first.verdict, len(group), first.entry, names, (*path, prefix), number, tuple(inside)
    )


def _groups(module: Node, path: ModulePath, apart: Apart) -> list[list[Part]]:
    """Return the parts of a module in model order, those that are alike but for their number together."""
    if all(number is None for _, number in module.parts):
        return [[part] for part in module.parts]
    came = {prefix: at for at, (prefix, _) in reversed([*enumerate(module.parts)])}
    groups: dict[object, list[Part]] = {}
    for prefix, number in sorted(module.parts, key=lambda part: (came[part[0]], -1 if part[1] is None else part[1])):
        stands_alone = ((*path, prefix), number) in apart or ((*path, prefix), None) in apart
        kind = None if number is None or stands_alone else module.parts[prefix, number].kind
        groups.setdefault((prefix, number if kind is None else None, kind), []).append((prefix, number))
    return list(groups.values())


def layer_of(name: str) -> tuple[ModulePath, int] | None:
    """Return where a name's first numbered module stands, and its number, for it to stand apart; None without one."""
    path, part = place_of(name)
    parts = (*path, part)
    for depth, (prefix, number) in enumerate(parts):
        if number is not None:
            return (*map(label, parts[:depth]), prefix), number
    return None
