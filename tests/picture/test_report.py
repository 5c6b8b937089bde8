"""A report as text and for machines, from findings written here and from dumps."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from shardviz.check.report import NotChecked, Report, grouped
from shardviz.check.run import report_on
from shardviz.dump.dump import Dump, dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.machine import report_github, report_json, report_junit
from shardviz.picture.text.report import findings_lines, listed_rows, report_lines, summary_line, summary_lines
from shardviz.picture.text.terminal import Terminal
from tests.check import steps
from tests.check.steps import WANTED, Step, on_all
from tests.dumps import Made, make_dump
from tests.findings import finding_of
from tests.picture.golden import check_golden

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.records.base import Role
    from shardviz.explain.finding import Finding

MESH = parse_mesh("fsdp=2,tp=4")
TERMINAL = Terminal(80)


def swapped(tensor: str) -> Finding:
    return finding_of(
        kind="misordered",
        severity="error",
        tensor=tensor,
        ranks=(1, 2, 3, 4, 5, 6),
        sentence="6 of 8 ranks hold rows other than those that they claim",
        claimed="[16/fsdp/tp, 8]",
        held="[16/tp/fsdp, 8]",
        intended="[16/tp/fsdp, 8]",
        cause="FSDP2 split what tensor parallel had split before, and the placements are read left to right",
        fix="label the local tensors by (_StridedShard(0, split_factor=4), Shard(0))",
        refs=("pytorch#129229", "pytorch#129206"),
    )


LATE = finding_of("incomplete", "warning", "", (3,), "rank 3 wrote no file")
WEIRD = "[red]w\x1b[31m:100%,\n"
ODD = replace(swapped(WEIRD), sentence=f"6 of 8 ranks hold rows of {WEIRD} other than those that they claim")


def report(*findings: Finding, not_checked: tuple[NotChecked, ...] = (), num_tensors: int = 12) -> Report:
    return Report(8, num_tensors, tuple(grouped(findings)), not_checked)


def test_a_cause_of_neighboring_findings_is_printed_once() -> None:
    others = [replace(swapped(f"layers.{number}.w"), sentence=f"{number} ranks hold other rows") for number in (2, 3)]
    text = TERMINAL.render(findings_lines([swapped("w"), *others, LATE, LATE], TERMINAL))
    assert text.count("FSDP2 split") == text.count("fix ") == text.count("pytorch#129229") == 1
    assert (
        re.findall(r"\d ranks hold other rows\n(?:  (?:claimed|held|intended) .*\n)+  cause +(.*)", text)
        == ["as above"] * 2
    )


def dump(tmp_path: Path, tensors: dict[str, Made | str]) -> Dump:
    return dump_of(read_files(make_dump(tmp_path / "d.shardviz", MESH, tensors)))


def test_the_report_of_a_clean_dump(tmp_path: Path) -> None:
    layers: dict[str, Made | str] = {
        f"layers.{layer}.{name}.weight": layout
        for layer in range(4)
        for name, layout in (("wq", "[16/tp/fsdp, 8]"), ("wo", "[8/fsdp, 16/tp]"), ("norm", "[9/fsdp]"))
    }
    clean = dump(tmp_path, {"embed.weight": "bfloat16[100/tp/fsdp, 8]", **layers})
    check_golden("report_clean", TERMINAL.render(report_lines(clean, report_on(clean), TERMINAL)))


def test_the_report_of_a_dump_with_findings(tmp_path: Path) -> None:
    layers: dict[str, Made | str] = {f"layers.{layer}.w": "[16/fsdp/tp, 8]" for layer in range(4)}
    broken = dump(tmp_path, {"embed": "[8/tp, 8]", **layers, "head": "[8, 8] +tp"})
    found = report(
        *(swapped(f"layers.{layer}.w") for layer in (0, 1, 3)),
        LATE,
        not_checked=(
            NotChecked("head", "a sum over tp is pending, so the values that ranks hold are not ids", "order"),
        ),
        num_tensors=6,
    )
    check_golden("report_findings", TERMINAL.render(report_lines(broken, found, TERMINAL)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grad": 2}, "  its gradient"),
        ({"grad": 2, "param": 3}, "  its gradient"),
        ({"param": 3}, "  its next value"),
        ({}, ""),
    ],
)
def test_a_weight_that_is_in_order_says_which_result_of_the_step_is_not(
    tmp_path: Path, changes: dict[Role, int], words: str
) -> None:
    step = Step(tmp_path)
    for rank in steps.MESH.ranks:
        step.put(rank, "w", "param", "initial", WANTED)
    step.add("w", "grad", on_all(WANTED * changes.get("grad", 1)))
    step.add("w", "param", on_all(WANTED * changes.get("param", 1))).put(0, "w", "param", "updated", WANTED)
    made = step.dump()
    ((_, row), *_) = listed_rows(made, report_on(made))
    assert row.local == f"{list(WANTED.shape)}{words}"


def test_findings_that_differ_in_more_than_the_layer_stay_apart() -> None:
    other = finding_of("misordered", "error", "layers.2.w", (1,), "1 of 8 ranks holds other rows")
    text = TERMINAL.render(findings_lines(grouped([swapped("layers.0.w"), other, swapped("layers.1.w")]), TERMINAL))
    assert [row for row in text.splitlines() if "misordered" in row] == [
        "✗ misordered  layers.[0-1].w  ranks 1-6",
        "✗ misordered  layers.2.w  rank 1",
    ]


def test_a_fix_to_copy_is_not_broken_in_two() -> None:
    text = Terminal(50).render(findings_lines([swapped("w")], Terminal(50)))
    assert "(_StridedShard(0, split_factor=4), Shard(0))" in text


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (report(), "✓ all 12 tensors are in order on 8 ranks"),
        (report(num_tensors=1), "✓ the tensor is in order on 8 ranks"),
        (report(num_tensors=0), "? the dump of 8 ranks has no tensors"),
        (report(swapped("a"), swapped("b"), LATE), "✗ 2 findings in 2 of 12 tensors on 8 ranks"),
        (
            report(num_tensors=0, not_checked=(NotChecked("a", "no ids", "order"),)),
            "? the dump of 8 ranks has no tensors; 1 tensor not checked",
        ),
        (report(LATE), "✗ 1 finding on 8 ranks"),
        (
            report(not_checked=(NotChecked("a", "no ids", "order"),)),
            "? no findings in 12 tensors on 8 ranks; 1 tensor not checked",
        ),
        (
            report(swapped("a"), not_checked=(NotChecked("b", "no ids", "order"),)),
            "✗ 1 finding in 1 of 12 tensors on 8 ranks; 1 tensor not checked",
        ),
    ],
)
def test_the_last_line_sums_up_and_never_hides_what_was_not_checked(found: Report, line: str) -> None:
    assert summary_line(found, TERMINAL).plain == line


def test_a_run_without_findings_says_what_was_not_compared_and_is_good_all_the_same(tmp_path: Path) -> None:
    clean = dump(tmp_path, {"w": "[8/tp]"})
    text = TERMINAL.render(report_lines(clean, report_on(clean), TERMINAL))
    assert text.splitlines()[-1] == "✓ the tensor is in order on 8 ranks; not compared: a training step"
    assert report_on(clean).not_checked == ()


def test_what_a_step_put_out_is_not_counted_as_a_tensor_of_the_model() -> None:
    found = report(swapped("a"), swapped("loss"), swapped("output"))
    text = summary_line(found, TERMINAL, {"loss", "output"}).plain
    assert text == "✗ 1 finding in 1 of 12 tensors and 2 results of the step on 8 ranks"
    only = summary_line(report(swapped("loss")), TERMINAL, {"loss", "output"}).plain
    assert only == "✗ 1 finding in 1 result of the step on 8 ranks"


def test_names_with_markup_and_control_characters_are_shown_as_text(tmp_path: Path) -> None:
    odd = dump(tmp_path, {WEIRD: "[8/tp]"})
    text = TERMINAL.render(report_lines(odd, report(ODD, num_tensors=1), TERMINAL))
    assert text.count("[red]w\\u001b[31m:100%,\\u000a") == 3
    assert "\x1b" not in text


def test_json_has_each_finding_with_the_fields_of_the_format() -> None:
    found = report(swapped("a"), LATE, not_checked=(NotChecked("b", "no ids", "order"),))
    read = json.loads(report_json(found))
    assert list(read) == ["schema", "num_ranks", "num_tensors", "findings", "not_checked"]
    assert (read["schema"], read["num_ranks"], read["num_tensors"]) == (1, 8, 12)
    assert [finding["tensor"] for finding in read["findings"]] == ["a", ""]
    assert read["findings"][0]["refs"] == ["pytorch#129229", "pytorch#129206"]
    assert read["not_checked"] == [{"tensor": "b", "why": "no ids", "about": "order"}]


def test_github_gets_one_escaped_line_a_finding() -> None:
    text = report_github(report(ODD, LATE, not_checked=(NotChecked("b", "50% of, ids", "order"),)))
    first, second, third = text.splitlines()
    assert first.startswith(
        "::error title=shardviz%3A misordered [red]w\\u001b[31m%3A100%25%2C\\u000a::6 of 8 ranks hold rows of "
        "[red]w\\u001b[31m:100%25,\\u000a other than those that they claim%0Aclaimed: [16/fsdp/tp, 8]%0Aheld: "
    )
    assert second == "::warning title=shardviz%3A incomplete::rank 3 wrote no file%0Asee: shardviz explain told"
    assert third == "::notice title=shardviz%3A not checked::b: 50%25 of, ids"


def test_junit_is_valid_xml_with_a_case_for_every_tensor() -> None:
    found = report(ODD, LATE, not_checked=(NotChecked("b", "no ids", "order"),))
    suite = ElementTree.fromstring(report_junit(found, ["a", WEIRD, "b"]))
    assert {key: suite.get(key) for key in ("tests", "failures", "skipped")} == {
        "tests": "4",
        "failures": "2",
        "skipped": "1",
    }
    names = {case.get("name"): [part.tag for part in case] for case in suite}
    assert names == {"a": [], "[red]w\\u001b[31m:100%,\n": ["failure"], "b": ["skipped"], "(dump)": ["failure"]}


def test_what_else_fits_has_a_row_of_its_own_in_every_format_and_no_wording_is_taken_for_it() -> None:
    named = replace(swapped("a; this fits as well: b"), also=("each shard transposed",))
    assert "  or        each shard transposed" in TERMINAL.render(findings_lines([named], TERMINAL)).splitlines()
    assert "%0Aor: each shard transposed" in report_github(report(named))
    assert "\nor: each shard transposed" in report_junit(report(named), [named.tensor])
    (read,) = json.loads(report_json(report(named)))["findings"]
    assert (read["also"], read["summary"]) == (["each shard transposed"], named.sentence)
    alone = replace(named, also=())
    assert "\n  or " not in TERMINAL.render(findings_lines([alone], TERMINAL))
    assert "or: " not in report_github(report(alone)) + report_junit(report(alone), [alone.tensor])


def test_clauses_after_the_sentence_are_part_of_the_summary() -> None:
    told = replace(swapped("a"), details=("at [0] of the shard rank 0 has 1, rank 1 2",))
    (read,) = json.loads(report_json(report(told)))["findings"]
    assert read["summary"] == told.summary == f"{told.sentence}; {told.details[0]}"
    assert "details" not in read


def test_a_report_comes_out_of_another_process_as_it_went_in() -> None:
    found = report(
        replace(swapped("a"), details=("an example",)), LATE, not_checked=(NotChecked("b", "no ids", "order"),)
    )
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_tensor_of_which_a_rank_left_no_file_is_not_said_to_be_in_order(tmp_path: Path) -> None:
    tensors = {"cut": "[8/tp, 4]", "bias": "[8]"}
    files = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), tensors)
    (files / "rank_00002.json").unlink()
    dump = dump_of(read_files(files, strict=False))
    report = report_on(dump)
    assert {name: row.verdict for name, row in listed_rows(dump, report)} == {"cut": "unknown", "bias": "unknown"}
    assert report.reasons == ["cut, bias: no readable file of rank 2"]
    whole = dump_of(read_files(make_dump(tmp_path / "e.shardviz", parse_mesh("tp=4"), tensors)))
    assert {row.verdict for _, row in listed_rows(whole, report_on(whole))} == {"good"}


def test_many_names_of_one_finding_are_wrapped_at_the_terminals_width() -> None:
    names = ("embed.weight", "layers.0.attn.wqkv.weight", "layers.0.up.weight", "layers.1.down.bias", "head.weight")
    one = finding_of("misordered", "error", names[0], (0, 1), "rows are elsewhere", held="[8/tp]")
    whole = replace(one, members=tuple(replace(one, tensor=name) for name in names))
    lines = [text.plain for text in findings_lines([whole], Terminal(width=80))]
    at = next(number for number, text in enumerate(lines) if text.startswith("  tensors "))
    assert len(lines[at]) <= 80
    assert lines[at + 1].startswith("            ")
    assert "head.weight" in lines[at + 1]


def test_what_was_not_compared_comes_below_the_verdict_where_both_do_not_fit() -> None:
    whole, things = report(), ["activations", "optimizer state"]
    assert [row.plain for row in summary_lines(whole, Terminal(100), uncompared=things)] == [
        summary_line(whole, Terminal(100), (), things).plain
    ]
    assert [row.plain for row in summary_lines(whole, Terminal(50), uncompared=things)] == [
        summary_line(whole, Terminal(50)).plain,
        "  not compared: activations, optimizer state",
    ]


def test_findings_about_results_of_a_run_without_stamps_are_counted_alone() -> None:
    found = summary_line(report(swapped("w"), num_tensors=0), TERMINAL).plain
    assert " 1 finding in 1 tensor on " in found
