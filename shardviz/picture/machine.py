"""A report for machines: JSON, GitHub's workflow commands, JUnit's XML."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.report import Report
    from shardviz.explain.finding import Finding

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def report_json(report: Report) -> str:
    """Return the report as JSON, which `check --format json` prints; findings list all tensors."""
    return json.dumps(report.to_json(), indent=1) + "\n"


def report_github(report: Report) -> str:
    """Return one workflow command a finding, which GitHub shows on the pull request's page.

    The escapes are those of GitHub's `@actions/core` (`escapeData`, `escapeProperty`).
    """
    lines = []
    for finding in report.findings:
        level = "error" if finding.severity == "error" else "warning"
        title = _property(f"shardviz: {finding.kind} {printable(finding.title)}".strip())
        lines.append(f"::{level} title={title}::{_data(_details(finding))}")
    lines += [
        f"::notice title=shardviz%3A not checked::{_data(_with_name(unchecked.tensor, unchecked.why))}"
        for unchecked in report.not_checked
    ]
    return "".join(f"{line}\n" for line in lines)


def report_junit(report: Report, names: Sequence[str]) -> str:
    """Return the report as JUnit XML: a test case for each tensor, and one for the dump."""
    from xml.etree import ElementTree

    findings, unchecked = report.findings_of, report.why_not_checked
    cases = list(dict.fromkeys([*names, *findings, *unchecked]))
    skipped = [name for name in cases if name in unchecked and name not in findings]
    suite = ElementTree.Element("testsuite", name="shardviz", tests=str(len(cases)), errors="0")
    suite.set("failures", str(len(findings)))
    suite.set("skipped", str(len(skipped)))
    for name in cases:
        case = ElementTree.SubElement(suite, "testcase", classname="shardviz", name=_xml(name or "(dump)"))
        for finding in findings.get(name, ()):
            failure = ElementTree.SubElement(case, "failure", type=finding.kind, message=_xml(finding.summary))
            failure.text = _xml(_details(finding))
        if name in skipped:
            ElementTree.SubElement(case, "skipped", message=_xml("; ".join(unchecked[name])))
    written: bytes = ElementTree.tostring(suite, encoding="us-ascii", xml_declaration=True)
    return written.decode("ascii") + "\n"


def _details(finding: Finding) -> str:
    """Return a finding as lines of plain text."""
    rows = (f"{title}: {printable(text)}" for title, text in (*finding.layouts, *finding.advice))
    return "\n".join([_with_name(finding.tensor, finding.summary), *rows])


def _with_name(tensor: str, text: str) -> str:
    return printable(f"{tensor}: {text}" if tensor and tensor not in text else text)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _xml(text: str) -> str:
    """Spell out characters that XML cannot hold."""
    return _NO_XML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
