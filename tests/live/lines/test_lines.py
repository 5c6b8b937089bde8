"""The first wrong line of a module is named, and right programs are silent."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from shardviz import probe_files
from shardviz.check.run import report_on
from shardviz.check.step.lines.types import table_of
from shardviz.cli import main
from shardviz.commands.probe import QUESTION
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.write import prepare_folder
from shardviz.layout.mesh import parse_mesh
from shardviz.live.job import ProbeJob
from shardviz.picture.html.page import html
from shardviz.tui.widgets.finding_card import finding_body
from tests.lanes import at_night, recorded
from tests.live import standing
from tests.live.lines.cases import CASES, STEP_CASES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardviz.dump.dump import Dump
    from tests.live.lines.cases import Case

BY_NAME = {case.name: case for case in CASES}
STEPS_BY_NAME = {case.name: case for case in STEP_CASES}
BY_DAY = ("no sum", "sum without its backward", "loss: own exponentials", "optimizer: trust by shard")
"""One forward, one backward, a loss and an optimizer."""


def _but_two(names: Iterable[str], mark: pytest.MarkDecorator) -> list[object]:
    by_day = [name for name in names if name in BY_DAY]
    return [*by_day, *at_night([name for name in names if name not in by_day], mark)]


def run(source: str, mesh: str, folder: Path) -> Dump:
    """Run a program as `shardviz probe` does, on ranks that stand ready."""
    path = folder / "program.py"
    path.write_text(source)
    found = probe_files.find(str(path))
    job = ProbeJob(found, parse_mesh(mesh, found.axes), prepare_folder(folder / "program.shardviz"))
    standing.run(replace(job, question=QUESTION))
    return dump_of(read_files(job.folder))


@pytest.mark.parametrize("name", _but_two(BY_NAME, recorded))
def test_the_first_wrong_line_of_a_module_is_named(name: str, tmp_path: Path) -> None:
    case: Case = BY_NAME[name]
    dump = run(case.wrong, case.mesh, tmp_path)
    findings = [finding for finding in report_on(dump).findings if finding.severity == "error"]
    assert findings
    places = {finding.line for finding in findings if finding.line}
    numbers = {f"program.py:{at}" for at, line in enumerate(case.wrong.splitlines(), 1) if case.line in line}
    assert places <= numbers, f"named {places}"
    assert places, [finding.summary for finding in findings]
    assert any(case.line in finding.summary for finding in findings)
    table = table_of(dump)
    assert table is not None
    assert {row.place for row in table.rows if row.is_wrong} == places


@pytest.mark.parametrize("name", _but_two(STEPS_BY_NAME, recorded))
def test_the_first_wrong_line_of_a_step_is_named(name: str, tmp_path: Path) -> None:
    case = STEPS_BY_NAME[name]
    findings = report_on(run(case.wrong, case.mesh, tmp_path)).findings
    (finding,) = [finding for finding in findings if finding.severity == "error"]
    numbers = [at for at, line in enumerate(case.wrong.splitlines(), 1) if case.line in line]
    assert [finding.line] == [f"program.py:{at}" for at in numbers]
    assert case.line in finding.summary or finding.line in finding.cause


@pytest.mark.parametrize("name", _but_two(BY_NAME | STEPS_BY_NAME, recorded))
def test_a_right_program_has_no_finding_and_no_lines(name: str, tmp_path: Path) -> None:
    case = (BY_NAME | STEPS_BY_NAME)[name]
    dump = run(case.right, case.mesh, tmp_path)
    assert report_on(dump).findings == ()
    assert not any(record.lines for record in dump.files.ranks.values())


def test_what_is_printed_of_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = BY_NAME["no sum"]
    dump = run(
        case.wrong.replace("out = out + self.bias", "out = out + self.bias  # <b>[bold]{axis}"), case.mesh, tmp_path
    )
    folder = str(dump.files.path)
    assert main(["check", folder]) == 1
    text = " ".join(capsys.readouterr().out.split())
    line = next(at for at, line in enumerate(case.wrong.splitlines(), 1) if "out = F.linear(h, self.down)" in line)
    assert f"program.py:{line} `out = F.linear(h, self.down)` gives each rank one term of a sum over tp" in text
    assert f"line {line + 2} `out = out + self.bias # <b>[bold]{{axis}}` uses it as the whole" in text
    assert main(["check", folder, "--format", "json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["line"], finding["cause_id"]) == (f"program.py:{line + 2}", "unsummed-line")
    card = StringIO()
    Console(file=card, width=400).print(finding_body(report_on(dump).findings[0]))
    assert "`out = out + self.bias  # <b>[bold]{axis}`" in card.getvalue()
    page = html(dump, report_on(dump))
    assert "self.bias  # &lt;b&gt;[bold]{axis}" in page
    assert "# <b>" not in page
    assert main(["show", folder, "block", "--step", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["lines"]
    assert [row["types"]["tp"] for row in rows if row["line"] == f"program.py:{line}"] == ["partial"]
    assert main(["show", folder, "block", "--step"]) == 0
    assert "first wrong line" in capsys.readouterr().out
    assert main(["show", folder, "last", "--step"]) == 0
    printed = capsys.readouterr()
    assert "last  Linear" in printed.out
    assert "lines are kept of the first wrong module: shardviz show" in printed.err
    assert main(["show", folder, "lost", "--step"]) == 2
    assert "the step called no module lost\nHint: did you mean last?" in capsys.readouterr().err
    (dump.files.path / "rank_00001.json").unlink()
    assert main(["check", folder]) == 1
    assert "which line of block goes wrong first: no readable file of rank 1" in capsys.readouterr().out


def test_types_of_lines_are_measured(tmp_path: Path) -> None:
    case = BY_NAME["sum without its backward"]
    table = table_of(run(case.wrong, case.mesh, tmp_path))
    assert table is not None
    types = {(row.source, row.function): row.types["tp"] for row in table.rows}
    assert types["squares = h.square().sum(-1, keepdim=True)", "sum"] == "partial"
    assert types["squares = summed(squares, self.group)", "all_reduce"] == "replicate"
    assert types["h = h * torch.rsqrt(squares / 32)", "mul"] == "shard(2)"
    assert types["out = out + self.bias", "add"] == "invariant"
