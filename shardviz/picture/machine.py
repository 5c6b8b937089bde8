"""A report for machines: JSON, GitHub's workflow commands, JUnit's XML; and schemas of all that is written.

Schemas are made from the types that validate it when read.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from shardviz.check.diff import Difference
from shardviz.check.report import NotChecked
from shardviz.check.step.departure import Departure, StepDifference
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import PlanRecord, RankRecord, RunRecord
from shardviz.explain.finding import FOR_MACHINES, Finding
from shardviz.plan.alternatives import Size
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.report import Report


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
        title = _data(f"shardviz: {finding.kind} {printable(finding.title)}".strip())
        title = title.replace(":", "%3A").replace(",", "%2C")
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


def _xml(text: str) -> str:
    """Spell out characters that XML cannot hold."""
    return _NO_XML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


TITLES = {
    "run": f"run.json of a shardviz dump, version {SCHEMA}",
    "rank": f"rank_NNNNN.json of a shardviz dump, version {SCHEMA}",
    "plan": f"plan.json of a shardviz plan, version {SCHEMA}",
    "check": "what shardviz check --format json prints, version 1",
    "diff": "what shardviz diff --format json prints of two dumps, version 1",
}

PRINTED = {"Finding": Finding, "NotChecked": NotChecked, "Size": Size}
"""Types that a module names only for type checkers."""

COMPUTED = {
    "summary": str,
    "tensors": tuple[str, ...],
    "cause": str,
    "fix": str,
    "cause_id": str,
    "causes": list[dict[str, str]],
}
"""What a finding works out from its fields."""


def type_of(what: str) -> Any:
    """Return the type of one of the things that have a schema, which `TITLES` has."""
    files = {"run": RunRecord, "rank": RankRecord, "plan": PlanRecord}
    return files.get(what) or (_difference() if what == "diff" else _report())


def _finding() -> Any:
    hints = _hints(Finding) | COMPUTED
    return _struct("Finding", {name: hints[name] for name in FOR_MACHINES})


def _hints(of: type) -> dict[str, Any]:
    """Return the types of a class's fields; what isn't printed is any object, as is KW_ONLY, no type in Python 3.10."""
    unprinted = ("Cause", "RankPair", "Beside", "KW_ONLY")
    return get_type_hints(of, localns={**dict.fromkeys(unprinted, object), **PRINTED})


def _report() -> Any:
    numbers = dict.fromkeys(("schema", "num_ranks", "num_tensors"), int)
    return _struct("Report", {**numbers, "findings": _list_of(_finding()), "not_checked": list[NotChecked]})


def _difference() -> Any:
    departure = {**_hints(Departure), "cause_id": str}
    step = {**_hints(StepDifference), "departures": _list_of(_struct("Departure", departure, "explanation"))}
    pictures: list[Any] = [(name, list[dict[str, Any]], []) for name in ("calls", "heat")]
    fields = {"schema": int, **_hints(Difference), "step": _struct("Step", step, "sides", optional=pictures)}
    fields |= dict.fromkeys(("gained", "lost"), _list_of(_finding()))
    return _struct("Difference", fields, "num_compared", "unread")


def _struct(name: str, fields: Mapping[str, Any], *left_out: str, optional: Sequence[Any] = ()) -> Any:
    required = [(field, kind) for field, kind in fields.items() if field not in left_out]
    return msgspec.defstruct(name, [*required, *optional], forbid_unknown_fields=True)


def _list_of(item: Any) -> Any:
    """Return the type of a list of structs that are made here, which a type checker doesn't know."""
    return list[item]


def schema_text(what: str) -> str:
    """Return a schema as JSON."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": TITLES[what]}
    return json.dumps(schema | msgspec.json.schema(type_of(what)), indent=1) + "\n"
