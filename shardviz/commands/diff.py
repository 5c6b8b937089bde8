"""Compare two dumps, two checkpoints, or a job with a checkpoint.

Two dumps are compared by layout, content and findings; two plans also by what
ranks hold and receive. A job is compared with a checkpoint by the hashes in
the job's dump, and drawn next to it: which rank claims which part, and which
bytes of which file have it.

If two checkpoints have different names, tensors are matched by their values:
whole, joined, interleaved, stacked, transposed, padded or cast. If most names
are equal, only the tensors under different names are matched by values, and a
tensor that was only renamed is a difference. diff prints the map that it found,
and --save-map keeps it for --map. The map is what most layers show, so a wrong
layer is still reported.

If `shardviz run --trace` recorded both jobs, diff compares the steps too: the
weights and rows that they start from, then the first module that differs,
forward or backward, and why. The jobs may shard their weights differently.
If one of them is a single process, --trace lines=MODULE makes diff name the
first wrong line; diff says which MODULE.
-o FILE.html shows the step as a tree, opened at that module.

Exits with 1 if they differ or a rank's file is missing or damaged, with
--strict also if a tensor could not be compared, and with 2 if nothing could.
A cast is a difference. So is padding, unless a map has a line for it, such as
`lm_head.weight = pad(lm_head.weight, 128512)`.

examples:
  shardviz diff before.shardviz after.shardviz
  shardviz diff checkpoints/step-1000 model.safetensors --map my.map
  shardviz diff meta/ hf/ --map llama
  shardviz diff hf/ megatron/ --save-map my.map
  shardviz diff job.shardviz checkpoints/step-1000
  shardviz diff job.shardviz checkpoints/step-1000 -o beside.html
  shardviz diff job.shardviz checkpoints/step-1000 up.weight -o up.svg
  shardviz diff one four
  shardviz diff two four -o step.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import talk
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE, ShardvizError
from shardviz.text import printable

if TYPE_CHECKING:
    import argparse

    from shardviz.check.step.departure import StepDifference
    from shardviz.commands.common.parser import Parser

TRACE_BOTH = "trace a step of both jobs with shardviz run --trace; if it traced none, its output says why"


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("before", type=Path, metavar="FIRST", help="the dump or checkpoint to compare with")
    parser.add_argument("after", type=Path, metavar="SECOND", help="the dump or checkpoint that may have changed")
    parser.add_argument("tensor", nargs="?", metavar="TENSOR", help="for an SVG of a job and a checkpoint: its name")
    from shardviz.checkpoint.maps.families import families
    from shardviz.checkpoint.maps.language import LANGUAGE, functions_text

    parser.add_argument(
        "--map",
        type=Path,
        metavar="MAP",
        help=f"how one checkpoint's tensors are made from the other's: a file, or {', '.join(families())}",
    )
    parser.add_argument("--save-map", type=Path, metavar="FILE", help="write the map found by comparing values")
    parser.add_argument(
        "--also",
        type=Path,
        metavar="CKPT",
        action="append",
        default=[],
        help="a checkpoint to search for stale tensors (neighboring steps are always searched), the weights that an "
        "adapter was merged into, or the adapter itself",
    )
    parser.epilog = f"{parser.epilog}\n{LANGUAGE}{functions_text()}"
    parser.add_argument(
        "--format",
        choices=("text", "json", "svg", "html"),
        help="default: by the ending of FILE, text without one; svg draws a job and a checkpoint, html also two "
        "traced jobs",
    )
    parser.add_output("FILE", "write to a file")
    parser.add_strict("compared")


def run(args: argparse.Namespace) -> int:
    """Compare the dumps and print what is different.

    Returns:
        0 if nothing is; 1 if something is, a rank was not read, or with --strict something was not compared; 2
        if nothing was compared.
    """
    from shardviz.commands.common.checkpoints import FORMATS, diff_checkpoints, kinds_of, refuse_picture
    from shardviz.commands.common.dumps import format_of, refuse_other_files

    refuse_other_files(args.output)
    kinds = kinds_of(args.before, args.after, args.map)
    is_json = args.output is not None and args.output.suffix == ".json"
    style = args.format or ("json" if is_json else format_of(args.output))
    if style in FORMATS and kinds != "a job and a checkpoint" and (style, kinds) != ("html", "dumps"):
        refuse_picture(kinds)
    if args.tensor is not None and style != "svg":
        raise ShardvizError(
            f"{args.tensor}: a tensor is named for an SVG, and this is {style}", "leave it out, or add -o FILE.svg"
        )
    if args.save_map is not None and (args.map is not None or kinds != "checkpoints"):
        raise ShardvizError(
            f"--save-map {args.save_map}: a map is made of two checkpoints for which none is given", "leave it out"
        )
    where = {"output": args.output, "strict": args.strict}
    if kinds != "dumps":
        chosen = {"map_": args.map, "also": args.also, "tensor": args.tensor, "save_map": args.save_map}
        return diff_checkpoints(args.before, args.after, style, args.color, **chosen, **where)
    return compared(args.before, args.after, style, args.color, **where)


def _refuse_steps_that_began_apart(step: StepDifference) -> None:
    """Raise if two steps began with different weights or rows, which leaves nothing to draw."""
    if step.departures and step.departures[0].kind in ("weights", "batch"):
        raise ShardvizError(
            f"a picture shows where two steps diverge, and these differ from the start: {step.departures[0].sentence}",
            "leave out -o for the whole report; trace both jobs again from the same weights and rows",
        )


def compared(
    before: Path, after: Path, style: str, color: str, *, strict: bool = False, output: Path | None = None
) -> int:
    """Print what is different between two dumps.

    Args:
        strict: Fail if anything was not compared, too.

    Returns:
        The exit code.

    Raises:
        DumpError: One of them is not a dump.
    """
    from shardviz.check.diff import compare
    from shardviz.commands.common.checkpoints import refuse_picture
    from shardviz.commands.common.dumps import read_dump, terminal_for, write_answer, write_json, write_markup
    from shardviz.dump.write import TRACE_FOLDER
    from shardviz.picture.html.run import difference_html
    from shardviz.picture.model.step import step_json
    from shardviz.picture.text.difference import difference_lines
    from shardviz.plan.alternatives import sizes_beside

    dumps = read_dump(before), read_dump(after)
    difference = compare(*dumps, plans=sizes_beside(*(dump.files for dump in dumps)))
    if style == "json":
        found = difference.to_json()
        write_json(found | {"step": found["step"] | step_json(difference.step)}, output)
    elif style == "html":
        if difference.step.sides is None:
            _refuse_steps_that_began_apart(difference.step)
            refuse_picture("dumps without the steps of two jobs")
        write_markup(difference_html(f"{before.name} and {after.name}", difference.step), output)
    else:
        terminal = terminal_for(color, output)
        write_answer(difference_lines(difference, terminal), terminal, output)
    if why := difference.nothing_compared:
        talk(f"shardviz: error: {printable(why)}")
        num_traced = sum((dump.files.path / TRACE_FOLDER).is_dir() for dump in dumps)
        if num_traced < len(dumps):  # of two traces, the line above says what to do
            talk(f"  Hint: {TRACE_BOTH if num_traced else 'compare two dumps of one model, each with its weights'}")
        return EXIT_USAGE
    is_incomplete = difference.not_compared or difference.unjudged_buffers
    return EXIT_FINDINGS if difference or difference.unread or (strict and is_incomplete) else EXIT_CLEAN
