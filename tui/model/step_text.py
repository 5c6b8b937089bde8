"""Texts of the step's screen: collectives, numbers before and after, passes, and the calls of modules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rich.text import Text

from shardviz.dump.costs.timeline import duration
from shardviz.picture.model.holders import mask_of, ranks_text
from shardviz.picture.model.step_heat import step_heats
from shardviz.picture.model.step_tree import SHORT, SIDES, StepTree, key_of, step_tree
from shardviz.picture.text.step_tree import heat_lines, node_line, side_text
from shardviz.picture.text.terminal import BAD, UNICODE
from shardviz.text import bytes_text, printable

from .collectives import WHAT, axes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.dump.records.step import StageRecord
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.step_heat import StepHeat
    from shardviz.picture.model.step_tree import Node

    from .collectives import Collective, Moment, Step
    from .document import Document


MOST_NUMBERS = 32
"""Numbers of a rank that a line shows."""

MOST_LOOKED_AT = 64
"""Ranks whose numbers are looked at for the width of a column."""


def why_empty(step: Step) -> str:
    """Say in one line why nothing is shown, and what to do; empty where something is shown."""
    if not step.has_run:
        return "? no step was captured: only a probe with a batch() runs a step"
    if not step.collectives and step.pipeline is None:
        return "a step ran, and no rank sent anything to another rank"
    return ""


def head_text(width: int) -> str:
    """Write the heading of the list, with so many columns for the axes."""
    return f"  {'collective':<15} {'axis':<{width}} {'count':>6} {'bytes':>8} {'received':>8}  module"


def axes_width(step: Step) -> int:
    """Return the columns that the axes of a step's collectives take."""
    return max((len(axes_text(collective.record.axes)) for collective in step.collectives), default=4)


def axis_shares(step: Step) -> list[tuple[str, str, float]]:
    """Return for each axis its name and bytes, in columns, and their share of the busiest axis's."""
    names, sizes = [axes_text(axes) for axes, _ in step.received], [bytes_text(count) for _, count in step.received]
    wide = max(map(len, names), default=0), max(map(len, sizes), default=0)
    most = max((count for _, count in step.received), default=0)
    return [
        (f"{name:<{wide[0]}}", f"{size:>{wide[1]}}", count / max(most, 1))
        for name, size, (_, count) in zip(names, sizes, step.received, strict=True)
    ]


def collective_line(collective: Collective, width: int) -> Text:
    """Write one line of the list."""
    record = collective.record
    numbers = f"{collective.count:>6,} {bytes_text(collective.bytes):>8} {bytes_text(collective.received):>8}"
    return Text.assemble(
        {"backward": "← ", "forward": "→ "}.get(record.when, "· "),
        (f"{printable(record.op):<15} ", "bold"),
        f"{axes_text(record.axes):<{width}} {numbers}",
        (f"  {printable(str(collective.modules)) or '-'}", "dim"),
        no_wrap=True,
    )


def collective_title(collective: Collective) -> str:
    """Write the name of a collective, and where it ran."""
    module = printable(str(collective.modules))
    when = "outside of modules" if collective.record.outside else collective.record.when
    return f"{printable(collective.record.op)}{f' in {module}' if module else ''}, {when}"


def collective_text(collective: Collective, mesh: Mesh, rank: int) -> Text:
    """Write the effect of a collective, its bytes and its groups."""
    text = Text(WHAT.get(collective.record.op, "an operation of torch's own"))
    each = collective.bytes // max(collective.count, 1)
    times = f"{collective.count:,} × " if collective.count > 1 else ""
    text.append(f"\n{times}{each:,} byte{'' if each == 1 else 's'}; each rank receives {collective.received:,}", "dim")
    return text.append(f"\n{_groups(collective, mesh, rank)}", "dim")


