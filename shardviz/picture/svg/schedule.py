"""A pipeline's schedule as SVG: one line per rank, to scale in time; gaps are the bubble."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.costs.timeline import duration, timeline_of
from shardviz.picture.markup import element, words
from shardviz.picture.model.palette import rank_color
from shardviz.picture.svg.tile import CHAR, canvas, classes_of
from shardviz.picture.text.step import bubble_text, legend

if TYPE_CHECKING:
    from shardviz.dump.costs.timeline import Timeline
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Mesh

ROW = 26
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
    return _svg(times, dump.files.mesh), f"{legend(times)}; {bubble_text(times)}"


def _svg(times: Timeline, mesh: Mesh) -> str:
    unit = round((2 + len(str(times.num_microbatches - 1))) * CHAR)
    width, height = GUTTER + unit * times.length + 1, ROW * len(times.begins) + 1
    rows = (
        element("g", _row(rank, times, unit, mesh), transform=f"translate(0 {at * ROW})")
        for at, rank in enumerate(times.begins)
    )
    label = f"schedule of ranks {', '.join(map(str, times.begins))}: {bubble_text(times)}"
    return canvas(label, width, height, element("title", "schedule"), *rows, is_alone=False)


def _row(rank: int, times: Timeline, unit: int, mesh: Mesh) -> str:
    idle = {"x": GUTTER, "y": 1, "width": unit * times.length, "height": ROW - 2, "rx": 2}
    parts = [
        element("text", words(f"rank {rank}"), x=GUTTER - 10, y=17, class_="sv-i sv-end"),
        element("rect", **idle, class_="sv-idle"),
    ]
    color = rank_color(rank, mesh)
    for record, begin in times.begins[rank]:
        x, wide = GUTTER + begin * unit, duration(record) * unit
        box = {"x": x + 1, "y": 1, "width": wide - 1, "height": ROW - 2, "rx": 2}
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
