"""`python -m tests.bugs.public [WORD ...]`: run and score the public bugs, or those with a word in their names."""

from __future__ import annotations

import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from tests.bugs.public.catalogue import FAMILIES
from tests.bugs.public.running import outcome_of
from tests.live import standing

if TYPE_CHECKING:
    from tests.bugs.case import Bug
    from tests.bugs.public.case import Command


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
                scores[show(public.case, right)] += 1
    print(", ".join(f"{number} {state}" for state, number in scores.items()))


def show(case: Bug | Command, right: bool) -> str:
    """Run the bug or its twin, print what is said, and return how that is."""
    try:
        with tempfile.TemporaryDirectory(prefix="shardviz-public-") as made:
            outcome = outcome_of(case, Path(made), right=right)
    except (ShardvizError, AssertionError) as error:
        print(f"{'twin' if right else 'bug'}: ended in {type(error).__name__}: {error}", flush=True)
        return "ended"
    state = ("quiet" if outcome.is_quiet else "FALSE ALARM") if right else outcome.score
    print(f"{'twin' if right else 'bug'}: {state} {'; '.join(() if right else outcome.complaints)}")
    print(textwrap.indent(outcome.text, "    "), flush=True)
    return state


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        standing.end_all()
