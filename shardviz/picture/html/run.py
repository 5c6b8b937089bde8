"""Sections of a run's page: memory, communication, schedule, a step's modules and lines; a page for two jobs' steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardviz.dump.costs import (
    duration,
    groups_text,
    memory_table,
    received_by_axes,
    received_bytes,
    timeline_of,
    traffic,
    why_no_traffic,
)
from shardviz.errors import ShardvizError
from shardviz.layout.mesh import ranks_by
from shardviz.picture.html.parts import (
    bar,
    bytes_cell,
    header_of,
    page_of,
    ranks_cell,
    scrolled,
    section,
    style_sheet,
    table,
    top_bar,
    with_code,
)
from shardviz.picture.markup import element, words
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.model.palette import rank_color
from shardviz.picture.model.step import SHORT, SIDES, step_of
from shardviz.picture.svg.map import CHAR, canvas, classes_of
from shardviz.picture.text.difference import agreement
from shardviz.picture.text.step import bubble_text, legend, side_text
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import bytes_text, counted, fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardviz.check.report import NotChecked
    from shardviz.check.step.departure import Departure, StepDifference
    from shardviz.check.step.lines.types import Row, Table
    from shardviz.dump.costs import MemoryTable, TensorMemory, Timeline, Traffic
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.step import Node, StepHeat, StepTree

MOST_ROWS = 60
"""Lines of any table."""

COLUMNS = 100
"""Characters of a line of a plan's text."""


def plan_section(dump: Dump) -> str:
    """Write what a plan says, as `shardviz plan` prints it; nothing if ranks were run."""
    from shardviz.picture.text.plans import said_lines

    if dump.files.planned is None:
        return ""
    text = "\n".join(words(said.plain) for said in said_lines(dump.files.planned, COLUMNS))
    return section("plan", "Plan", element("figure", element("pre", text), tabindex=0))


def memory_section(dump: Dump) -> str:
    """Write the memory of each rank, by role and tensor, next to data parallel's schemes."""
    memory = memory_table(dump)
    if not memory.uses:
        return section("memory", "Memory", element("p", "The dump has no tensors that take memory."))
    is_plan = dump.files.planned is not None
    parts = [element("p", "What lasts; what a step adds is under Plan.", class_="soft")] if is_plan else []
    parts.append(_ranks(memory))
    if {"grad", "optim"} <= set(memory.roles):
        parts.append(_schemes(memory, dump.files.run.num_ranks))
    return section("memory", "Memory", *parts, _tensors(memory.uses))


def _ranks(memory: MemoryTable) -> str:
    """Write a line with a bar for each set of ranks that take the same."""
    groups = ranks_by(memory.by_rank.items())
    most = max(map(sum, groups))
    rows = [
        [
            f"rank{'s' * (len(ranks) > 1)} {ranks_cell(ranks)}",
            *map(bytes_cell, sizes),
            bytes_cell(sum(sizes)),
            bar(_parts(memory.roles, sizes), most),
        ]
        for sizes, ranks in list(groups.items())[:MOST_ROWS]
    ]
    total = ["unsharded", *map(bytes_cell, memory.wholes), bytes_cell(sum(memory.wholes)), ""]
    keys = [element("span", class_=f"key {role}", aria_hidden="true") + words(role) for role in memory.roles]
    written = table(["On", *keys, "together", ""], rows, "Bytes per rank by role", total=total)
    return written + _more_text(len(groups), "shardviz show --memory --all")


def _parts(roles: Sequence[str], sizes: Sequence[int]) -> Iterable[tuple[str, int, str]]:
    return ((role, size, f"{role}: {size:,} bytes") for role, size in zip(roles, sizes, strict=True))


def _schemes(memory: MemoryTable, num_ranks: int) -> str:
    """Write the memory that DDP and ZeRO would need with Adam, next to the fullest rank's."""
    most = max(one.bytes for one in memory.schemes)
    colors = [*["scheme"] * (len(memory.schemes) - 1), "this"]
    rows = [
        [one.name, words(one.formula), bytes_cell(one.bytes), bar([(color, one.bytes, "")], most)]
        for one, color in zip(memory.schemes, colors, strict=True)
    ]
    size = f"P = {bytes_text(memory.params)} over N = {counted(num_ranks, 'rank')}"
    about = f"Parameters, gradients and Adam per rank, for {size}"
    heads = ("Scheme", "Formula", "Per rank", "")
    return element("h3", words(about)) + table(heads, rows, "Schemes of data parallel", left=2)


