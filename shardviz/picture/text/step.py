"""A step as text: its calls in order, the first wrong one open; and a pipeline's schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.costs import duration, timeline_of
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.model.palette import Coloring, rank_style
from shardviz.picture.model.step import IN_WORDS, SHORT, SIDES, UNSHARDED, key_of
from shardviz.picture.text.terminal import ASCII, BAD, DIM, GOOD, PIPE_WIDTH, WARNING, line, wrapped
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.check.step.lines.types import Row, Table
    from shardviz.dump.costs import Timeline
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.step import Node, StepHeat, StepTree
    from shardviz.picture.text.terminal import Glyphs, Terminal


LEVELS, IN_ASCII = " ·░▒▓█", " .:+#@"

STYLES = {"good": GOOD, "error": BAD, "unknown": DIM}

MARKS = {"right": "good", "pending": "+", "moved": "~", "repeated": "differs", "odd": "error", "cut": "|", "none": "0"}
"""A side's state in one character, or the name of the glyph that it is."""

MOST_LINES = 200
MOST_RANKS = 24
NONE = (
    "the step was not followed through its modules: that of a probe with a batch() is, without --trace off; "
    "`shardviz diff` compares the traces of two jobs"
)

INDENT = 6


def step_lines(tree: StepTree, heats: Sequence[StepHeat], terminal: Terminal) -> list[Text]:
    """Return the tree, what is wrong first, and its numbers."""
    if not tree.num_calls:
        return [line((f"{terminal.glyphs.unknown} {NONE}", WARNING))]
    lines = tree_lines(tree, terminal)
    if tree.finding is not None:
        head = line("", (f"{terminal.glyphs.error} ", BAD))
        lines += [line(""), *wrapped(printable(tree.finding.summary), terminal.width, head, 2)]
        lines += wrapped(printable(tree.finding.cause), terminal.width, line(("  cause  ", DIM)), 9)
    for heat in heats:
        lines += [line(""), *heat_lines(heat, terminal.glyphs, tree.reference)]
    return lines


def module_lines(tree: StepTree, module: str, terminal: Terminal) -> list[Text]:
    """Return the calls of one module, with all that are made in them."""
    within = tree.within(module)
    return tree_lines(within, terminal, within.keys)


def tree_lines(tree: StepTree, terminal: Terminal, opened: frozenset[tuple[str, int]] | None = None) -> list[Text]:
    """Return the calls, by default with those around the first wrong one open."""
    about = f"{counted(tree.num_calls, 'call')} of modules, as they ran"
    columns = f"; four columns: {', '.join(SHORT[side] for side in SIDES)}"
    key = wrapped(_key(terminal.glyphs, tree.reference), terminal.width, line(""), 0)
    opened = tree.opened if opened is None else opened
    shown = tree.lines(opened)
    nodes = (node_line(node, terminal.glyphs, is_open=key_of(node) in opened) for node in shown[:MOST_LINES])
    lines = [line((about, "bold"), columns), *key, *nodes]
    if len(shown) > MOST_LINES:
        lines.append(line((f"{terminal.glyphs.more} {counted(len(shown) - MOST_LINES, 'more call')}", DIM)))
    return lines


def _key(glyphs: Glyphs, reference: str) -> str:
    signs = f"{glyphs.good} {reference}'s, + terms of a sum, ~ different order, {glyphs.differs} slices repeated"
    return f"{signs}, {glyphs.error} different, | cut from the graph, 0 no gradient, {glyphs.absent} not followed"


def node_line(node: Node, glyphs: Glyphs, *, is_open: bool) -> Text:
    """Write a call as a line: sides, name, class, folded calls, and its own wrong tensors."""
    sides = "".join(_mark(node, side, glyphs) for side in SIDES)
    is_closed = bool(node.children) and not is_open
    inside = f"  {glyphs.more} {counted(node.size, 'call')}" if is_closed else ""
    first = "  first wrong module" if node.is_first else ""
    hidden = [f"{counted(node.wrong_inside, 'tensor')} inside"] if is_closed and node.wrong_inside else []
    wrong = ", ".join([*map(printable, node.wrong), *hidden])
    name = (printable(node.name), BAD if node.is_first else "bold" if node.has_first else "")
    kind = (f"  {printable(node.call.type)}", DIM)
    marks = (f"{first}  {glyphs.error} {wrong}" if wrong else first, BAD)
    return line((f"{sides} ", STYLES[node.verdict]), "  " * node.depth, name, kind, (inside, DIM), marks)


def _mark(node: Node, side: str, glyphs: Glyphs) -> str:
    state = node.state(side)  # type: ignore[arg-type]
    mark = MARKS[state] if state is not None else "absent"
    return str(getattr(glyphs, mark, mark)) if len(mark) > 1 else mark