def _groups(collective: Collective, mesh: Mesh, rank: int) -> str:
    """Say how many ranks took part, in groups of how many, and which are the chosen rank's."""
    record = collective.record
    text = f"{len(collective.ranks):,} ranks, groups of {record.size:,} along {axes_text(record.axes)}"
    if rank not in collective.ranks:
        return f"{text}; rank {rank} does not take part"
    group = group_of(collective, mesh, rank)
    return f"{text}: {ranks_text(mask_of(group))}" if group else text


def group_of(collective: Collective, mesh: Mesh, rank: int) -> frozenset[int]:
    """Return the ranks of a rank's group; empty where the axes do not determine it."""
    axes = collective.record.axes
    if not axes or rank not in collective.ranks or rank not in mesh or not set(axes) <= set(mesh.axes):
        return frozenset()
    return frozenset(mesh.group_of(rank, *axes))


def before_width(moments: Sequence[Moment]) -> int:
    """Return the columns that the numbers before a collective take."""
    return max((len(_numbers_text(moment.before)) for moment in moments[:MOST_LOOKED_AT]), default=0)


def moment_line(moment: Moment, width: int) -> Text:
    """Write a rank's numbers before and after."""
    return Text.assemble(
        (f"rank {moment.rank:<3} ", "bold"),
        _numbers_text(moment.before).ljust(width),
        ("  →  ", "dim"),
        (_numbers_text(moment.after), "bold"),
        no_wrap=True,
    )


def _numbers_text(numbers: tuple[float, ...] | None) -> str:
    if numbers is None:
        return "(not kept)"
    if not numbers:
        return "(undefined)"
    more = " …" if len(numbers) > MOST_NUMBERS else ""
    return " ".join(f"{number:g}" for number in numbers[:MOST_NUMBERS]) + more


def pipeline_text(step: Step) -> str:
    """Write the title of a schedule: its sizes, and the bubble beside the closed formula."""
    times = step.pipeline
    if times is None:
        return "Pipeline"
    stages = f" × {times.stages_per_rank} stages" if times.stages_per_rank > 1 else ""
    return (
        f"Pipeline of {len(times.begins)} ranks{stages}, {times.num_microbatches} micro-batches: "
        f"idle {times.bubble:.1%}, by the formula {times.formula:.1%}"
    )


def pass_text(rank: int, record: StageRecord, begin: int) -> str:
    """Describe one pass."""
    way = "backward" if record.backward else "forward"
    end = begin + duration(record)
    return f"rank {rank}  stage {record.stage}, micro-batch {record.microbatch} {way}, from {begin} to {end}"


@dataclass(frozen=True)
class Modules:
    """The calls of a step, some of them open.

    Attributes:
        tree: The calls.
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
        """The line of the first wrong call; 0 where there is none."""
        return next((at for at, node in enumerate(self.lines) if node.is_first), 0)

    def toggled(self, at: int) -> Modules:
        """Return the calls with the one of a line opened, or closed if it was open."""
        key = key_of(self.lines[at])
        return replace(self, opened=self.opened ^ {key})

    def line(self, at: int) -> Text:
        """Write a line."""
        node = self.lines[at]
        return node_line(node, UNICODE, is_open=key_of(node) in self.opened)

    def card(self, at: int) -> Text:
        """Write what is known of the call of a line: its sides, and its numbers where it is the first wrong one."""
        node = self.lines[at]
        rows = [f"{SHORT[side]:<9} {printable(side_text(node, side))}" for side in SIDES]
        parts = [Text(row, BAD if node.call.is_bad(side) else "") for row, side in zip(rows, SIDES, strict=True)]
        for heat in self.heats if node.is_first else ():
            parts += [Text(""), *heat_lines(heat, UNICODE)]
        return Text("\n").join(parts)


def modules_of(document: Document) -> Modules:
    """Return the modules of a document's step, those around the first wrong one open."""
    tree = step_tree(document.dump, document.findings)
    heats = tuple(step_heats(document.dump)) if tree.finding is not None else ()
    return Modules(tree, tree.opened, heats)
