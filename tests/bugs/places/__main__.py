"""`python -m tests.bugs.places [--later|--unseen] [--narrow] [--talk] [WORD ...]`: run faults and right programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.bugs.pairs.running import reports_on
from tests.bugs.places import table
from tests.bugs.places.judging import verdict_on
from tests.bugs.places.later import table as later
from tests.bugs.places.unseen import table as unseen
from tests.bugs.running import lines_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.report import Report
    from tests.bugs.places.fault import Fault, Program


def of_faults(faults: Sequence[Fault], *, narrow: bool, talk: bool) -> None:
    """Run faults and print how each did."""
    counts = [0, 0, 0, 0]
    for number, report in reports_on([(fault.source(narrow=narrow), fault.program.mesh) for fault in faults]):
        fault = faults[number]
        verdict = verdict_on(fault, report)
        marks = (True, verdict.is_found, verdict.is_placed, verdict.is_placed and verdict.is_explained)
        counts = [count + mark for count, mark in zip(counts, marks, strict=True)]
        row = " ".join("✓" if mark else "✗" for mark in marks[1:])
        place = f"{verdict.place or '-'} (due {fault.places[0]})"
        print(f"{row}  {fault.program.name:32} {fault.name:52} {place}", flush=True)
        show(report, is_shown=talk and not marks[-1])
    print("{1} of {0} found, {2} at the right place, {3} with the right cause".format(*counts), flush=True)


def of_programs(programs: Sequence[Program], *, narrow: bool, talk: bool) -> None:
    """Run right programs and print those in which something is found."""
    for number, report in reports_on([(program.source(narrow=narrow), program.mesh) for program in programs]):
        is_quiet = not isinstance(report, str) and not report.findings
        print(f"{'quiet' if is_quiet else 'FALSE ALARM'}  {programs[number].name}", flush=True)
        show(report, is_shown=talk)


def show(report: Report | str, *, is_shown: bool) -> None:
    """Print a report, or the error that a run ended in."""
    for line in ([report] if isinstance(report, str) else [one for one in lines_of(report) if one]) if is_shown else ():
        print(f"          {line}", flush=True)


def main(words: list[str], options: list[str]) -> None:
    """Run what the words name, or all."""
    of = {"--later": later, "--unseen": unseen}.get(next(iter({"--later", "--unseen"} & {*options}), ""), table)
    how = {"narrow": "--narrow" in options, "talk": "--talk" in options}
    faults = [one for one in of.FAULTS if not words or any(word in f"{one.program.name}/{one.name}" for word in words)]
    programs = [one for one in of.PROGRAMS if not words or any(word in one.name for word in words)]
    of_faults(faults, **how)
    of_programs(programs, **how)


if __name__ == "__main__":
    given = sys.argv[1:]
    main([one for one in given if not one.startswith("--")], [one for one in given if one.startswith("--")])