def _tensors(uses: Sequence[TensorMemory]) -> str:
    """Write the largest tensors first, identical layers together."""
    folded = fold((use.name, (use.role, min(use.bytes.values()), max(use.bytes.values()), use.whole)) for use in uses)
    rows = []
    for names, (role, least, most, whole) in folded[:MOST_ROWS]:
        per_rank = bytes_cell(most) if least == most else f"{bytes_cell(least)} to {bytes_cell(most)}"
        count = f" (each of {len(names):,} tensors)" if len(names) > 1 else ""
        rows.append([words(f"{names}{count}"), words(role), per_rank, bytes_cell(whole)])
    written = table(("Tensor", "Role", "Per rank", "Unsharded"), rows, "Bytes by tensor", left=2)
    closed = element("details", element("summary", "By tensor"), written)
    return closed + _more_text(len(folded), "shardviz show --memory --all")


def comms_section(dump: Dump) -> str:
    """Write the collectives of a step, axis by axis."""
    collectives = traffic(dump)
    if not collectives:
        return section("comms", "Communication", element("p", why_no_traffic(dump)))
    by_axes = received_by_axes(dump)
    rows = [
        [words(groups_text(axes)), bytes_cell(most), bar([("this", most, "")], max(by_axes.values()))]
        for axes, most in by_axes.items()
    ]
    received_by = table(("Group", "A rank receives up to", ""), rows, "Bytes received by axis")
    in_order = [one for axes in by_axes for one in collectives if one.record.axes == axes]
    return section("comms", "Communication", received_by, _collectives(in_order))


def _collectives(collectives: Sequence[Traffic]) -> str:
    """Write the collectives, one line for those of identical layers."""
    heads = ("Collective", "Group", "Module", "Pass", "Times", "Bytes", "Received", "Group of", "On ranks")
    folded = fold((one.record.module or "-", (replace(one.record, module=""), len(one.ranks))) for one in collectives)
    rows = []
    for modules, (record, num_ranks) in folded[:MOST_ROWS]:
        where = groups_text(record.axes)
        sizes = bytes_cell(record.bytes), bytes_cell(received_bytes(record))
        texts = (words(text) for text in (record.op, where, modules, record.when, f"{record.count:,}"))
        rows.append([*texts, *sizes, f"{record.size:,}", f"{num_ranks:,}"])
    return table(heads, rows, "Collectives of a step", left=4) + _more_text(len(folded), "shardviz show --comms")


def schedule_section(dump: Dump) -> str:
    """Draw the schedule of a pipeline; nothing if there is none."""
    try:
        drawn = schedule_drawing(dump)
    except ShardvizError as error:
        return section("schedule", "Schedule", element("p", words(error.message)))
    if drawn is None:
        return ""
    picture, caption = drawn
    return section("schedule", "Schedule", element("p", words(caption)), element("figure", picture, tabindex=0))


def _more_text(count: int, command: str) -> str:
    return element("p", f"{count - MOST_ROWS:,} more lines: {command} prints them") if count > MOST_ROWS else ""


ROW_HEIGHT = 26
GUTTER = 72
MOST_PASSES = 4096
"""Passes that are drawn at most; a longer schedule is printed as text."""


def schedule_drawing(dump: Dump) -> tuple[str, str] | None:
    """Draw the pipeline that the lowest rank is in.

    Returns:
        The `svg` element, empty if the schedule is too long, and the bubble in words; None without a pipeline.

    Raises:
        ShardvizError: Some pass waits for one that no rank ran before.
    """
    times = timeline_of(dump)
    if times is None:
        return None
    if sum(map(len, times.begins.values())) > MOST_PASSES:
        return "", f"{bubble_text(times)}; too long to draw here: shardviz show --schedule prints it"
    return _schedule_svg(times, dump.files.mesh), f"{legend(times)}; {bubble_text(times)}"


