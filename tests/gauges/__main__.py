"""Prints the gauges of the tree and keeps them: `python -m tests.gauges`, which `make gauges` runs.

Exits with 1 if a piece of work grows too fast with its input, and with 0 whatever else the gauges say.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gauges.flow import product
from tests.gauges.growth.cases import grown
from tests.gauges.kept import TODAY, details, read, static_gauges, worse, write
from tests.gauges.reach.reached import unreached

if TYPE_CHECKING:
    from collections.abc import Iterator

GROWTH, TOO_FAST = "growth of ", "TOO FAST "
MOST = 20
"""Tests that are named of the slowest."""
UNREACHED = "functions that nothing enters"
HOW_TO_TIME = 'make test ARGS=--junit-xml=tests.xml; make gauges GAUGES="--tests tests.xml"'


def main() -> int:
    """Print and keep the gauges."""
    parser = argparse.ArgumentParser(prog="python -m tests.gauges", description=__doc__)
    parser.add_argument(
        "--reach",
        type=Path,
        metavar="DIR",
        help="also list the functions that the contract, demos and probes never enter; many minutes, noted in DIR",
    )
    parser.add_argument("--tests", type=Path, metavar="FILE", help="what pytest --junit-xml wrote")
    parser.add_argument("--static", action="store_true", help="leave growth out: seconds instead of minutes")
    parser.add_argument("--growth", metavar="TEXT", help="only the growth of what has this in its name; keeps nothing")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="growth that was measured before, not to repeat")
    args = parser.parse_args()
    if args.growth is not None:
        return _growth(args.growth, args.measured)
    gauges, then = static_gauges(), read() if TODAY.exists() else {}
    never = unreached(product(), args.reach) if args.reach is not None else []
    gauges |= {UNREACHED: str(len(never))} if args.reach is not None else {}
    for name, value in gauges.items():
        was = f" (was {then[name]})" if then.get(name, value) != value else ""
        print(f"{name}: {value}{was}")
    more = [*details(), *_slow(args.tests), *(f"never entered: {name}" for name in never)]
    print(*more, sep="\n")
    lines = worse(gauges, then) if then else []
    print(*lines, sep="\n")
    if UNREACHED not in gauges:
        print(f"{UNREACHED}: {then.get(UNREACHED, 'not known')} when --reach DIR last looked")
        gauges |= {name: value for name, value in then.items() if name == UNREACHED}
    write(gauges, more)
    print(f"written to {TODAY}", flush=True)
    return 0 if args.static else _growth("", args.measured)


def slowest(file: Path) -> list[tuple[str, float]]:
    """Return the slowest tests of a run of pytest with their seconds, the slowest first."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(file).iter("testcase"):
        seconds[f"{case.get('classname')}::{case.get('name')}"] += float(case.get("time", 0))
    return seconds.most_common(MOST)


def _slow(file: Path | None) -> Iterator[str]:
    if file is None:
        yield f"slowest tests: {HOW_TO_TIME}"
    else:
        yield from (f"slowest tests: {name}: {seconds:.1f} s" for name, seconds in slowest(file))


def _growth(text: str, measured: Path | None = None) -> int:
    """Print how the work with each input grows; return 1 if any grows too fast, or could not be measured.

    Args:
        text: What a name must have in it.
        measured: A file to which each line is added, and whose lines are printed again and not measured.
    """
    lines = measured.read_text().splitlines() if measured is not None and measured.exists() else []
    before = {line.partition(GROWTH)[2].partition("  ")[0]: line for line in lines if GROWTH in line}
    print(*before.values(), sep="\n", flush=True)
    num_too_fast = sum(line.startswith(TOO_FAST) for line in before.values())
    for what, measure in grown(text, leave_out=before):
        try:
            growth = measure()
        except RuntimeError as error:
            print(f"NOT MEASURED {what}: {error}", flush=True)
            num_too_fast += 1
            continue
        line = f"{TOO_FAST if growth.is_too_fast else ''}{GROWTH}{growth}"
        print(line, flush=True)
        num_too_fast += growth.is_too_fast
        if measured is not None:
            with measured.open("a") as file:
                file.write(f"{line}\n")
    return 1 if num_too_fast else 0


if __name__ == "__main__":
    sys.exit(main())
