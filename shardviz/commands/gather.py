"""Put the dumps of machines without a shared disk together.

On each machine, `shardviz run` writes the files of its own ranks. Copy the
folders to one machine, and gather joins them. Every rank must be in one of
them, and all must come from one run. `shardviz check` reads them unjoined too.

examples:
  shardviz gather node_a/train.shardviz node_b/train.shardviz -o all.shardviz
  shardviz gather node_*/train.shardviz -o all.shardviz --force
  shardviz check node_a/train.shardviz node_b/train.shardviz
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import talk
from shardviz.errors import EXIT_CLEAN

if TYPE_CHECKING:
    import argparse

    from shardviz.commands.common.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("parts", type=Path, nargs="+", metavar="PART", help="the folder of a machine")
    parser.add_output("DIR", "the folder for all ranks", required=True)
    parser.add_force("replace DIR, if it is a dump")


def run(args: argparse.Namespace) -> int:
    """Copy the parts into one folder.

    Raises:
        DumpError: A part or a rank is missing or damaged, or they are not of one run.
    """
    from shardviz.dump.gather import gather
    from shardviz.text import counted, printable

    files = gather(args.parts, args.output, force=args.force)
    shown = printable(shlex.quote(os.path.relpath(args.output)))
    ranks, parts = counted(files.run.num_ranks, "rank"), counted(len(args.parts), "part")
    talk(f"wrote {shown}: {ranks} of {parts}; look for what is wrong with: shardviz check {shown}")
    return EXIT_CLEAN
