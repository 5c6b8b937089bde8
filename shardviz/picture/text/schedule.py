"""A pipeline's schedule as a picture: one line per rank, one column per forward pass, and the bubble."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.costs.timeline import duration, timeline_of
from shardviz.picture.model.palette import Coloring, rank_style
from shardviz.picture.text.terminal import DIM, PIPE_WIDTH, line

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.dump.costs.timeline import Timeline
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Mesh

LABEL = 9


def schedule_lines(dump: Dump, columns: int = PIPE_WIDTH) -> list[Text]:
    """Return the picture of the pipeline that the lowest rank is in, and its bubble beside the closed formula.

    Args:
        dump: The dump.
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
