"""List the probes that can be run, one per line.

examples:
  shardviz probes
  shardviz probes --bugs
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardviz.errors import EXIT_CLEAN
from shardviz.text import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.picture.text.terminal import Terminal
    from shardviz.probe_files import Probe

MIN_SUMMARY = 30
"""Columns that a summary needs beside names and axes; with fewer it stands below them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--bugs", action="store_true", help="run every recreated bug and every quiet probe, and score")


def run(args: argparse.Namespace) -> int:
    """Print the probes, or run those of the bugs and print how each was named."""
    if args.bugs:
        from shardviz.commands import _bugs

        return _bugs.run(args)
    from shardviz import probe_files
    from shardviz.commands._dumps import terminal_for, write_answer
    from shardviz.probe_files import installed

    others, broken = installed()
    terminal = terminal_for(args.color)
    write_answer(_lines([*probe_files.shipped(), *others], terminal), terminal)
    for error in broken.values():
        print(f"shardviz: warning: {printable(error.message)}", file=sys.stderr)
    return EXIT_CLEAN


def _lines(found: Sequence[Probe], terminal: Terminal) -> list[Text]:
    """Write a line for each probe; on a terminal what does not fit goes on below, in the column of the summaries."""
    from shardviz.picture.text.table import padded, widest
    from shardviz.picture.text.terminal import DIM, line, wrapped

    names = widest(printable(probe.name) for probe in found)
    axes = widest(", ".join(probe.axes) for probe in found)
    indent = names + axes + 4
    width = terminal.width if sys.stdout.isatty() else sys.maxsize
    is_narrow = indent + MIN_SUMMARY > width
    lines = []
    for probe in found:
        by = f" ({probe.name.partition('/')[0]} {probe.version})" if probe.version else ""
        name, on = padded(printable(probe.name), names), padded(", ".join(probe.axes), axes)
        head = line((name, "bold"), "  ", (on, DIM), "  ")
        first, indent = (line("    "), 4) if is_narrow else (head, indent)
        lines += [*([head] if is_narrow else []), *wrapped(printable(f"{probe.summary}{by}"), width, first, indent)]
    return lines
