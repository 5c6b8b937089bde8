"""`python -m tests.bugs [WORD ...]`: run the cases, or those that have a word in their names, print how each did."""

from __future__ import annotations

import sys

from tests.bugs.case import Bug
from tests.bugs.catalogue import FAMILIES
from tests.bugs.running import attempted, judged, lines_of
from tests.live import standing


def main(words: list[str]) -> None:
    """Run and print."""
    for family, cases in FAMILIES.items():
        for case in cases:
            if not words or any(word in f"{family}/{case.name}" for word in words):
                print(f"=== {family}/{case.name} ({case.mesh})", flush=True)
                if isinstance(case, Bug):
                    show("bug", case, case.wrong)
                show("twin", case, case.right)


def show(which: str, case: object, source: str) -> None:
    """Run one of the two and print the verdict, and what was said where that is not as it should be."""
    report = attempted(source, case.mesh, with_lines=which == "bug" and getattr(case, "with_lines", False))
    if isinstance(report, str):
        print(f"{which}: ended in {report}", flush=True)
        return
    if which == "bug":
        verdict = judged(case, report)
        state = "named" if verdict.is_named else "FOUND, MISNAMED" if verdict.is_found else "MISSED"
        state += "" if verdict.is_silent else ", NOT SILENT"
        state += f", {verdict.repeated} findings repeated" if verdict.repeated else ""
        print(f"bug: {state} {'; '.join(verdict.complaints)}")
    else:
        print(f"twin: {'FALSE ALARM' if report.findings else 'quiet'}")
    for line in lines_of(report):
        if line:
            print(f"    {line}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        standing.end_all()
