"""What `check`, `show` and `diff` do with a checkpoint, alone or beside a job."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from shardviz.checkpoint.live_job.job import Job
from shardviz.checkpoint.records import Checkpoint, StoredTensor
from shardviz.commands.common.dumps import refuse_several, terminal_for, write_answer, write_json, write_report
from shardviz.commands.common.streams import Count, progress, talk, write_file
from shardviz.dump.dump import find_names
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE, ShardvizError
from shardviz.text import counted, nearest, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardviz.check.report import Report
    from shardviz.checkpoint.comparing.outcome import Comparison, Outcome
    from shardviz.checkpoint.comparing.pairs import Side
    from shardviz.checkpoint.maps.language import Rule


def report_checkpoint(path: Path, style: str, color: str, *, strict: bool = False) -> int:
    """Check a checkpoint and print what was found.

    Returns:
        0 if nothing is wrong, 1 if there are findings, 2 if there is nothing to check.
    """
    from shardviz.picture.text.checkpoint import checkpoint_report_lines

    checkpoint, report = _checked(path)
    lines = partial(checkpoint_report_lines, checkpoint, report)
    write_report(report, style, color, lines, list(checkpoint.tensors))
    if not checkpoint.tensors and not report.findings:
        talk(f"shardviz: error: {path} has no tensors")
        return EXIT_USAGE
    return EXIT_FINDINGS if report.findings or (strict and report.not_checked) else EXIT_CLEAN


def _checked(path: Path) -> tuple[Checkpoint, Report]:
    """Open and check a checkpoint, with its progress on a terminal."""
    from shardviz.checkpoint.findings import check_checkpoint
    from shardviz.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(path)
    count = Count("checked {done} of {of} tensors")
    with progress(lambda: str(count)):
        return checkpoint, check_checkpoint(checkpoint, count)


def show_checkpoint(
    path: Path, pattern: str | None, color: str, *, all_chunks: bool = False, output: Path | None = None
) -> None:
    """Print a checkpoint's tensors, or where the bytes of those that a pattern names are.

    Raises:
        DumpError: It is not a checkpoint.
        ShardvizError: No tensor has that name.
    """
    from shardviz.checkpoint.open import open_checkpoint
    from shardviz.picture.text.checkpoint import tensor_lines, tensors_lines
    from shardviz.picture.text.terminal import line

    checkpoint = open_checkpoint(path)
    if pattern is None:
        lines = tensors_lines(checkpoint)
    else:
        lines = []
        for one in _tensors_by_name(checkpoint, pattern):
            lines += [*([line("")] if lines else []), *tensor_lines(one, all_chunks=all_chunks)]
    write_answer(lines, terminal_for(color, output), output)


def draw_checkpoint(path: Path, pattern: str | None, style: str, output: Path | None) -> None:
    """Write an SVG of which file holds which part of a tensor, or the checkpoint as HTML.

    Raises:
        DumpError: It is not a checkpoint, or has too many chunks to draw.
        ShardvizError: An SVG is not of one tensor, or a page is.
    """
    from shardviz.checkpoint.open import open_checkpoint
    from shardviz.commands.common.dumps import write_markup
    from shardviz.picture.model.stored import checkpoint_subject, number_files
    from shardviz.picture.svg.stored import stored_svg

    if style == "html":
        write_markup(_page(path, pattern), output)
        return
    checkpoint = open_checkpoint(path)
    named = _tensors_by_name(checkpoint, "*" if pattern is None else pattern)
    if len(named) > 1:
        refuse_several(f"{counted(len(named), 'tensor')} of the checkpoint match", [tensor.name for tensor in named])
    write_markup(stored_svg(checkpoint_subject(named[0], number_files(checkpoint))), output)


def _page(path: Path, pattern: str | None) -> str:
    if pattern is not None:
        raise ShardvizError(
            f"an HTML page shows the whole checkpoint, not only {pattern}", "leave it out, or use --format svg"
        )
    from shardviz.picture.html.stored import stored_html

    checkpoint, report = _checked(path)
    with progress(lambda: f"drawing {len(checkpoint.tensors):,} tensors"):
        return stored_html(checkpoint, report)


Kinds = Literal["dumps", "checkpoints", "a job and a checkpoint"]


def kinds_of(before: Path, after: Path, map_: Path | None = None) -> Kinds:
    """Return what two paths are; what is neither a dump nor a checkpoint is taken for a dump.

    Raises:
        ShardvizError: Dumps are given a map.
    """
    from shardviz.checkpoint.open import is_checkpoint

    kinds = {path: is_checkpoint(path) for path in (before, after) if path.exists()}
    if len(set(kinds.values())) > 1:
        return "a job and a checkpoint"
    if map_ is not None and kinds and not any(kinds.values()):
        raise ShardvizError("--map is for checkpoints: a dump has the names of its model", "leave it out")
    return "checkpoints" if any(kinds.values()) else "dumps"


def diff_checkpoints(
    before: Path,
    after: Path,
    style: str,
    color: str,
    map_: Path | None = None,
    also: Sequence[Path] = (),
    *,
    strict: bool = False,
    output: Path | None = None,
    tensor: str | None = None,
    save_map: Path | None = None,
) -> int:
    """Print or draw how two checkpoints differ, or a job and a checkpoint.

    Args:
        before: The first; a dump if it is the job.
        map_: How one's tensors are made of the other's.
        strict: Whether it fails if anything was not compared, too.
        tensor: The tensor of an SVG.
        save_map: Where the map that was found by content is written.

    Returns:
        0 if nothing is, 1 if something is, or with `strict` was not compared, 2 if nothing could be compared.

    Raises:
        DumpError: One of them is not a checkpoint, or not a dump.
        ShardvizError: They have no tensor in common.
    """
    from shardviz.checkpoint.maps.families import find_map
    from shardviz.checkpoint.open import open_checkpoint
    from shardviz.picture.text.checkpoint import comparison_lines

    count = Count("compared {done} of {of} tensors")
    rules = find_map(map_) if map_ is not None else ()
    steps = [open_checkpoint(path) for path in also]
    sides = _side(before), _side(after)
    with progress(lambda: str(count)):
        comparison = _compared(*sides, rules, count, steps)
    if save_map is not None:
        _save_map(save_map, comparison, (before, after))
    if style == "json":
        write_json(comparison.to_json(), output)
    elif style in FORMATS:
        with progress(lambda: f"drawing {len(comparison.outcomes):,} tensors"):
            draw_beside(comparison, sides, style, tensor, output)
    else:
        terminal = terminal_for(color, output)
        write_answer(comparison_lines(comparison, terminal), terminal, output)
    if not comparison.compared and not comparison.counts["unreadable"]:
        talk(f"shardviz: error: nothing of {before} and {after} could be compared")
        return EXIT_USAGE
    return EXIT_FINDINGS if comparison.differs or (strict and comparison.counts["not-compared"]) else EXIT_CLEAN


def _save_map(path: Path, comparison: Comparison, sides: tuple[Path, Path]) -> None:
    """Write the lines of a map that was found by content, and what it leaves open.

    Raises:
        ShardvizError: No map was found, or it cannot be written.
    """
    if not comparison.map:
        raise ShardvizError(
            f"{path} was not written: names or the given map match the tensors, so none was made by content",
            "leave out --save-map",
        )
    names = " and ".join(printable(side.name) for side in sides)
    open_ = [f"# {printable(one.name)}: {one.why}" for one in comparison.outcomes if one.verdict == "not-compared"]
    lines = [f"# The tensors of {names}, matched by their values by `shardviz diff`.", *comparison.map, *open_]
    write_file("".join(f"{line}\n" for line in lines), path, "--save-map")
    talk(f"wrote the map to {printable(str(path))}")


def _side(path: Path) -> Side:
    """Open a checkpoint, or a job's dump."""
    from shardviz.checkpoint.live_job.job import job_of
    from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
    from shardviz.commands.common.dumps import read_dump

    is_dump = path.is_dir() and not is_checkpoint(path) and (path / "run.json").exists()
    return job_of(read_dump(path)) if is_dump else open_checkpoint(path)


