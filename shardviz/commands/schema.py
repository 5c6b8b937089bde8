"""Print the JSON schema of what shardviz writes.

For programs that read run.json, a rank's file, a plan's file, or the answer of
`shardviz check --format json`.

examples:
  shardviz schema run > run.schema.json
  shardviz schema rank
  shardviz schema check
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import reader_may_leave
from shardviz.errors import EXIT_CLEAN

if TYPE_CHECKING:
    import argparse

WHAT = ("run", "rank", "plan", "check")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("what", choices=WHAT, metavar="WHAT", help=f"one of {', '.join(WHAT)}")


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    from shardviz.picture.schema import schema_text

    with reader_may_leave():
        sys.stdout.write(schema_text(args.what))
    return EXIT_CLEAN
