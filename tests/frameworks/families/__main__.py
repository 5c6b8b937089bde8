"""Take families of transformers there and back: `python -m tests.frameworks.families [NAME...] [-o FILE]`.

Without names all that have a plan. Prints a line for each as it is done, with what is not as it was under it.
"""

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from shardviz.live.world import launch, prepare
from tests.frameworks.families.known import TIED
from tests.frameworks.families.outcome import Outcome, outcome_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="classes of configurations; all by default")
    parser.add_argument("-o", "--output", type=Path, help="write what became of each as JSON")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the checkpoints and dumps there")
    args = parser.parse_args()
    os.environ["SHARDVIZ_FAMILIES"] = ",".join(args.names)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])  # for the server that ranks are forked from
    prepare(also=["tests.frameworks.families.preloaded"])
    names = args.names or launch("tests.frameworks.families.trip:names", num_ranks=1)[0]
    found = [_taken(name, args.keep) for name in names]
    if args.output:
        args.output.write_text(json.dumps([asdict(one) for one in found], indent=1))


def _taken(name: str, kept: Path | None) -> Outcome:
    """Take a family there and back, and print what is not as it was. All families together write 15 GB."""
    with tempfile.TemporaryDirectory() as made:
        one = outcome_of(name, (kept or Path(made)) / name)
    wrong = not all(map(TIED.match, one.lines))
    print(f"{'✗' if wrong else '?' if one.lines else '✓'} {one.name}: {one.compared:,} tensors", flush=True)
    for line in one.lines:
        print(f"    {line}", flush=True)
    return one


if __name__ == "__main__":
    main()
