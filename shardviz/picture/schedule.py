"""A pipeline's schedule as a picture: a line a rank, a column a forward pass, and the bubble between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.terminal import DIM, PIPE_WIDTH, line, rank_style
from shardviz.timeline import duration, timeline

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.dump.records import StageRecord
    from shardviz.dump.tensors import Model
    from shardviz.timeline import Timeline

LABEL = 9

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""A rank's first stage, its second, ...: small letters run forward, capitals backward."""


def schedule_lines(model: Model, columns: int = PIPE_WIDTH) -> list[Text]:
    """Return the picture of the pipeline that the lowest rank is in, and its bubble beside the closed formula.

    Args:
        model: The dump.
        columns: How wide the picture may be; a long schedule is wider.
    """
    schedules = _one_pipeline(model)
    if not schedules:
        return [line("no pipeline ran in a step")]
    times = timeline(schedules)
    width = 1 + len(str(times.num_microbatches - 1))
    width += LABEL + times.length * (width + 1) <= columns
    lines = [_row(rank, times, width) for rank in schedules]
    ranks, micro, per_rank = len(schedules), times.num_microbatches, times.stages_per_rank
    product = f"{per_rank} * {micro}" if per_rank > 1 else str(micro)
    second = ", b3 its second stage's" if per_rank > 1 else ""
    return [
        *lines,
        line(""),
        line((f"a3 is forward of micro-batch 3{second}, A3 its backward, which takes twice as long", DIM)),
        line(
            f"bubble {times.bubble:.1%} of the time; formula (p - 1) / (v m + p - 1) = {ranks - 1} / ({product} + "
            f"{ranks - 1}) = {times.formula:.1%}"
        ),
    ]


def _one_pipeline(model: Model) -> dict[int, tuple[StageRecord, ...]]:
    """Return the schedules of the ranks of one pipeline: for every set of stages the lowest rank that ran them."""
    found: dict[frozenset[int], int] = {}
    for rank, record in sorted(model.dump.ranks.items()):
        if record.schedule:
            found.setdefault(frozenset(one.stage for one in record.schedule), rank)
    return {rank: model.dump.ranks[rank].schedule for rank in sorted(found.values())}


def _row(rank: int, times: Timeline, width: int) -> Text:
    passes = times.begins[rank]
    stages = sorted({record.stage for record, _ in passes})
    row, at = line(f"rank {rank:<{LABEL - 5}}"), 0
    for record, begin in passes:
        letter = LETTERS[stages.index(record.stage) % len(LETTERS)]
        cell = f"{letter.upper() if record.backward else letter}{record.microbatch}"
        lasts = duration(record) * width
        gap = int(lasts > len(cell))
        row = line(row, ("·".ljust(width) * (begin - at), DIM))
        row = line(row, (cell.ljust(lasts - gap, "=" if record.backward else " "), rank_style(rank)), " " * gap)
        at = begin + duration(record)
    return line(row, ("·".ljust(width) * (times.length - at), DIM))
