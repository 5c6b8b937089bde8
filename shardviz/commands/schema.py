"""Print the JSON schema of what shardviz writes.

For programs that read run.json, a rank's file, a plan's file, or the answer of
`shardviz check --format json` or `shardviz diff --format json` (of two dumps).

examples:
  shardviz schema run > run.schema.json
  shardviz schema rank
  shardviz schema diff
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import reader_may_leave
from shardviz.errors import EXIT_CLEAN

if TYPE_CHECKING:
    import argparse

WHAT = ("run", "rank", "plan", "check", "diff")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "what", nargs="?", choices=WHAT, metavar="WHAT", help=f"one of {', '.join(WHAT)}; without it, list them"
    )


def run(args: argparse.Namespace) -> int:
    """Print the schema, or list what has one."""
    from shardviz.picture.machine import TITLES, schema_text

    listing = "".join(f"{what:5}  {title}\n" for what, title in TITLES.items())
    with reader_may_leave():
        sys.stdout.write(schema_text(args.what) if args.what else listing)
    return EXIT_CLEAN
