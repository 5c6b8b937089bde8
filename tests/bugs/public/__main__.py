"""`python -m tests.bugs.public [WORD ...]`: run and score the public bugs, or those with a word in their names."""

from __future__ import annotations

import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

from tests.bugs.public.catalogue import FAMILIES
from tests.bugs.public.running import outcome_of
from tests.live import standing


def main(words: list[str]) -> None:
    """Run and print."""
    scores: Counter[str] = Counter()
    for family, cases in FAMILIES.items():
        for public in cases:
            name = f"{family}/{public.reference}: {public.case.name}"
            if words and not any(word in name for word in words):
                continue
            print(f"=== {name}", flush=True)
            for right in (False, True):
                with tempfile.TemporaryDirectory(prefix="shardviz-public-") as made:
                    outcome = outcome_of(public.case, Path(made), right=right)
                state = ("quiet" if outcome.is_quiet else "FALSE ALARM") if right else outcome.score
                scores[state] += 1
                print(f"{'twin' if right else 'bug'}: {state} {'; '.join(() if right else outcome.complaints)}")
                print(textwrap.indent(outcome.text, "    "), flush=True)
    print(", ".join(f"{number} {state}" for state, number in scores.items()))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        standing.end_all()
