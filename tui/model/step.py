"""A step as plain data and as text: collectives with identical layers folded, numbers before and after, its modules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import structs
from rich.text import Text

from shardviz.dump.costs import Timeline, received_by_axes, received_bytes, timeline_of, traffic
from shardviz.errors import ShardvizError
from shardviz.picture.model.holders import mask_of, ranks_text
from shardviz.picture.model.step import SHORT, SIDES, StepTree, key_of, step_heats, step_tree
from shardviz.picture.text.step import heat_lines, node_line, side_text
from shardviz.picture.text.terminal import BAD, UNICODE
from shardviz.text import Fold, bytes_text, fold, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import CollectiveRecord
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.step import Node, StepHeat

    from .document import Document

    Moment = tuple[int, tuple[float, ...] | None, tuple[float, ...] | None]
    """A rank, and its numbers before a collective and after it; None if they were not kept."""


WHAT = {
    "all_gather": "each rank gets the parts of all ranks",
    "all_reduce": "each rank gets the sum over all ranks",
    "all_to_all": "each rank sends a part to every other rank",
    "barrier": "each rank waits until all have arrived",
    "broadcast": "each rank gets a copy of one rank's tensor",
    "gather": "one rank gets the parts of all ranks",
    "recv": "one rank receives from another",
    "reduce": "one rank gets the sum over all ranks",
    "reduce_scatter": "each rank gets its part of the sum over all ranks",
    "scatter": "each rank gets its part of one rank's tensor",
    "send": "one rank sends to another",
}
"""The effect of each collective within a group, by torch's name for it."""

BEFORE = ".before"
"""The part of a module that outputs a rank's numbers before the module's collective ran."""

MOST_NUMBERS = 32
"""Numbers of a rank that a line shows."""


def axes_text(axes: Sequence[str]) -> str:
    """Write the axes along which a group runs; a group along none may be any ranks."""
    return ", ".join(axes) or "no axis"


@dataclass(frozen=True)
class Collective:
    """The collectives of a step that are alike, in a module or in identical layers.

    Attributes:
        record: The busiest rank's record of those in one module, without the module's name.
        ranks: The ranks that took part, rising.
    """

    record: CollectiveRecord
    modules: Fold
    ranks: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many there were in all modules."""
        return self.record.count * len(self.modules)

    @property
    def bytes(self) -> int:
        """The bytes of all of them together."""
        return self.record.bytes * len(self.modules)

    @property
    def received(self) -> int:
        """The bytes that each rank receives."""
        return received_bytes(self.record) * len(self.modules)

    @property
    def title(self) -> str:
        """Its name, and where it ran."""
        module = printable(str(self.modules))
        when = "outside of modules" if self.record.outside else self.record.when
        return f"{printable(self.record.op)}{f' in {module}' if module else ''}, {when}"

    def line(self, width: int) -> Text:
        """Write it in a line, with so many columns for its axes."""
        record = self.record
        numbers = f"{self.count:>6,} {bytes_text(self.bytes):>8} {bytes_text(self.received):>8}"
        return Text.assemble(
            {"backward": "← ", "forward": "→ "}.get(record.when, "· "),
            (f"{printable(record.op):<15} ", "bold"),
            f"{axes_text(record.axes):<{width}} {numbers}",
            (f"  {printable(str(self.modules)) or '-'}", "dim"),
            no_wrap=True,
        )

    def text(self, mesh: Mesh, rank: int) -> Text:
        """Write its effect, its bytes, how many ranks took part in groups of how many, and which are a rank's."""
        record, each = self.record, self.bytes // max(self.count, 1)
        times = f"{self.count:,} × " if self.count > 1 else ""
        sizes = f"{times}{each:,} byte{'' if each == 1 else 's'}; each rank receives {self.received:,}"
        groups = f"{len(self.ranks):,} ranks, groups of {record.size:,} along {axes_text(record.axes)}"
        if rank not in self.ranks:
            groups += f"; rank {rank} does not take part"
        elif group := self.group_of(mesh, rank):
            groups += f": {ranks_text(mask_of(group))}"
        what = WHAT.get(record.op, "an operation of torch's own")
        return Text.assemble(what, (f"\n{sizes}\n{groups}", "dim"))

    def group_of(self, mesh: Mesh, rank: int) -> frozenset[int]:
        """Return the ranks of a rank's group; empty if the axes do not determine it."""
        axes = self.record.axes
        if not axes or rank not in self.ranks or rank not in mesh or not set(axes) <= set(mesh.axes):
            return frozenset()
        return frozenset(mesh.group_of(rank, *axes))


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        has_run: Whether the dump has a step at all.
        collectives: Its collectives, in the order in which they began.
        received: By axes: the bytes that the busiest rank took in along them; an axis without collectives has none.
        pipeline: The schedule of a pipeline's ranks in time; None if none ran.
        undrawn: Why a schedule that is there cannot be laid out; empty if it can.
    """

    has_run: bool
    collectives: tuple[Collective, ...] = ()
    received: tuple[tuple[tuple[str, ...], int], ...] = ()
    pipeline: Timeline | None = None
    undrawn: str = ""

    @property
    def why_empty(self) -> str:
        """Says in one line why nothing is shown, and what to do; empty if something is shown."""
        if not self.has_run:
            return "? no step was captured: only a probe with a batch() runs a step"
        if not self.collectives and self.pipeline is None:
            return "a step ran, and no rank sent anything to another rank"
        return ""


def step_of(dump: Dump) -> Step:
    """Return the step of a dump."""
    ranks = dump.files.ranks.values()
    has_run = bool(dump.at("step")) or any(rank.collectives or rank.schedule for rank in ranks)
    pipeline, undrawn = None, ""
    try:
        pipeline = timeline_of(dump)
    except ShardvizError as error:
        undrawn = f"{error.message}: {error.hint}"
    unused = {(axis,): 0 for axis in dump.files.mesh.axes if dump.files.run.mesh}
    received_along = tuple((unused | received_by_axes(dump)).items())
    return Step(has_run, tuple(_collectives(dump)), received_along, pipeline, undrawn)


def _collectives(dump: Dump) -> list[Collective]:
    records = [(item.record.module, (structs.replace(item.record, module=""), item.ranks)) for item in traffic(dump)]
    began = {item: at for at, item in reversed([*enumerate(records)])}
    folds = fold(sorted(records, key=lambda item: natural_key(item[0])))
    folds.sort(key=lambda item: min(began[name, item[1]] for name in item[0].names()))
    return [Collective(record, modules, ranks) for modules, (record, ranks) in folds]


def moments(dump: Dump, collective: Collective) -> list[Moment]:
    """Return ranks' numbers before and after, if its module kept both, as a collective probe's do, group by group."""
    name = collective.modules.names()[0]
    if any(dump.find("step", "activation", module) is None for module in (name + BEFORE, name)):
        return []
    axes, mesh, ranks = collective.record.axes, dump.files.mesh, list(collective.ranks)
    if axes and set(axes) <= set(mesh.axes):
        ranks = [rank for group in mesh.groups(*axes) for rank in group if rank in set(collective.ranks)]
    return [(rank, _numbers(dump, name + BEFORE, rank), _numbers(dump, name, rank)) for rank in ranks]


def _numbers(dump: Dump, name: str, rank: int) -> tuple[float, ...] | None:
    tensor = dump.find("step", "activation", name)
    if tensor is None or rank not in tensor.shards:
        return None
    try:
        return tuple(dump.values(tensor.shards[rank], name).ravel().tolist())
    except ShardvizError:
        return None


def moment_line(moment: Moment, width: int) -> Text:
    """Write a rank's numbers before and after, with so many columns for those before."""
    rank, before, after = moment
    return Text.assemble(
        (f"rank {rank:<3} ", "bold"),
        numbers_text(before).ljust(width),
        ("  →  ", "dim"),
        (numbers_text(after), "bold"),
        no_wrap=True,
    )


