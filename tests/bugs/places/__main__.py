"""`python -m tests.bugs.places [--narrow] [--talk] [WORD ...]`: run faults and right programs, print a table."""

from __future__ import annotations

import sys

from tests.bugs.places.judging import verdict_on
from tests.bugs.places.table import FAULTS, PROGRAMS
from tests.bugs.running import attempted, lines_of


def main(words: list[str], *, narrow: bool, talk: bool) -> None:
    """Run and print."""
    counts = [0, 0, 0, 0]
    for fault in FAULTS:
        if words and not any(word in f"{fault.program.name}/{fault.name}" for word in words):
            continue
        verdict = verdict_on(fault, narrow=narrow)
        marks = (True, verdict.is_found, verdict.is_placed, verdict.is_placed and verdict.is_explained)
        counts = [count + mark for count, mark in zip(counts, marks, strict=True)]
        row = " ".join("✓" if mark else "✗" for mark in marks[1:])
        print(
            f"{row}  {fault.program.name:32} {fault.name:52} {verdict.place or '-'} (due {fault.places[0]})", flush=True
        )
        if talk and not marks[-1]:
            said = [verdict.report] if isinstance(verdict.report, str) else [x for x in lines_of(verdict.report) if x]
            print("\n".join(f"          {line}" for line in said), flush=True)
    print("{1} of {0} found, {2} at the right place, {3} with the right cause".format(*counts), flush=True)
    for program in PROGRAMS:
        if not words or any(word in program.name for word in words):
            report = attempted(program.source(narrow=narrow), program.mesh)
            is_quiet = not isinstance(report, str) and not report.findings
            print(f"{'quiet' if is_quiet else 'FALSE ALARM'}  {program.name}", flush=True)
            for line in ([report] if isinstance(report, str) else [x for x in lines_of(report) if x]) if talk else ():
                print(f"          {line}", flush=True)


if __name__ == "__main__":
    main(
        [word for word in sys.argv[1:] if not word.startswith("--")],
        narrow="--narrow" in sys.argv,
        talk="--talk" in sys.argv,
    )
