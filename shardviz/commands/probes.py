"""List the recipes that `shardviz probe` knows, a line each."""

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
    """Print the recipes, or run those of the bugs and print how each was named."""
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
    """Write a line for each recipe; on a terminal what does not fit goes on below, in the column of the summaries."""
    from shardviz.picture.text.table import padded, widest
    from shardviz.picture.text.terminal import DIM, line, wrapped

    names = widest(printable(recipe.name) for recipe in found)
    axes = widest(", ".join(recipe.axes) for recipe in found)
    indent = names + axes + 4
    width = terminal.width if sys.stdout.isatty() else sys.maxsize
    is_narrow = indent + MIN_SUMMARY > width
    lines = []
    for recipe in found:
        by = f" ({recipe.name.partition('/')[0]} {recipe.version})" if recipe.version else ""
        name, on = padded(printable(recipe.name), names), padded(", ".join(recipe.axes), axes)
        head = line((name, "bold"), "  ", (on, DIM), "  ")
        first, indent = (line("    "), 4) if is_narrow else (head, indent)
        lines += [*([head] if is_narrow else []), *wrapped(printable(f"{recipe.summary}{by}"), width, first, indent)]
    return lines