def numbers_text(numbers: tuple[float, ...] | None) -> str:
    """Write a rank's first numbers."""
    if not numbers:
        return "(not kept)" if numbers is None else "(undefined)"
    more = " …" if len(numbers) > MOST_NUMBERS else ""
    return " ".join(f"{number:g}" for number in numbers[:MOST_NUMBERS]) + more


@dataclass(frozen=True)
class Modules:
    """The calls of a step, some of them open.

    Attributes:
        opened: Those that are open, by module and number.
        heats: What ranks have at the first wrong place, beside what is due.
    """

    tree: StepTree
    opened: frozenset[tuple[str, int]]
    heats: tuple[StepHeat, ...] = field(default=(), repr=False)

    @cached_property
    def lines(self) -> list[Node]:
        """The calls that are seen."""
        return self.tree.lines(self.opened)

    @property
    def first(self) -> int:
        """The line of the first wrong call; 0 if there is none."""
        return next((at for at, node in enumerate(self.lines) if node.is_first), 0)

    def toggled(self, at: int) -> Modules:
        """Return the calls with the one of a line opened, or closed if it was open."""
        return replace(self, opened=self.opened ^ {key_of(self.lines[at])})

    def line(self, at: int) -> Text:
        """Write a line."""
        node = self.lines[at]
        return node_line(node, UNICODE, is_open=key_of(node) in self.opened)

    def card(self, at: int) -> Text:
        """Write what is known of the call of a line: its sides, and its numbers if it is the first wrong one."""
        node = self.lines[at]
        rows = [(f"{SHORT[side]:<9} {printable(side_text(node, side))}", node.call.is_bad(side)) for side in SIDES]
        parts = [Text(row, BAD if is_bad else "") for row, is_bad in rows]
        for heat in self.heats if node.is_first else ():
            parts += [Text(""), *heat_lines(heat, UNICODE)]
        return Text("\n").join(parts)


def modules_of(document: Document) -> Modules:
    """Return the modules of a document's step, those around the first wrong one open."""
    tree = step_tree(document.dump, document.findings)
    heats = tuple(step_heats(document.dump)) if tree.finding is not None else ()
    return Modules(tree, tree.opened, heats)
