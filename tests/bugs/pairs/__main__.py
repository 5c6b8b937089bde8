"""`python -m tests.bugs.pairs FIRST LAST`: run the right programs of some seeds, print what is said of any."""

from __future__ import annotations

import sys
import time

from tests.bugs.pairs.drawn import drawn
from tests.bugs.pairs.running import reports_on
from tests.bugs.running import lines_of


def main(first: int, last: int) -> None:
    """Run and print."""
    begun, alarms = time.monotonic(), 0
    pairs = [drawn(seed) for seed in range(first, last)]
    for number, report in reports_on([(pair.source, pair.mesh) for pair in pairs]):
        pair, is_quiet = pairs[number], not isinstance(report, str) and not report.findings
        alarms += not is_quiet
        verdict = "quiet" if is_quiet else "FALSE ALARM"
        print(f"{pair.seed:4} {verdict} {pair.name} {pair.mesh} {pair.dtype}", flush=True)
        for line in [report] if isinstance(report, str) else lines_of(report):
            if line and not (is_quiet and "in float64" in line):
                print(f"          {line}", flush=True)
    print(f"{alarms} of {len(pairs)} give an alarm, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
