"""Pictures of a job beside a checkpoint: one tensor as SVG, or all of them as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.beside.job import Job
from shardviz.checkpoint.records import Checkpoint
from shardviz.errors import ShardvizError
from shardviz.text import counted, listed, nearest, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardviz.checkpoint.comparing.outcome import Comparison, Outcome

    Side = Job | Checkpoint

FORMATS = ("svg", "html")


def draw_beside(
    comparison: Comparison, sides: tuple[Side, Side], style: str, pattern: str | None, output: Path | None
) -> None:
    """Write a job beside a checkpoint as a picture.

    Args:
        comparison: What became of every tensor.
        sides: The two that were compared.
        style: The format.
        pattern: The tensor of an SVG; by default the only one that differs.
        output: The file; stdout without one.

    Raises:
        ShardvizError: An SVG is not of one tensor, or a page is, or a tensor cannot be drawn.
    """
    from shardviz.commands.common.dumps import write_markup
    from shardviz.picture.html.stored import beside_html
    from shardviz.picture.model.subjects.stored import beside, numbered
    from shardviz.picture.svg.stored import beside_svg

    job, checkpoint = sides if isinstance(sides[0], Job) else sides[::-1]
    assert isinstance(job, Job), "the caller has looked"
    assert isinstance(checkpoint, Checkpoint), "the caller has looked"
    if style == "html":
        if pattern is not None:
            raise ShardvizError(f"an HTML page shows all tensors, not only {pattern}", "leave it out, or use svg")
        write_markup(beside_html(comparison, job, checkpoint), output)
        return
    outcome = _only(comparison, pattern)
    write_markup(beside_svg(beside(outcome, job, checkpoint, numbered(checkpoint))), output)


def refuse_picture(kinds: str) -> None:
    """Refuse to draw what is not a job beside a checkpoint.

    Raises:
        ShardvizError: Always.
    """
    raise ShardvizError(
        f"a picture compares a job with a checkpoint, and these are two {kinds}",
        "`shardviz show ONE TENSOR -o x.svg` draws one of them; `shardviz diff JOB CHECKPOINT -o x.html` draws both",
    )


def _only(comparison: Comparison, pattern: str | None) -> Outcome:
    """Return the tensor that is meant: by its name or the end of it, or the only one that differs."""
    outcomes = comparison.outcomes
    if pattern is not None:
        chosen: Sequence[Outcome] = [outcome for outcome in outcomes if pattern in (outcome.name, outcome.other)]
        chosen = chosen or [outcome for outcome in outcomes if outcome.name.endswith(f".{pattern}")]
    else:
        chosen = [outcome for outcome in outcomes if outcome.verdict != "equal"] or outcomes
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        close = nearest(pattern or "", [outcome.name for outcome in outcomes])
        hint = f"did you mean {printable(close)}?" if close else "`shardviz diff` without a name lists them"
        raise ShardvizError(f"neither has a tensor {printable(pattern or '')}", hint)
    some = listed((printable(outcome.name) for outcome in chosen), 4)
    which = (
        f"end in {printable(pattern)}" if pattern is not None else "differ" if len(chosen) < len(outcomes) else "fit"
    )
    raise ShardvizError(
        f"an SVG shows one tensor, and {counted(len(chosen), 'tensor')} {which}",
        f"name one of {some}, or use html for all",
    )
