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
from tests.bugs.public.running import outcomes_of
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
            show(public.case, scores)
    print(", ".join(f"{number} {state}" for state, number in scores.items()))


def show(case: Bug | Command, scores: Counter[str]) -> None:
    """Run a bug and its twin, print what is said of them, and count how that is."""
    try:
        with tempfile.TemporaryDirectory(prefix="shardviz-public-") as made:
            bug, twin = outcomes_of(case, Path(made))
    except (ShardvizError, AssertionError) as error:
        print(f"ended in {type(error).__name__}: {error}", flush=True)
        return
    states = {"bug": bug.score, "twin": "quiet" if twin.is_quiet else "FALSE ALARM"}
    for which, outcome in (("bug", bug), ("twin", twin)):
        print(f"{which}: {states[which]} {'; '.join(outcome.complaints if which == 'bug' else ())}")
        print(textwrap.indent(outcome.text, "    "), flush=True)
    scores.update(states.values())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        standing.end_all()
