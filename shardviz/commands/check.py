"""Find what is wrong in a dump, or in a checkpoint.

Exits with 1 if there are findings. Marks: ✗ wrong, ! something could not be
seen whole (a rank or a file is missing), ? not checked, ✓ in order.

examples:
  shardviz check tp_fsdp-2x4.shardviz
  shardviz check tp_fsdp-2x4.shardviz --format github
  shardviz check node_a/train.shardviz node_b/train.shardviz
  shardviz check checkpoints/step-1000
  shardviz check tp_fsdp-2x4.shardviz --format junit > shardviz.xml
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import reader_may_leave, talk
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from shardviz.check.report import Report
    from shardviz.commands.common.parser import Parser
    from shardviz.dump.dump import Dump


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "dumps", type=Path, nargs="+", metavar="DUMP", help="a dump's folder, its parts from machines, or a checkpoint"
    )
    parser.add_format("text", "json", "github", "junit")
    parser.add_strict()


def run(args: argparse.Namespace) -> int:
    """Check the dump and print the report.

    Returns:
        0 if nothing is wrong, 1 if there are findings, 2 if nothing could be checked.
    """
    return report(args.dumps, args.format, args.color, strict=args.strict)


def report(folders: Sequence[Path], style: str, color: str = "auto", *, strict: bool = False) -> int:
    """Check a dump and print what was found in one of the formats.

    Args:
        folders: The dump, or the parts of one.
        style: The format.
        color: Whether text is colored.
        strict: Fail if anything was not checked, too.

    Returns:
        0 if nothing is wrong, 1 if there are findings, 2 if nothing could be checked.

    Raises:
        DumpError: A folder is not a dump, or parts are not of one dump.
    """
    from shardviz.check.verdicts import nothing_checked
    from shardviz.checkpoint.open import is_checkpoint
    from shardviz.commands.common.dumps import checked, read_dump
    from shardviz.text import printable

    if len(folders) == 1 and is_checkpoint(folders[0]):
        from shardviz.commands.common.checkpoints import report_checkpoint

        return report_checkpoint(folders[0], style, color, strict=strict)
    dump = read_dump(*folders)
    report = checked(dump)
    _print(dump, report, style, color)
    if why := nothing_checked(dump, report):
        talk(f"shardviz: error: {printable(why)}")
        return EXIT_USAGE
    return EXIT_FINDINGS if report.findings or (strict and report.not_checked) else EXIT_CLEAN


def _print(dump: Dump, report: Report, style: str, color: str) -> None:
    if style == "text":
        from shardviz.commands.common.dumps import terminal_for, write_answer
        from shardviz.picture.text.report import report_lines

        terminal = terminal_for(color)
        write_answer(report_lines(dump, report, terminal), terminal)
        return
    from shardviz.picture.machine import report_github, report_json, report_junit

    with reader_may_leave():
        if style == "json":
            sys.stdout.write(report_json(report))
        elif style == "github":
            sys.stdout.write(report_github(report))
        else:
            sys.stdout.write(report_junit(report, [name for tensor in dump.tensors for name in tensor.names]))
