"""Run a case's probes on real ranks and judge what the tool says of them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.check.run import report_on
from shardviz.commands.probe import QUESTION
from shardviz.errors import ShardvizError
from tests.live.probing import run_probe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.report import Report
    from shardviz.explain.finding import Finding
    from tests.bugs.case import Bug


@dataclass(frozen=True)
class Verdict:
    """How the tool did on one bug.

    Attributes:
        is_silent: Whether the bug ran on all ranks without raising; else it is no silent one.
        is_found: Whether there is any finding.
        complaints: What is wrong with how it is named; empty where a reader would mend it by what is said.
        repeated: How many findings say of one more tensor what another has said: one cause is one finding with a list.
    """

    is_silent: bool
    is_found: bool
    complaints: tuple[str, ...]
    repeated: int = 0

    @property
    def is_named(self) -> bool:
        """Whether it is found, and by its right name."""
        return self.is_found and not self.complaints


def report_of(source: str, mesh: str, folder: Path | None = None, *, with_lines: bool = False) -> Report:
    """Run a probe's source on the ranks of a mesh, and check what they wrote."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="shardviz-bugs-") as made:
            return report_of(source, mesh, Path(made), with_lines=with_lines)
    probe = folder / "case.py"
    probe.write_text(source)
    return report_on(run_probe(str(probe), mesh, folder / "dump", question=QUESTION if with_lines else ""))


def judged(bug: Bug, report: Report) -> Verdict:
    """Judge what was said of a bug."""
    silent = not any(" raised " in one.why for one in report.not_checked)
    causes = {(finding.kind, finding.cause, finding.fix) for finding in report.findings}
    complaints = tuple(_complaints(bug, report)) if report.findings else ()
    return Verdict(silent, bool(report.findings), complaints, len(report.findings) - len(causes))


def _complaints(bug: Bug, report: Report) -> Iterator[str]:
    said = "\n".join(map(prose, report.findings)).lower()
    others = sorted({finding.kind for finding in report.findings} - set(bug.kinds))
    if others:
        yield f"kind {', '.join(others)} where {' or '.join(bug.kinds)} was due"
    for word in bug.words:
        if not any(choice.lower() in said for choice in word.split("|")):
            yield f"says nothing of {' or '.join(word.split('|'))}"
    for word in bug.never:
        if word.lower() in said:
            yield f"says {word!r}, which is not so"


def prose(finding: Finding) -> str:
    """Return all that a finding says, a line a part."""
    parts = (finding.tensor, finding.summary, finding.held, finding.cause, finding.fix, *finding.also)
    return "\n".join(part for part in parts if part)


def lines_of(report: Report) -> Iterator[str]:
    """Yield a report in short lines, for the messages of tests."""
    for finding in report.findings:
        yield f"{finding.kind} {finding.tensor}: {finding.summary}"
        yield f"  held: {finding.held}" if finding.held else ""
        yield f"  cause: {finding.cause}"
        yield f"  fix: {finding.fix}"
    for one in report.not_checked:
        yield f"not checked {one.tensor}: {one.why}"


def attempted(source: str, mesh: str, *, with_lines: bool = False) -> Report | str:
    """Return the report, or the one line in which the run ended."""
    try:
        return report_of(source, mesh, with_lines=with_lines)
    except ShardvizError as error:
        return f"{type(error).__name__}: {error}"