def _schedule_svg(times: Timeline, mesh: Mesh) -> str:
    unit = round((2 + len(str(times.num_microbatches - 1))) * CHAR)
    width, height = GUTTER + unit * times.length + 1, ROW_HEIGHT * len(times.begins) + 1
    rows = (
        element("g", _schedule_row(rank, times, unit, mesh), transform=f"translate(0 {at * ROW_HEIGHT})")
        for at, rank in enumerate(times.begins)
    )
    label = f"schedule of ranks {', '.join(map(str, times.begins))}: {bubble_text(times)}"
    return canvas(label, width, height, element("title", "schedule"), *rows, is_alone=False)


def _schedule_row(rank: int, times: Timeline, unit: int, mesh: Mesh) -> str:
    idle = {"x": GUTTER, "y": 1, "width": unit * times.length, "height": ROW_HEIGHT - 2, "rx": 2}
    parts = [
        element("text", words(f"rank {rank}"), x=GUTTER - 10, y=17, class_="sv-i sv-end"),
        element("rect", **idle, class_="sv-idle"),
    ]
    color = rank_color(rank, mesh)
    for record, begin in times.begins[rank]:
        x, wide = GUTTER + begin * unit, duration(record) * unit
        box = {"x": x + 1, "y": 1, "width": wide - 1, "height": ROW_HEIGHT - 2, "rx": 2}
        way = "backward" if record.backward else "forward"
        tooltip = f"rank {rank}, stage {record.stage}: {way} of micro-batch {record.microbatch}, from {begin}"
        parts.append(
            element(
                "g",
                element("title", words(tooltip)),
                element("rect", **box, class_=f"sv-b sv-f{color}"),
                element("rect", **box, class_="sv-back") if record.backward else "",
                element("text", words(times.label(rank, record)), x=x + wide // 2, y=17, class_=f"sv-l sv-t{color}"),
                class_=classes_of((rank,)),
            )
        )
    return "".join(parts)


LEVELS = 9

MOST_CALLS = 400
"""Calls that have a line on the page; of a larger step, those around the first wrong one."""

HEADS = ("line", "source", "call", "type", "each rank has", "gradient")


def modules_section(tree: StepTree, heats: Sequence[StepHeat]) -> str:
    """Write the calls of a step's modules; nothing if it was not followed."""
    if not tree.num_calls:
        return ""
    about = (
        f"{counted(tree.num_calls, 'call')} of modules in the order in which they ran, compared with {tree.reference}'s"
    )
    whole = tree.num_calls <= MOST_CALLS
    nodes = "".join(_node(root, tree.reference, is_whole=whole) for root in tree.roots)
    return section(
        "modules",
        "Step by module",
        element("p", words(about), class_="soft"),
        *(_heat(heat, tree.reference) for heat in heats),
        element("ul", nodes),
    )


def _node(node: Node, reference: str, *, is_whole: bool) -> str:
    line = _line(node, reference)
    leads_to_wrong = node.has_first or node.wrong_inside > 0
    if not node.children or not (is_whole or leads_to_wrong):
        return element("li", line)
    inner = element("ul", "".join(_node(child, reference, is_whole=is_whole) for child in node.children))
    is_open = "" if leads_to_wrong or not node.call.module else None
    return element("li", element("details", element("summary", line), inner, open=is_open))


def _line(node: Node, reference: str) -> str:
    glyph = UNICODE.of(node.verdict) if node.verdict != "unknown" else UNICODE.unknown
    name = element("strong" if node.is_first else "span", words(node.name))
    sides = "; ".join(f"{SHORT[side]}: {side_text(node, side, reference)}" for side in SIDES if node.state(side))
    first = element("strong", " first wrong module", class_="wrong") if node.is_first else ""
    wrong = f" {UNICODE.error} {', '.join(node.wrong)}" if node.wrong else ""
    first += element("strong", words(wrong), class_="wrong") if wrong else ""
    kind = element("span", words(f" {node.call.type}"), class_="soft")
    detail = element("span", words(f" {sides}"), class_="soft") if node.verdict == "error" else ""
    return f"{glyph} {name}{kind}{first}{detail}"


def _heat(heat: StepHeat, reference: str) -> str:
    title = f"{ranks_in_words(heat.ranks, 40)}, {list(heat.shape)} of {heat.layout}"
    heads = (("has", "has"), ("due", reference.removeprefix("the ")), ("off", "difference"))
    fields = "".join(
        element("td", _field(heat.levels(name, LEVELS), wrong=name == "off"), class_="heat") for name, _ in heads
    )
    titles = "".join(element("th", words(head), scope="col") for _, head in heads)
    scale = f"largest {heat.most:.4g}; largest difference {heat.farthest:.4g} (rounding allows {heat.allowed:.4g})"
    caption = element("caption", words(f"{title}: {scale}"))
    table = element("table", caption, element("tr", titles), element("tr", fields), class_="exhibit")
    return scrolled(table, title)


def _field(rows: list[list[int]], *, wrong: bool) -> str:
    """Draw a field: darker cells are larger, and each says its level to who cannot see it."""
    color = "213,94,0" if wrong else "0,114,178"
    cells = []
    for row in rows:
        for at in row:
            style = f"display:inline-block;width:.6em;height:.9em;background:rgba({color},{at / (LEVELS - 1):.2f})"
            cells.append(element("span", style=style))
        cells.append("<br>")
    least, most = min(map(min, rows)), max(map(max, rows))
    label = f"{len(rows)} by {len(rows[0])} blocks, from {least} to {most} of {LEVELS - 1}"
    return element("div", *cells, role="img", aria_label=label)


def lines_section(table: Table | None) -> str:
    """Write the lines of the module that ranks looked into; nothing if they looked into none."""
    if table is None or not table.rows:
        return ""
    heads = element("tr", "".join(element("th", words(head), scope="col") for head in HEADS))
    body = element("table", heads, *map(_line_row, table.rows), class_="exhibit")
    return section("lines", words(f"Lines of {table.module or 'the model'}"), scrolled(body, "lines"))


def _line_row(row: Row) -> str:
    cells = (row.place, row.source, row.function, row.types_text, row.held, row.gradient)
    line = (
        element("strong", words(f"{row.place} first wrong line"), class_="wrong") if row.is_wrong else words(row.place)
    )
    source = element("code", words(row.source))
    return element("tr", *(element("td", text) for text in (line, source, *map(words, cells[2:]))))


TITLES = {"differences": "Differences", "modules": "Step by module", "left": "Not compared"}


def difference_html(title: str, step: StepDifference) -> str:
    """Write the page of two jobs' steps."""
    tree, heats = step_of(step)
    parts = {
        "differences": section("differences", "Differences", *map(_departure, step.departures)) * bool(step.departures),
        "modules": modules_section(tree, heats) if tree is not None else "",
        "left": _uncompared_text(step.not_compared),
    }
    ranks = step.sides.evidence.dump.files.mesh.ranks if step.sides is not None else ()
    return page_of(
        title,
        style_sheet(ranks),
        element("a", "Skip to the differences", href="#differences", class_="skip"),
        _header(title, step),
        top_bar({anchor: TITLES[anchor] for anchor, part in parts.items() if part}, ""),
        element("main", *parts.values()),
    )


def _header(title: str, step: StepDifference) -> str:
    count = f"{counted(len(step.departures), 'difference')} of the step" if step.departures else "the steps agree"
    glyph = UNICODE.differs if step else UNICODE.good
    known = element("p", words(agreement(step)), class_="soft") if step.num_compared else ""
    return header_of(title, "bad" if step else "good", f"{glyph} {count}", known)


def _departure(departure: Departure) -> str:
    facts = {"differs": departure.sentence, "why": departure.why, "look": departure.look}
    if departure.following > 0:
        facts["follows"] = f"{counted(departure.following, 'call')} of other modules differ too"
    rows = (element("dt", title) + element("dd", with_code(text)) for title, text in facts.items() if text)
    return element("h3", words(departure.module or "the model itself")) + element("dl", *rows)


def _uncompared_text(not_compared: Sequence[NotChecked]) -> str:
    lines = (element("li", words(f"{one.tensor}: {one.why}" if one.tensor else one.why)) for one in not_compared)
    return section("left", "Not compared", element("ul", *lines)) if not_compared else ""
