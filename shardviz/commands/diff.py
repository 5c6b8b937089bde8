"""Compare two dumps, two checkpoints, or a job with a checkpoint.

Of two dumps layouts, contents and findings are compared. What the ranks of a
job hold is compared with a checkpoint by the hashes in its dump.

Of two jobs that `shardviz run --trace` followed, one of them a single process,
their steps are compared, too: the weights and rows that they start from, then
the first module, forward or backward, that is wrong in one, and why.

Exits with 1 where they differ, with --strict also where a tensor could not be
compared, with 2 where nothing in them could be compared.

examples:
  shardviz diff before.shardviz after.shardviz
  shardviz diff checkpoints/step-1000 model.safetensors --map my.map
  shardviz diff meta/ hf/ --map llama
  shardviz diff job.shardviz checkpoints/step-1000
  shardviz diff one four
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import reader_may_leave, talk
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE
from shardviz.text import printable

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("before", type=Path, metavar="DUMP", help="the one to compare with: a dump or a checkpoint")
    parser.add_argument("after", type=Path, metavar="DUMP", help="the one that may have changed, likewise")
    from shardviz.checkpoint.maps.families import families
    from shardviz.checkpoint.maps.language import LANGUAGE, functions_text

    parser.add_argument(
        "--map",
        type=Path,
        metavar="MAP",
        help=f"how one's tensors are made of the other's: a file, or {', '.join(families())}",
    )
    parser.add_argument(
        "--also",
        type=Path,
        metavar="CKPT",
        action="append",
        default=[],
        help="another step, from which a tensor may have stayed; those beside either are looked at anyway",
    )
    parser.epilog = f"{parser.epilog}\n{LANGUAGE}{functions_text()}"
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where anything was not compared, too")


def run(args: argparse.Namespace) -> int:
    """Compare the dumps and print what is different.

    Returns:
        0 where nothing is, 1 where something is, or with --strict was not compared, 2 where nothing was compared.
    """
    from shardviz.commands.common.checkpoints import diff_checkpoints, kinds_of

    if kinds_of(args.before, args.after, args.map) != "dumps":
        style, colour, strict = args.format, args.color, args.strict
        return diff_checkpoints(args.before, args.after, style, colour, args.map, args.also, strict=strict)
    return compared(args.before, args.after, args.format, args.color, strict=args.strict)


def compared(before: Path, after: Path, style: str, colour: str, *, strict: bool = False) -> int:
    """Print what is different between two dumps.

    Args:
        before: The one to compare with.
        after: The one that may have changed.
        style: The format.
        colour: Whether text is coloured.
        strict: Fail where anything was not compared, too.

    Returns:
        The exit code.

    Raises:
        DumpError: One of them is not a dump.
    """
    from shardviz.check.diff import compare
    from shardviz.commands.common.dumps import read_dump, terminal_for, write_answer
    from shardviz.picture.text.difference import difference_lines

    difference = compare(read_dump(before), read_dump(after))
    if style == "json":
        with reader_may_leave():
            print(json.dumps(difference.to_json(), indent=1))
    else:
        terminal = terminal_for(colour)
        write_answer(difference_lines(difference, terminal), terminal)
    if why := difference.nothing_compared:
        talk(f"shardviz: error: {printable(why)}")
        talk("  Hint: compare two dumps of one model, each with its weights")
        return EXIT_USAGE
    return EXIT_FINDINGS if difference or (strict and difference.not_compared) else EXIT_CLEAN
