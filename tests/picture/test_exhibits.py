"""What a finding is seen by, in text, SVG and HTML: the right cells are marked, nothing is read as markup."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.step import CallRecord
from shardviz.dump.records.tensors import GatherRecord, LayoutRecord, Position
from shardviz.dump.write import rank_file
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.exhibits.exhibit import (
    MOST_ROWS,
    Cell,
    Exhibit,
    Row,
    columns_of,
    cut_to,
    due_and_held,
    exhibit,
    title_of,
)
from shardviz.picture.exhibits.of_finding import exhibit_of
from shardviz.picture.html.page import rank_table
from shardviz.picture.html.parts import exhibit_table
from shardviz.picture.model.subject import of_tensor
from shardviz.picture.svg.map import exhibit_drawing
from shardviz.picture.svg.page import svg
from shardviz.picture.text.page import page_lines
from shardviz.picture.text.ranks import exhibit_lines, rank_lines
from shardviz.picture.text.terminal import ASCII, Terminal
from tests.check.records import add_values, change_rank, change_run
from tests.check.steps import WANTED, Step, on_all
from tests.dumps import Made, make_dump
from tests.findings import finding_of

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.report import Report
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding
    from shardviz.picture.model.subject import Subject

HOSTILE = "<b>\x1b[31m[bold]"
ONE = Exhibit("a caption", ("", "has", "off"), (Row("rank 0", (Cell("1.5", is_wrong=True), Cell("·▁█"))),), 3)


def checked(tmp_path: Path, tensor: Made, mesh: str = "tp=2") -> tuple[Dump, Report]:
    dump = dump_of(read_files(make_dump(tmp_path / "d.shardviz", parse_mesh(mesh), {"w": tensor})))
    return dump, report_on(dump)


def of_kind(report: Report, kind: str) -> Finding:
    return next(finding for finding in report.findings if finding.kind == kind)


def test_a_shard_out_of_order_is_shown_position_by_position(tmp_path: Path) -> None:
    ids = np.array([[1, 2], [5, 6], [3, 4], [7, 8]])
    dump, report = checked(tmp_path, Made("[8/tp, 2]", ids={0: ids}))
    found = exhibit_of(dump, report.findings[0], report.laid_out)
    assert found is not None
    due, has = found.rows
    assert [cell.text for cell in due.cells] == ["0", "1", "2", "3"]
    assert [(cell.text, cell.is_wrong) for cell in has.cells] == [("0", False), ("2", True), ("1", True), ("3", False)]


def test_whole_shards_on_other_ranks_are_left_to_the_map(tmp_path: Path) -> None:
    dump, report = checked(tmp_path, Made("[8/fsdp/tp, 2]", "[8/tp/fsdp, 2]"), "fsdp=2,tp=2")
    assert exhibit_of(dump, of_kind(report, "misordered"), report.laid_out) is None


def test_a_page_of_a_healthy_tensor_has_no_word_of_findings(tmp_path: Path) -> None:
    dump, report = checked(tmp_path, Made("[8/tp, 2]"))
    text = [row.plain for row in page_lines(of_tensor(dump, dump.tensors[0], "w", report), Terminal())]
    assert text == [row.plain for row in page_lines(of_tensor(dump, dump.tensors[0], "w"), Terminal())]
    assert text[0].startswith("w  float32")


def test_without_a_check_a_misordered_tensor_is_drawn_and_not_named(tmp_path: Path) -> None:
    dump, _ = checked(tmp_path, Made("[8/fsdp/tp, 2]", "[8/tp/fsdp, 2]"), "fsdp=2,tp=2")
    assert of_tensor(dump, dump.tensors[0], "w").findings == ()


def test_rows_beyond_the_first_are_counted() -> None:
    rows = [Row(str(at), (Cell("x"),)) for at in range(MOST_ROWS + 2)]
    found = exhibit("c", ("", "x"), rows)
    assert found is not None
    assert (len(found.rows), found.left_out) == (MOST_ROWS, 2)
    assert exhibit("c", ("", "x"), []) is None


@pytest.mark.parametrize(("glyphs", "wrong", "strip"), [(None, "✗ 1.5", "·▁█"), (ASCII, "x 1.5", ".18")])
def test_text_marks_wrong_cells_in_any_alphabet(glyphs: object, wrong: str, strip: str) -> None:
    terminal = Terminal() if glyphs is None else Terminal(glyphs=ASCII)
    plain = "\n".join(row.plain for row in exhibit_lines(ONE, terminal))
    assert wrong in plain
    assert strip in plain
    assert "3 more rows" in plain


def test_columns_that_do_not_fit_are_left_out_from_the_right() -> None:
    wide = Exhibit("c", ("", *map(str, range(9))), (Row("rank 0", tuple(Cell("x" * 12) for _ in range(9))),))
    lines = exhibit_lines(wide, Terminal(60))
    assert max(row.cell_len for row in lines) <= 60
    assert [row.plain.endswith("  …") for row in lines] == [False, True, False]
    assert not any("…" in row.plain for row in exhibit_lines(wide, Terminal(200)))


def test_titles_in_ascii_do_not_move_the_columns() -> None:
    rows = tuple(Row(title, (Cell("1.5", is_wrong=True), Cell("2"))) for title in ("ranks 0…28 step 4", "ranks 1-3"))
    lines = Terminal(glyphs=ASCII).render(exhibit_lines(Exhibit("c", ("", "a", "b"), rows), Terminal(glyphs=ASCII)))
    _, head, *others = lines.splitlines()
    assert "ranks 0..28 step 4  x 1.5  2" in others[0]
    assert {line.index("x 1.5") + 2 for line in others} == {head.index("a")}


def test_names_are_not_read_as_markup() -> None:
    hostile = Exhibit("c", ("", HOSTILE), (Row(HOSTILE, (Cell(HOSTILE, is_wrong=True),)),))
    for drawn in (exhibit_table(hostile), exhibit_drawing(hostile).markup):
        assert "<b>" not in drawn
        assert "\x1b" not in drawn
    assert not any("\x1b" in row.plain for row in exhibit_lines(hostile, Terminal()))


def test_a_bias_that_is_added_too_often_lies_beside_the_excess(tmp_path: Path) -> None:
    bias = np.array([0.5, 1.0, -1.0, 2.0])
    step = Step(tmp_path).add("output", "output", on_all(WANTED + 3 * bias))
    step.put(0, "out.bias", "param", "reference", bias)
    dump = step.dump()
    (finding,) = report_on(dump).findings
    found = exhibit_of(dump, finding)
    assert found is not None
    assert found.heads[-3:] == ("out.bias", "times out.bias", "wanted")
    assert [row.cells[-2] for row in found.rows] == [Cell("4", is_wrong=True)] * len(bias)
    assert [row.cells[-3].text for row in found.rows] == ["0.5", "1", "-1", "2"]


@pytest.mark.parametrize(("columns", "more"), [(12, "4 more elements"), (8, "0 more elements")])
def test_of_a_long_vector_the_elements_that_are_left_out_are_counted(tmp_path: Path, columns: int, more: str) -> None:
    bias, wanted = np.linspace(0.5, 2.0, columns), np.linspace(-2.0, 3.0, 4 * columns).reshape(4, columns)
    step = Step(tmp_path).add("output", "output", dict.fromkeys(range(4), wanted + 3 * bias), wanted)
    dump = step.put(0, "out.bias", "param", "reference", bias).dump()
    found = exhibit_of(dump, report_on(dump).findings[0])
    assert found is not None
    assert len(found.rows) == 8
    assert found.more == more


def test_parts_that_lack_a_sum_lie_above_their_sum(tmp_path: Path) -> None:
    shares = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    dump = Step(tmp_path).add("w", "grad", {rank: share * WANTED for rank, share in shares.items()}).dump()
    finding = of_kind(report_on(dump), "unreduced-gradient")
    found = exhibit_of(dump, finding)
    assert found is not None
    assert found.caption == "one element of w's gradient on ranks 0-3, and their sum over dp and tp"
    assert [row.title for row in found.rows] == ["rank 0", "rank 1", "rank 2", "rank 3", "sum"]
    assert [row.cells[-2].text for row in found.rows] == ["0.1", "0.2", "0.3", "0.4", "1"]
    assert [row.cells[-2].is_wrong for row in found.rows] == [True] * 4 + [False]
    assert [row.title for row in cut_to(found, 3).rows] == ["rank 0", "rank 1", "sum"]
    assert cut_to(found, 3).left_out == 2


def test_values_that_no_sum_makes_right_lie_beside_their_reference_alone(tmp_path: Path) -> None:
    held = {0: WANTED, 1: WANTED + 1, 2: WANTED, 3: WANTED - 3}
    dump = Step(tmp_path).add("w", "grad", held).dump()
    found = exhibit_of(dump, of_kind(report_on(dump), "wrong-value"))
    assert found is not None
    assert not any(row.title in ("sum", "mean") for row in found.rows)


def test_segments_are_shown_as_each_rank_has_them_and_should(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=2"), {"w": "[24/tp, 8]"})
    change_run(folder, intended={"w": "[*/3/tp, *]"})
    dump = dump_of(read_files(folder))
    found = exhibit_of(dump, of_kind(report_on(dump), "wrong-segment"))
    assert found is not None
    assert found.heads == ("", "segment 0", "segment 1", "segment 2")
    due, has = found.rows[:2]
    assert (due.title, [cell.text for cell in due.cells]) == ("rank 0 should hold", ["[0:4]", "[8:12]", "[16:20]"])
    assert has.cells == (Cell("[0:8]", is_wrong=True), Cell("[8:12]"), Cell("nothing", is_wrong=True))


def test_a_layout_without_segments_is_left_to_the_map(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=2"), {"w": "[24/tp, 8]"})
    change_run(folder, intended={"w": "[*, */tp]"})
    dump = dump_of(read_files(folder))
    assert exhibit_of(dump, of_kind(report_on(dump), "wrong-placement")) is None


def test_copies_of_a_repeated_shard_share_its_row(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("dp=2,tp=2"), {"w": "[16/tp, 3]"})
    values = np.random.default_rng(0).normal(size=(8, 3))
    add_values(folder, "w", "[16/tp, 3]", dict.fromkeys(range(4), values))
    dump = dump_of(read_files(folder))
    found = exhibit_of(dump, of_kind(report_on(dump), "identical-shards"))
    assert found is not None
    parts = [(row.title, row.cells[0].text) for row in found.rows]
    assert parts == [("ranks 0,2", "[0:8, 0:3]"), ("ranks 1,3", "[8:16, 0:3]")]
    assert [any(cell.is_wrong for cell in row.cells) for row in found.rows] == [True, True]


def test_ranks_that_claim_another_layout_are_shown_with_it(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), {"w": "[8/tp, 4]"})
    change_rank(folder, 3, layouts=(LayoutRecord(0, ("Replicate()",), (8, 4)),))
    dump = dump_of(read_files(folder))
    found = exhibit_of(dump, of_kind(report_on(dump), "wrong-placement"))
    assert found is not None
    assert [(row.title, row.cells) for row in found.rows] == [
        ("ranks 0-2", (Cell("[8/tp, 4]"),)),
        ("rank 3", (Cell("[8, 4]", is_wrong=True),)),
    ]


@pytest.mark.parametrize(
    ("gathered", "cells"),
    [
        (
            {"held": (((2, 4), (0, 2)),)},
            [("2 elements", "from [0]", "from [2]"), ("2 elements", "from [2]", "from [0]")],
        ),
        ({"runs": ((1, 1, 3), (9, 1, 1))}, [("1 element", "from [3]", "no element of the tensor")]),
        ({"runs": ((1, 1, 3),)}, [("4 elements", "3 elements")]),
        ({"error": "RuntimeError: no"}, [("4 elements", "raised RuntimeError: no")]),
    ],
)
def test_what_is_gathered_is_shown_as_expected_and_got(
    tmp_path: Path, gathered: dict[str, Any], cells: list[tuple[str, ...]]
) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=2"), {"w": "[4/tp]"})
    for rank in range(2):
        change_rank(folder, rank, gathered=(GatherRecord("w", "full_tensor", **gathered),))
    dump = dump_of(read_files(folder))
    found = exhibit_of(dump, of_kind(report_on(dump), "collective-mismatch"))
    assert found is not None
    assert found.caption == "what full_tensor() gives, stretch by stretch"
    assert [tuple(cell.text for cell in row.cells) for row in found.rows] == cells
    assert all(row.title == "ranks 0-1" for row in found.rows)
    assert all(row.cells[-1].is_wrong for row in found.rows)


def test_a_plain_tensor_marks_what_all_ranks_hold_and_what_none_does(tmp_path: Path) -> None:
    first = np.arange(1, 4)
    dump, report = checked(tmp_path, Made(None, shape=(12,), ids=dict.fromkeys(range(4), first)), "tp=4")
    text = "".join(row.plain + "\n" for row in page_lines(of_tensor(dump, dump.tensors[0], "w", report), Terminal()))
    assert "✗ 0-3" in text
    assert "✗ nobody" in text
    assert "✗ held by too many ranks, or by none" in text


def test_copies_are_called_equal_only_where_they_were_compared(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=2"), {"w": "[8, 2]"})
    assert "equal copies along tp" in page_of(folder)
    change_rank(folder, 0, not_checked=(("w", "ids collapsed in bfloat16"),))
    assert "copies along tp" in page_of(folder)
    assert "equal" not in page_of(folder)


def page_of(folder: Path) -> str:
    dump = dump_of(read_files(folder))
    subject = of_tensor(dump, dump.tensors[0], "w", report_on(dump))
    return "".join(row.plain + "\n" for row in page_lines(subject, Terminal()))


def test_under_a_finding_about_values_nothing_reads_as_well(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=2"), {"w": "[8, 2]"})
    dump = dump_of(read_files(folder))
    right = of_tensor(dump, dump.tensors[0], "w", report_on(dump))
    wrong = replace(right, findings=(finding_of("wrong-value", "error", "w", (1,), "the gradient is off"),))
    text, drawn = drawn_as(right)
    assert "held     as claimed\n" in text
    assert "✓ as claimed" in drawn
    text, drawn = drawn_as(wrong)
    assert "held     placed as claimed\n" in text
    assert "by its placements 2 ranks along tp share each part" in text
    assert "✓" not in text + drawn
    assert "hold each part" not in text + drawn
    assert "   0      [0:8, 0:2]\n✗  1      [0:8, 0:2]\n" in text
    assert "✗ named by the finding" in rank_table(wrong)
    assert "✗" not in rank_table(right)


def drawn_as(subject: Subject) -> tuple[str, str]:
    rows = [*page_lines(subject, Terminal()), *rank_lines(subject, Terminal())]
    return "".join(row.plain.rstrip() + "\n" for row in rows), svg(subject)


def test_columns_that_say_nothing_are_left_out() -> None:
    found = exhibit("c", ("", "element", "has"), [Row("rank 0", (Cell(""), Cell("1"))), Row("rank 1", (Cell(""),))])
    assert found is not None
    assert found.heads == ("", "has")
    assert [row.cells for row in found.rows] == [(Cell("1"),), ()]


def test_marks_stand_before_numbers_whose_points_are_in_line() -> None:
    cells = (Cell("-11.5", is_wrong=True), Cell("3"), Cell("0.25", is_right=True), Cell("1/128"), Cell(""))
    found = Exhibit("c", ("", "has"), tuple(Row(f"rank {at}", (cell,)) for at, cell in enumerate(cells)))
    column = ["  has", "✗ -11.5", "    3", "✓   0.25", "    1/128", ""]
    assert columns_of(found) == [column]
    assert [row.plain.rstrip()[11:] for row in exhibit_lines(found, Terminal())[1:]] == column
    for text in column[1:-1]:
        assert f">{text}</td>" in exhibit_table(found)
        assert f">{text}</text>" in exhibit_drawing(found).markup


def test_rows_of_another_group_are_set_apart() -> None:
    rows = tuple(Row(f"rank {rank}", (Cell("1"),), is_apart=rank in (0, 2)) for rank in range(4))
    found = Exhibit("c", ("", "has"), rows)
    assert [row.plain.strip()[:6] for row in exhibit_lines(found, Terminal())[2:]] == [
        "rank 0",
        "rank 1",
        "",
        "rank 2",
        "rank 3",
    ]
    assert exhibit_table(found).count('class="apart"') == 1
    assert exhibit_drawing(found).height == exhibit_drawing(replace(found, rows=rows[:2])).height + 3 * 18


def test_no_row_is_left_out_for_a_line_that_says_so() -> None:
    rows = [Row(f"rank {rank}", (Cell("1"),)) for rank in range(MOST_ROWS + 1)]
    found = exhibit("c", ("", "has"), rows, noun="rank")
    assert found is not None
    assert (len(found.rows), found.left_out) == (MOST_ROWS + 1, 0)
    assert cut_to(found, MOST_ROWS - 1).more == "2 more ranks"


def test_what_is_left_out_is_counted_in_ranks() -> None:
    rows = [Row(f"tp={at}", (Cell("1"),), count=128) for at in range(MOST_ROWS)]
    found = exhibit("c", ("", "has"), rows, 3, noun="rank", rest="all with these values")
    assert found is not None
    assert found.more == "3 more ranks, all with these values"
    assert cut_to(found, 4).more == "515 more ranks, all with these values"
    text = [row.plain.strip() for row in exhibit_lines(cut_to(found, 4), Terminal())]
    assert text[-1] == "… 515 more ranks, all with these values"


def test_what_a_rank_should_hold_is_not_cut_off_from_what_it_holds() -> None:
    mesh = parse_mesh("tp=8")
    rows = [row for rank in range(4) for row in due_and_held([rank], mesh, ["0", "1"], ["1", "0"])]
    found = cut_to(Exhibit("c", ("", "0", "1"), tuple(rows), noun="rank"), 5)
    assert [row.title for row in found.rows] == [
        *("rank 0 should hold", "rank 0 holds"),
        *("rank 1 should hold", "rank 1 holds"),
    ]
    assert found.more == "2 more ranks"


@pytest.mark.parametrize(
    ("ranks", "title"),
    [
        ([3], "rank 3 holds"),
        ([0, 64], "ranks 0,64 hold"),
        ([0, 5, 9, 17, 33, 40, 61, 70, 88, 99, 101, 130], "12 ranks 0,5,9,17,33,40,... hold"),
        ([*range(0, 256, 8)], "tp=0 hold"),
        ([*range(255)], "ranks 0-254 hold"),
    ],
)
def test_one_rank_holds_and_several_hold(ranks: list[int], title: str) -> None:
    _, held = due_and_held(ranks, parse_mesh("pp=4,dp=8,tp=8"), ["0"], ["1"])
    assert held.title == title


@pytest.mark.parametrize(
    ("swapped", "heads"), [(14, ("14", "15")), (3, tuple(map(str, range(3, 15)))), (0, tuple(map(str, range(12))))]
)
def test_positions_begin_where_a_long_shard_is_out_of_order(
    tmp_path: Path, swapped: int, heads: tuple[str, ...]
) -> None:
    order = [*range(swapped), swapped + 1, swapped, *range(swapped + 2, 16)]
    whole = np.arange(1, 33).reshape(32, 1)
    ids = {0: whole[order], 1: whole[16:]}
    dump, report = checked(tmp_path, Made("[32/tp, 1]", ids=ids))
    found = exhibit_of(dump, report.findings[0], report.laid_out)
    assert found is not None
    assert found.heads == ("local position", *heads)
    _, held = found.rows
    assert [cell.is_wrong for cell in held.cells] == [True, True, *[False] * (len(heads) - 2)]


def test_a_rank_that_is_in_order_in_all_positions_shown_is_counted(tmp_path: Path) -> None:
    whole = np.arange(1, 33).reshape(32, 1)
    ids = {0: whole[[1, 0, *range(2, 16)]], 1: whole[[*range(16, 30), 31, 30]]}
    dump, report = checked(tmp_path, Made("[32/tp, 1]", ids=ids))
    found = exhibit_of(dump, report.findings[0], report.laid_out)
    assert found is not None
    assert [row.title for row in found.rows] == ["rank 0 should hold", "rank 0 holds"]
    assert found.more == "1 more rank"


def test_only_shards_out_of_order_along_one_dim_stand_under_it(tmp_path: Path) -> None:
    whole = np.arange(1, 33).reshape(8, 4)
    ids = {0: whole[:4][[0, 2, 1, 3]], 1: whole[4:][:, [1, 0, 2, 3]]}
    dump, report = checked(tmp_path, Made("[8/tp, 4]", ids=ids))
    found = exhibit_of(dump, report.findings[0], report.laid_out)
    assert found is not None
    assert found.caption == "the global index along dim 0 at each local position"
    assert [row.title for row in found.rows] == ["rank 0 should hold", "rank 0 holds"]
    assert found.more == "1 more rank"


def test_ranks_of_a_large_mesh_are_named_by_their_place_on_it() -> None:
    mesh = parse_mesh("fsdp=128,tp=8")
    assert title_of(range(1, 1024, 8), mesh) == "tp=1 (128 ranks)"
    assert title_of(range(1024), mesh) == "all 1,024 ranks"
    assert title_of([517], mesh) == "rank 517 (fsdp=64, tp=5)"
    assert title_of([rank for rank in range(1024) if rank != 517], mesh) == "all but rank 517"
    assert title_of([8, 9, 10, 11], mesh) == "ranks 8-11"
    assert title_of([3], parse_mesh("fsdp=2,tp=2")) == "rank 3"
    assert title_of([0, 2], parse_mesh("fsdp=2,tp=2")) == "ranks 0,2"
    assert title_of([3000, 3001, 3010], mesh) == "ranks 3000-3001,3010"


def test_ranks_that_are_too_many_to_name_are_counted() -> None:
    assert title_of([3, 11, 19]) == "ranks 3,11,19"
    assert title_of([rank for rank in range(1024) if rank % 8 != 3]).startswith("896 ranks 0-2,")


def test_rows_without_room_are_counted_with_those_left_out() -> None:
    whole = Exhibit("a caption", ("", "has"), tuple(Row(f"rank {rank}", (Cell("1"),)) for rank in range(8)), 3)
    assert cut_to(whole, 8) is whole
    assert (len(cut_to(whole, 4).rows), cut_to(whole, 4).left_out) == (4, 7)


def test_ranks_that_were_numbered_otherwise_are_shown_by_coordinate_and_number(tmp_path: Path) -> None:
    made = make_dump(tmp_path / "d.shardviz", parse_mesh("fsdp=2,tp=2"), {"w": "[8/tp/fsdp]"})
    for rank in range(4):
        change_rank(made, rank, positions=(Position(0, (rank // 2, rank % 2), (rank // 2, 1 - rank % 2)),))
    dump = dump_of(read_files(made))
    report = report_on(dump)
    found = exhibit_of(dump, of_kind(report, "rank-order"), report.laid_out)
    assert found is not None
    assert [(row.title, *(cell.text for cell in row.cells)) for row in found.rows] == [
        ("ranks 0,2", "tp=0", "1"),
        ("ranks 1,3", "tp=1", "0"),
    ]
    assert all(row.cells[1].is_wrong for row in found.rows)


def test_ranks_without_a_file_are_named_by_their_place_on_the_mesh(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("fsdp=2,tp=2"), {"w": Made("[8/fsdp, 4/tp]")})
    (folder / rank_file(3)).unlink()
    dump = dump_of(read_files(folder))
    found = exhibit_of(dump, of_kind(report_on(dump), "incomplete"))
    assert found is not None
    assert [(row.title, *(cell.text for cell in row.cells)) for row in found.rows] == [
        ("rank 3", "fsdp=1, tp=1", "no file"),
        ("the other 3 ranks", "", "a file"),
    ]
    assert [cell.is_wrong for row in found.rows for cell in row.cells] == [False, True, False, False]


def test_a_rank_without_a_shard_is_shown_with_the_part_it_should_hold(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), {"w": Made("[8/tp, 4]")})
    change_rank(folder, 2, bodies=(), tensors=(), layouts=())
    dump = dump_of(read_files(folder))
    found = exhibit_of(dump, of_kind(report_on(dump), "incomplete"))
    assert found is not None
    assert [cell.text for cell in found.rows[0].cells] == ["tp=2", "[4:6, 0:4]", "no shard"]


def test_a_collective_is_shown_as_had_got_and_expected(tmp_path: Path) -> None:
    step = Step(tmp_path)
    for rank in (0, 1):
        step.put(rank, "sum.before", "activation", "step", [1.0 + rank])
        step.put(rank, "sum", "activation", "step", [3.0 - rank])
    step.dump()
    for rank in (0, 1):
        change_rank(tmp_path / "step", rank, calls=(CallRecord("sum", "all_reduce", (0, 1)),))
    dump = dump_of(read_files(tmp_path / "step"))
    found = exhibit_of(dump, of_kind(report_on(dump), "collective-mismatch"))
    assert found is not None
    assert found.caption == "all_reduce over ranks 0-1"
    assert [(row.title, *(cell.text for cell in row.cells)) for row in found.rows] == [
        ("rank 1", "[2]", "[2]", "[3]"),
        ("rank 0", "[1]", "[3]", ""),
    ]
    assert [cell.is_wrong for cell in found.rows[0].cells] == [False, True, False]
