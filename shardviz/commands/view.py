"""Walk through a dump in the terminal. Where stdout is no terminal, print what `show` prints."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import EXIT_CLEAN

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("dump", type=Path, metavar="DUMP", help="the folder that a probe or a job wrote")


def run(args: argparse.Namespace) -> int:
    """Open the TUI, or print the dump's tensors into a pipe."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        # Not an import statement: mypy knows the TUI as `tui`, where its files are.
        import_module("shardviz.tui.app").view(args.dump)
    else:
        from shardviz.commands.show import show

        show(args.dump, None, args.color)
    return EXIT_CLEAN
