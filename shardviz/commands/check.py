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

from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import talk
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.commands.common.parser import Parser
    from shardviz.picture.text.terminal import Terminal


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
        strict: Fail if anything was not checked, too.

    Returns:
        0 if nothing is wrong, 1 if there are findings, 2 if nothing could be checked.

    Raises:
        DumpError: A folder is not a dump, or parts are not of one dump.
    """
    from shardviz.check.verdicts import nothing_checked
    from shardviz.checkpoint.open import is_checkpoint
    from shardviz.commands.common.dumps import checked, read_dump, write_report
    from shardviz.text import printable

    if len(folders) == 1 and is_checkpoint(folders[0]):
        from shardviz.commands.common.checkpoints import report_checkpoint

        return report_checkpoint(folders[0], style, color, strict=strict)
    dump = read_dump(*folders, warns=False)
    report = checked(dump)

    def lines(terminal: Terminal) -> list[Text]:
        from shardviz.picture.text.report import report_lines

        return report_lines(dump, report, terminal)

    write_report(report, style, color, lines, [name for tensor in dump.tensors for name in tensor.names])
    if why := nothing_checked(dump, report):
        talk(f"shardviz: error: {printable(why)}")
        return EXIT_USAGE
    return EXIT_FINDINGS if report.findings or (strict and report.not_checked) else EXIT_CLEAN
