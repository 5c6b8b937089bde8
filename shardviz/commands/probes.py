"""List the probes that can be run, one per line.

examples:
  shardviz probes
  shardviz probes --bugs
  shardviz probes --format json
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from shardviz.errors import EXIT_CLEAN
from shardviz.text import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.commands.common.parser import Parser
    from shardviz.picture.text.terminal import Terminal
    from shardviz.probe_files import Probe

MIN_SUMMARY = 30
"""Columns that a summary needs beside names and axes; with fewer it stands below them."""


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--bugs", action="store_true", help="run and score every recreated bug and every quiet probe")
    parser.add_format("text", "json")


def run(args: argparse.Namespace) -> int:
    """Print the probes, or run those of the bugs and print how each was named."""
    if args.bugs:
        from shardviz.commands.common import bugs

        return bugs.run(args)
    from shardviz import probe_files
    from shardviz.commands.common.dumps import terminal_for, write_answer, write_markup
    from shardviz.probe_files import installed

    others, broken = installed()
    probes = [*probe_files.shipped(), *others]
    if args.format == "json":
        write_markup(json.dumps([_as_json(probe, _own_version()) for probe in probes], indent=1) + "\n", None)
    else:
        terminal = terminal_for(args.color)
        write_answer(_lines(probes, terminal), terminal)
    for error in broken.values():
        print(f"shardviz: warning: {printable(error.message)}", file=sys.stderr)
    return EXIT_CLEAN


def _as_json(probe: Probe, own_version: str) -> dict[str, Any]:
    """Return what is known of a probe without running it."""
    installed = bool(probe.module)
    return {
        "name": probe.name,
        "summary": probe.summary,
        "axes": probe.axes,
        "mesh": probe.mesh,
        "kinds": probe.kinds,
        "path": str(probe.path),
        "distribution": probe.name.partition("/")[0] if installed else "shardviz",
        "version": probe.version if installed else own_version,
    }


def _own_version() -> str:
    """Return shardviz's version; empty if it runs from its sources, without having been installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shardviz")
    except PackageNotFoundError:
        return ""


def _lines(probes: Sequence[Probe], terminal: Terminal) -> list[Text]:
    """Write a line for each probe; on a terminal what does not fit goes on below, in the column of the summaries."""
    from shardviz.picture.text.table import padded, widest
    from shardviz.picture.text.terminal import DIM, line, wrapped

    names = widest(printable(probe.name) for probe in probes)
    axes = widest(", ".join(probe.axes) for probe in probes)
    indent = names + axes + 4
    width = terminal.width if sys.stdout.isatty() else sys.maxsize
    is_narrow = indent + MIN_SUMMARY > width
    lines = []
    for probe in probes:
        by = f" ({probe.name.partition('/')[0]} {probe.version})" if probe.version else ""
        name, on = padded(printable(probe.name), names), padded(", ".join(probe.axes), axes)
        head = line((name, "bold"), "  ", (on, DIM), "  ")
        first, indent = (line("    "), 4) if is_narrow else (head, indent)
        lines += [*([head] if is_narrow else []), *wrapped(printable(f"{probe.summary}{by}"), width, first, indent)]
    return lines