def side_text(node: Node, side: str, reference: str = UNSHARDED) -> str:
    """Say what ranks have at a side of a call, and how they share it."""
    state = node.state(side)  # type: ignore[arg-type]
    layout = node.layout(side)  # type: ignore[arg-type]
    return f"{IN_WORDS[state].format(reference)}  {layout}".rstrip() if state is not None else "not followed"


def heat_lines(heat: StepHeat, glyphs: Glyphs, reference: str = UNSHARDED) -> list[Text]:
    """Write actual, expected and difference next to each other, the largest values darkest."""
    levels = IN_ASCII if glyphs == ASCII else LEVELS
    fields = [
        ["".join(levels[at] for at in row) for row in heat.levels(field, len(levels))]
        for field in ("has", "due", "off")
    ]
    due = reference.removeprefix("the ")
    width = max(len(fields[0][0]), len(due))
    side = f"{heat.side} on " if heat.side else ""
    title = f"{side}{ranks_in_words(heat.ranks, MOST_RANKS)}, {list(heat.shape)} of {heat.layout}"
    heads = ("has", due, "difference")
    lines = [line((printable(title), "bold")), line((" ".join(f"{head:<{width + 1}}" for head in heads).rstrip(), DIM))]
    for row in zip(*fields, strict=True):
        cells = [f"{text:<{width + 1}} " for text in row]
        lines.append(line(*cells[:2], (cells[2], BAD if heat.is_wrong else "")))
    scale = f"darkest: {heat.most:.4g}; differences: {heat.farthest:.4g}; rounding allows {heat.allowed:.4g}"
    return [*lines, line((scale, DIM))]


def lines_lines(table: Table, terminal: Terminal) -> list[Text]:
    """Return each line once, with its calls below it."""
    name = table.module or "the model"
    about = f"{counted(len(table.rows), 'call')} inside of {name}, as they ran"
    lines = [line((printable(about), "bold"))]
    place = ""
    for row in table.rows:
        if row.place != place:
            place = row.place
            first = ("  first wrong line", BAD) if row.is_wrong else ("", "")
            lines.append(line((printable(place), BAD if row.is_wrong else "bold"), f"  {printable(row.source)}", first))
        lines += _call(row, terminal)
    return lines


def _call(row: Row, terminal: Terminal) -> list[Text]:
    only = " (sharded only)" if row.is_sharded_only else ""
    gradient = "" if row.gradient == "not compared" else f"; gradient: {row.gradient}"
    head = line(("    ", DIM), printable(row.function), (printable(only), DIM), "  ", (row.types_text, "bold"))
    return [head, *wrapped(printable(f"{row.held}{gradient}"), terminal.width, line(" " * INDENT), INDENT)]


LABEL = 9


def schedule_lines(dump: Dump, columns: int = PIPE_WIDTH) -> list[Text]:
    """Return the schedule of the lowest rank's pipeline, and its bubble next to the formula.

    Args:
        columns: How wide the picture may be; a long schedule is wider.
    """
    times = timeline_of(dump)
    if times is None:
        return [line("no pipeline ran in a step")]
    width = 1 + len(str(times.num_microbatches - 1))
    width += LABEL + times.length * (width + 1) <= columns
    rows = [_row(rank, times, width, dump.files.mesh) for rank in times.begins]
    return [*rows, line(""), line((legend(times), DIM)), line(bubble_text(times))]


def legend(times: Timeline) -> str:
    """Explain the letters and numbers of a schedule."""
    second = " (b3 on the rank's second stage)" if times.stages_per_rank > 1 else ""
    return f"a3 is the forward pass of micro-batch 3{second}, A3 its backward pass, which takes twice as long"


def bubble_text(times: Timeline) -> str:
    """Say how much of the time ranks are idle, beside the closed formula."""
    ranks, micro, per_rank = len(times.begins), times.num_microbatches, times.stages_per_rank
    product = f"{per_rank} * {micro}" if per_rank > 1 else str(micro)
    formula = f"formula (p - 1) / (v m + p - 1) = {ranks - 1} / ({product} + {ranks - 1}) = {times.formula:.1%}"
    return f"bubble {times.bubble:.1%} of the time; {formula}"


def _row(rank: int, times: Timeline, width: int, mesh: Mesh) -> Text:
    idle = "·".ljust(width)
    parts: list[str | tuple[str, str]] = [f"rank {rank:<{LABEL - 5}}"]
    at = 0
    for record, begin in times.begins[rank]:
        cell = times.label(rank, record)
        lasts = duration(record) * width
        gap = int(lasts > len(cell))
        shown = cell.ljust(lasts - gap, "=" if record.backward else " ")
        parts += [(idle * (begin - at), DIM), (shown, rank_style(rank, Coloring(mesh))), " " * gap]
        at = begin + duration(record)
    return line(*parts, (idle * (times.length - at), DIM))
