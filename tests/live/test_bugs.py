"""Known silent bugs, live: each is found and rightly named, and what looks like them stays quiet."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shardviz import probe_files
from shardviz.check.run import report_on
from shardviz.cli import main
from shardviz.commands.show import overview
from shardviz.picture.html.page import html
from shardviz.picture.model.drawing import draw
from shardviz.picture.model.subject import of_tensor
from shardviz.picture.svg.page import svg
from shardviz.picture.text.page import page_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.tui.model.document import Document
from shardviz.tui.widgets.finding_card import finding_body
from tests.lanes import at_night, recorded
from tests.live.probing import run_probe

BUGS = [probe for probe in probe_files.shipped() if probe.name.startswith("bugs/")]
QUIET = [probe for probe in probe_files.shipped() if probe.name.startswith("quiet/")]
SAID = {
    "quiet/batch_norm": "the step on the whole batch: its loss is ",
    "quiet/hsdp_before_all_reduce": "its gradient: FSDP keeps it for a later backward",
}
"""How what was not checked of a quiet probe begins; of the others nothing is left out."""


def _first_of_each_kind():
    """Return a bug for each kind of finding, on as few ranks as there are."""
    first = {}
    for probe in sorted(BUGS, key=lambda probe: (math.prod(probe.mesh), len(probe.kinds))):
        for kind in probe.kinds:
            first.setdefault(kind, probe)
    return list({probe.name: probe for probe in first.values()}.values())


BY_DAY = _first_of_each_kind()


@pytest.mark.parametrize(
    "probe",
    [*BY_DAY, *at_night((probe for probe in BUGS if probe not in BY_DAY), recorded)],
    ids=lambda probe: probe.name,
)
def test_a_known_bug_is_found_and_named_and_nothing_else_is(probe, tmp_path):
    dump = run_probe(probe.name, ",".join(map(str, probe.mesh)), tmp_path / "dump")
    report = report_on(dump)
    assert {finding.kind for finding in report.findings} == set(probe.kinds)
    for finding in report.findings:
        assert finding.summary
        assert finding.cause
        assert finding.fix
        assert_is_seen(dump, report, finding)


def assert_is_seen(dump, report, finding):
    """The ranks of a finding are marked in every format, and nothing beside it says that all is well."""
    card = io.StringIO()
    document = Document(Path("dump"), dump, report)
    Console(file=card, width=100).print(finding_body(finding, document.exhibit(report.findings.index(finding))))
    whole = "".join(text.plain + "\n" for text in overview(dump, Terminal()))
    page = html(dump, report)
    seen = [one for one in finding.each if one.tensor in dump.first_captured]
    for one in seen:
        subject = of_tensor(dump, dump.first_captured[one.tensor], one.tensor, report)
        text = "".join(line.plain + "\n" for line in page_lines(subject, Terminal()))
        drawn = svg(subject)
        assert f"✗ {finding.kind}" in text
        bare = replace(subject, exhibits=())  # in whose last row what all ranks have together can be right
        assert "✓" not in "".join(line.plain for line in page_lines(bare, Terminal())) + svg(bare)
        assert "equal copies" not in text + drawn
        assert "✗" in card.getvalue() or draw(subject.sides, subject.shape).is_different, "nothing but ranks is marked"
        for rank in one.ranks:
            assert f"✗{rank}" in text
            assert f"✗ {rank}<" in drawn
            assert f"✗ {rank}<" in page
    if not seen:
        assert all("✗" in format_ for format_ in (whole, page, card.getvalue()))


@pytest.mark.parametrize("probe", [*QUIET[:2], *at_night(QUIET[2:], recorded)], ids=lambda probe: probe.name)
def test_what_looks_like_a_bug_and_is_none_stays_quiet(probe, tmp_path):
    report = report_on(run_probe(probe.name, ",".join(map(str, probe.mesh)), tmp_path / "dump"))
    assert report.findings == ()
    unseen = {one.why for one in report.not_checked}
    assert all(why.startswith(SAID.get(probe.name, "nothing")) for why in unseen)
    assert bool(unseen) == (probe.name in SAID)


def test_a_bug_that_needs_a_newer_torch_is_reported_and_the_others_are_scored(monkeypatch, capsys):
    one = next(probe for probe in BUGS if probe.name == "bugs/left_to_right_2d")
    known = [one, replace(one, name="bugs/of_tomorrow", torch=(99, 0))]
    monkeypatch.setattr(probe_files, "shipped", lambda: known)
    assert main(["probes", "--bugs"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 detected" in out
    assert "not run: probe bugs/of_tomorrow needs torch 99.0 or newer, found" in out