def _compared(
    before: Side, after: Side, rules: Sequence[Rule], count: Count, steps: Sequence[Checkpoint]
) -> Comparison:
    from shardviz.checkpoint.comparing.compare import compare_checkpoints
    from shardviz.checkpoint.live_job.compare import compare_with_job

    if isinstance(before, Job) or isinstance(after, Job):
        return compare_with_job(before, after, rules, count, steps)
    return compare_checkpoints(before, after, rules, count, steps)


def _tensors_by_name(checkpoint: Checkpoint, pattern: str) -> list[StoredTensor]:
    """Find tensors by name, by the end of a name that one alone has, or by a pattern with `*`."""
    names = find_names(checkpoint.tensors, pattern, str(checkpoint.path))
    return [checkpoint.tensors[name] for name in names]


FORMATS = ("svg", "html")


def draw_beside(
    comparison: Comparison, sides: tuple[Side, Side], style: str, pattern: str | None, output: Path | None
) -> None:
    """Write a job beside a checkpoint as a picture.

    Args:
        pattern: The tensor of an SVG; by default the only one that differs.

    Raises:
        ShardvizError: An SVG is not of one tensor, or a page is, or a tensor cannot be drawn.
    """
    from shardviz.commands.common.dumps import write_markup
    from shardviz.picture.html.stored import beside_html
    from shardviz.picture.model.stored import comparison_subject, number_files
    from shardviz.picture.svg.stored import beside_svg

    job, checkpoint = sides if isinstance(sides[0], Job) else sides[::-1]
    assert isinstance(job, Job), "the caller has looked"
    assert isinstance(checkpoint, Checkpoint), "the caller has looked"
    if style == "html":
        if pattern is not None:
            raise ShardvizError(f"an HTML page shows all tensors, not only {pattern}", "leave it out, or use svg")
        write_markup(beside_html(comparison, job, checkpoint), output)
        return
    outcome = _chosen_outcome(comparison, pattern)
    write_markup(beside_svg(comparison_subject(outcome, job, checkpoint, number_files(checkpoint))), output)


def refuse_picture(kinds: str) -> None:
    """Refuse to draw what is not a job beside a checkpoint."""
    raise ShardvizError(
        f"a picture compares a job with a checkpoint, and these are two {kinds}",
        "`shardviz show ONE TENSOR -o x.svg` draws one of them; `shardviz diff JOB CHECKPOINT -o x.html` draws both",
    )


def _chosen_outcome(comparison: Comparison, pattern: str | None) -> Outcome:
    """Return the tensor that a name or its end selects, or the only one that differs."""
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
    which = (
        f"end in {printable(pattern)}" if pattern is not None else "differ" if len(chosen) < len(outcomes) else "fit"
    )
    refuse_several(f"{counted(len(chosen), 'tensor')} {which}", [outcome.name for outcome in chosen])
