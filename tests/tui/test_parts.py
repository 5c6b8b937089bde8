"""The parts that know nothing of widgets: where ranks stand, what is compared, what lies in memory, what is listed."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec import structs
from rich.cells import cell_len
from rich.console import Console

from shardviz.check.diff import compare
from shardviz.check.report import NotChecked, grouped
from shardviz.dump.costs import memory_table
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.tensors import Body, TensorRecord
from shardviz.errors import ShardvizError
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.exhibits.exhibit import Row, exhibit, plain
from shardviz.picture.model.holders import Holders
from shardviz.picture.model.sides import Sides
from shardviz.picture.model.subject import drawn_sides
from shardviz.picture.text.report import listed_rows
from shardviz.tui import web
from shardviz.tui.loading import checked
from shardviz.tui.model.document import MOST_KEPT, Document
from shardviz.tui.model.names import fitted
from shardviz.tui.model.pairs import RELATIONS, pairs
from shardviz.tui.model.rank import ids_beside, ids_in_memory, part_text, values_beside
from shardviz.tui.model.selection import Selection, carried_over, of_entry
from shardviz.tui.screens.rank_view import rank_text
from shardviz.tui.screens.view import SIDES
from shardviz.tui.widgets.finding_card import finding_body, no_findings_text
from shardviz.tui.widgets.frame import verdict_text
from shardviz.tui.widgets.mesh_grid import MeshPlan, drawn_side
from tests.dumps import Made, make_dump
from tests.findings import finding_of
from tests.plans import make_plan
from tests.tui.driving import PATIENCE, walk, walk_on
from tests.tui.steps import add_to_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.records.files import RankRecord

MESH = parse_mesh("fsdp=2,tp=4")


def document(path: Path, mesh: str, tensors: dict[str, Made | str]) -> Document:
    return checked(Document(path, dump_of(read_files(make_dump(path, parse_mesh(mesh), tensors)))))


@pytest.mark.parametrize("mesh", ["5", "2,3", "2,3,4", "2,2,3,2", "2,1,2,2,3"])
def test_every_rank_stands_at_one_place_of_the_mesh_and_is_found_there(mesh: str) -> None:
    plan = MeshPlan(parse_mesh(mesh))
    places = {}
    for row in range(plan.grid.num_rows):
        for col in range(plan.grid.num_cols):
            line, column = plan.lines[row], plan.columns[col]
            assert (plan.row_at(line), plan.col_at(column), plan.col_at(column + plan.cell - 1)) == (row, col, col)
            places[plan.grid.rank_at(row, col)] = (row, col)
    assert sorted(places) == sorted(plan.mesh.ranks)
    assert {
        rank: (row, col) for row, ranks in enumerate(plan.ranks.tolist()) for col, rank in enumerate(ranks)
    } == places
    assert all(plan.grid.row_and_col(rank) == place for rank, place in places.items())


def test_the_last_axis_runs_across_and_the_one_before_it_down() -> None:
    plan = MeshPlan(parse_mesh("pp=2,fsdp=2,tp=3"))
    assert [plan.grid.rank_at(1, col) for col in range(6)] == [3, 4, 5, 9, 10, 11]
    assert (plan.grid.row_title(1), plan.grid.position(0, 4), plan.grid.position(2, 4)) == ("fsdp=1", 1, 1)


def test_two_dumps_are_paired_by_name_with_what_differs(tmp_path: Path) -> None:
    here = document(tmp_path / "a.shardviz", "tp=2", {"same": "[4]", "held": "[4/tp]", "shape": "[4]", "here": "[2]"})
    changed = {"same": "[4]", "held": Made("[4/tp]", "[4]"), "shape": "[6]", "there": "[2]"}
    there = document(tmp_path / "b.shardviz", "tp=2", changed)
    found = pairs(here, there, compare(here.dump, there.dump))
    assert [(pair.title, pair.sign, pair.what) for pair in found] == [
        ("held", "≠", "held [4/tp] on (tp=2) → [4] on (tp=2)"),
        ("shape", "≠", "shape [4] → [6], and claimed"),
        ("here", "<", "only here"),
        ("there", ">", "only there"),
        ("same", "=", "same"),
    ]


def test_tensors_of_which_a_rank_was_not_read_are_not_called_the_same(tmp_path: Path) -> None:
    here = document(tmp_path / "a.shardviz", "tp=2", {"w": "[4/tp]"})
    make_dump(tmp_path / "b.shardviz", parse_mesh("tp=2"), {"w": "[4/tp]"})
    (tmp_path / "b.shardviz" / "rank_00001.json").unlink()
    there = checked(Document(tmp_path / "b.shardviz", dump_of(read_files(tmp_path / "b.shardviz"))))
    found = pairs(here, there, compare(here.dump, there.dump))
    assert [(pair.title, pair.sign, pair.what) for pair in found] == [
        ("w", "?", "the same on all ranks that were read")
    ]


def test_a_layer_that_differs_in_one_of_two_dumps_stands_apart_from_the_others(tmp_path: Path) -> None:
    names = [f"layers.{layer}.weight" for layer in range(4)]
    here = document(tmp_path / "a.shardviz", "tp=2", dict.fromkeys(names, "[4/tp]"))
    changed = {**dict.fromkeys(names, "[4/tp]"), names[1]: Made("[4/tp]", "[4]")}
    there = document(tmp_path / "b.shardviz", "tp=2", changed)
    found = pairs(here, there, compare(here.dump, there.dump))
    assert [(pair.title, RELATIONS[pair.sign]) for pair in found] == [
        ("layers.1.weight", "different"),
        ("layers.[0,2-3].weight", "same"),
    ]
    assert [there.entries[pair.there].title for pair in found] == ["layers.1.weight", "layers.[0,2-3].weight"]


def test_findings_that_differ_in_the_layer_they_name_are_one(tmp_path: Path) -> None:
    names = [f"layers.{layer}.weight" for layer in range(32)]
    doc = document(tmp_path / "a.shardviz", "tp=2", dict.fromkeys(names, "[4/tp]"))
    alike = [finding_of("misordered", "error", name, (0,), "one row is elsewhere") for name in names]
    other = finding_of("misordered", "error", names[7], (0,), "two rows are elsewhere")
    changed = replace(doc, report=replace(doc.report, findings=tuple(grouped([*alike, other]))))
    assert [(finding.title, finding.summary) for finding in changed.findings] == [
        ("layers.[0-31].weight", "32 tensors alike: one row is elsewhere"),
        ("layers.7.weight", "two rows are elsewhere"),
    ]
    assert changed.by_finding == {0: 0, 1: 0}
    assert changed.entries[0].findings == (0, 1)


def test_a_tensor_has_the_same_verdict_as_in_text_and_on_the_page(tmp_path: Path) -> None:
    tensors = {"good": "[4/tp]", "wrong": Made("[4/tp, 4]", "[4, 4/tp]"), "warned": "[6/tp]", "unseen": "[8/tp]"}
    doc = document(tmp_path / "a.shardviz", "tp=2", tensors)
    warning = finding_of("incomplete", "warning", "warned", (0,), "a rank has none of it")
    report = replace(
        doc.report, findings=(*doc.report.findings, warning), not_checked=(NotChecked("unseen", "no", "order"),)
    )
    changed = replace(doc, report=report)
    verdicts = {entry.title: entry.verdict for entry in changed.entries}
    assert verdicts == {"good": "good", "wrong": "error", "warned": "warning", "unseen": "unknown"}
    assert verdicts == {name: row.verdict for name, row in listed_rows(doc.dump, report)}


def test_layers_in_one_line_are_counted_together_and_what_shares_storage_once(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "a.shardviz", parse_mesh("tp=2"), dict.fromkeys(("layers.0.w", "layers.1.w"), "[4/tp]"))
    doc = Document(path, dump_of(read_files(path)))
    assert (len(doc.entries), sum(doc.sizes_of(0, 1)), sum(memory_table(doc.dump).by_rank[1])) == (1, 16, 16)
    add_to_ranks(path, lambda rank: structs.replace(rank, tied=(("layers.0.w", "layers.1.w"),)))
    tied = Document(path, dump_of(read_files(path)))
    assert (len(tied.entries), sum(tied.sizes_of(0, 1)), sum(memory_table(tied.dump).by_rank[1])) == (1, 8, 8)


def test_a_reason_for_not_checking_is_listed_once_for_identical_layers_and_without_a_name_if_it_has_none(
    tmp_path: Path,
) -> None:
    doc = document(tmp_path / "a.shardviz", "tp=2", dict.fromkeys(("layers.0.w", "layers.1.w"), "[4/tp]"))
    skipped = [NotChecked(name, "no values", "values") for name in ("", "layers.0.w", "layers.1.w")]
    changed = replace(doc, report=replace(doc.report, not_checked=tuple(skipped)))
    lines = no_findings_text(changed).plain.splitlines()[1:]
    assert lines == ["? not checked: no values", "? not checked: layers.[0-1].w: no values"]


def test_tensors_that_were_not_looked_at_are_not_said_to_match(tmp_path: Path) -> None:
    doc = document(tmp_path / "a.shardviz", "tp=2", {"w": "[4/tp]", "b": "[2]"})
    assert no_findings_text(doc).plain.startswith("✓ no findings: each of 2 tensors matches its placements")
    changed = replace(doc, report=replace(doc.report, not_checked=(NotChecked("w", "no values", "values"),)))
    assert no_findings_text(changed).plain.startswith("? no findings: 1 of 2 tensors not checked")
    assert verdict_text(changed, is_short=True).plain == "? 1 not checked"
    of_run = replace(doc, report=replace(doc.report, not_checked=(NotChecked("", "no batch", "values"),)))
    assert verdict_text(of_run, is_short=True).plain == "✓ no findings"


def test_a_rank_without_a_known_host_is_named_without_one(tmp_path: Path) -> None:
    doc = document(tmp_path / "a.shardviz", "tp=2", {"w": "[4/tp]"})
    add_to_ranks(doc.path, lambda rank: structs.replace(rank, hostname=""))
    changed = Document(doc.path, dump_of(read_files(doc.path)))
    assert rank_text(changed, 0).plain.splitlines()[0] == "rank 0 of 2"


def test_memory_shows_elements_in_the_order_in_which_they_lie(tmp_path: Path) -> None:
    doc = document(tmp_path / "a.shardviz", "tp=2", {"cube": "[2, 4/tp, 3]", "strided": "[8/2/tp]", "none": "[1/tp]"})
    cube, strided, none = (entry.tensor for entry in doc.entries)
    memory = ids_in_memory(doc.dump, cube, 1)
    assert [memory.row(row, 0, 9) for row in range(memory.num_rows)] == [
        ["0,2,0", "0,2,1", "0,2,2"],
        ["0,3,0", "0,3,1", "0,3,2"],
        ["1,2,0", "1,2,1", "1,2,2"],
        ["1,3,0", "1,3,1", "1,3,2"],
    ]
    assert memory.row_title(2) == "1, 0"
    assert memory.find((1, 3, 2)) == (1, 1, 2)
    assert memory.find((1, 0, 2)) is None
    assert ids_in_memory(doc.dump, strided, 1).row(0, 1, 2) == ["3", "6"]
    assert part_text(strided.shards[1]) == "[2:4+6:8]"
    assert part_text(none.shards[1]) == "nothing"


def test_elements_lie_beside_those_that_are_claimed_and_wrong_ones_are_marked(tmp_path: Path) -> None:
    tensors = {"wrong": Made("[4/tp, 2]", "[4, 2/tp]"), "good": "[4/tp, 2]", "plain": Made(None, shape=(4, 2))}
    doc = document(tmp_path / "a.shardviz", "tp=2", tensors)
    wrong, good, plain = (entry.tensor for entry in doc.entries)
    beside = ids_beside(doc.dump, wrong, 0, index=(1, 0))
    assert beside.due is not None
    assert (beside.memory.shape, beside.due.shape) == ((4, 1), (2, 2))
    assert beside.wrong(0, 0, 9) == [True]
    assert (beside.at, beside.cursor) == ((1, 0), (1, 0))
    right = ids_beside(doc.dump, good, 1, index=(0, 0))
    assert [right.wrong(row, 0, 9) for row in range(2)] == [[False, False]] * 2
    assert right.cursor is None
    assert ids_beside(doc.dump, plain, 1).due is None
    assert ids_beside(doc.dump, plain, 1).wrong(0, 0, 9) == [False, False]


def test_what_is_no_element_of_the_tensor_is_named(tmp_path: Path) -> None:
    ids = {0: np.array([2, 0]), 1: np.array([-1, 9])}
    doc = document(tmp_path / "a.shardviz", "tp=2", {"w": Made("[4/tp]", ids=ids)})
    tensor = doc.entries[0].tensor
    assert ids_in_memory(doc.dump, tensor, 0).row(0, 0, 9) == ["1", "zero"]
    assert ids_in_memory(doc.dump, tensor, 1).row(0, 0, 9)[0] == "no id"
    assert ids_beside(doc.dump, tensor, 0).wrong(0, 0, 9) == [True, True]


def with_values(path: Path, values: list[list[Any]]) -> Document:
    """Make a replicated tensor of two elements on two ranks, with each rank's own values."""
    make_dump(path, parse_mesh("dp=2"), {"w": "[2]"})

    def add(rank: RankRecord) -> RankRecord:
        body = Body("param", "initial", (2,), (2,), "float32", values=values[rank.rank])
        named = TensorRecord("w", len(rank.bodies))
        return structs.replace(rank, bodies=(*rank.bodies, body), tensors=(*rank.tensors, named))

    add_to_ranks(path, add)
    return checked(Document(path, dump_of(read_files(path))))


def test_values_lie_beside_those_of_a_copy_that_differs(tmp_path: Path) -> None:
    differ = with_values(tmp_path / "a.shardviz", [[1.0, 2.0], [1.0, 2.5]])
    beside = values_beside(differ.dump, differ.entries[0].tensor, 0)
    assert beside is not None
    assert beside.due is not None
    assert (beside.memory.row(0, 0, 9), beside.due.row(0, 0, 9)) == (["1", "2"], ["1", "2.5"])
    assert (beside.due.title, beside.wrong(0, 0, 9)) == ("copy on rank 1", [False, True])
    equal = with_values(tmp_path / "b.shardviz", [[1.0, "nan"]] * 2)
    beside = values_beside(equal.dump, equal.entries[0].tensor, 1)
    assert beside is not None
    assert beside.wrong(0, 0, 9) == [False, False]


def test_a_ranks_lines_speak_of_one_of_several_alike_and_are_sorted_and_found(tmp_path: Path) -> None:
    layers = {f"layers.{layer}.w": "[4/tp]" for layer in range(12)}
    wrong = {"big": "[64/tp]", "odd": Made("[4/tp, 4]", "[4, 4/tp]")}
    path = make_dump(tmp_path / "a.shardviz", parse_mesh("tp=2"), {**layers, **wrong})
    walks = {
        "": ("3", "]"),
        "largest": "o",
        "wrong": "o",
        "found": ("slash", "type rs.7", "enter"),
        "none": ("slash", "type x"),
    }
    listed = {
        name: re.findall(r"│ ((?:[│▾ ] )*[✓✗] .*?) *││", shown.text)
        for name, shown in walk_on(path, walks, size=(160, 40)).items()
    }
    layer = ["▾ ✓ layers.[0-11]  12 × 8 B", "│ ✓ w  12 × 8 B  [2:4]"]
    assert listed[""] == [*layer, "  ✓ big  128 B  [32:64]", "  ✗ odd  32 B  [0:4, 2:4]"]
    assert [line.split()[1] for line in listed["largest"]] == ["big", "✓", "✓", "odd"]
    assert [line.split()[1] for line in listed["wrong"]] == ["odd", "✓", "✓", "big"]
    assert listed["found"] == ["▾ ✓ layers.7  8 B", "│ ✓ w  8 B  [2:4]"]
    assert not listed["none"]


def test_a_model_that_was_stamped_in_float64_is_shown_in_its_own_type_and_counted_as_show_does(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "a.shardviz", parse_mesh("tp=2"), {"weight": "float64[8/tp, 4]"})
    bodies = (
        Body("param", "initial", (8, 4), (4, 4), "bfloat16"),
        Body("grad", "step", (8, 4), (4, 4), "float64"),
        Body("output", "step", (6,), (6,), "float64"),
    )
    named = (TensorRecord("weight", 1), TensorRecord("weight", 2), TensorRecord("output", 3))
    add_to_ranks(path, lambda rank: structs.replace(rank, bodies=rank.bodies + bodies, tensors=rank.tensors + named))
    doc = checked(Document(path, dump_of(read_files(path))))
    by_role = {entry.tensor.role: index for index, entry in enumerate(doc.entries)}
    assert [entry.layout for entry in doc.entries][:1] == ["bfloat16[8/tp, 4]"]
    assert doc.entries[0].short_layout == "[8/tp, 4]"
    assert {role: doc.sizes_of(entry, 1) for role, entry in by_role.items()} == {
        "param": [32],
        "grad": [32],
        "output": [],
    }
    assert sum(memory_table(doc.dump).by_rank[1]) == 64
    assert "64 B: 1 tensor, grads" in rank_text(doc, 1).plain


def test_in_tmux_a_copy_goes_through_tmux_which_swallows_what_programs_ask_of_the_terminal(
    bug: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmux = tmp_path / "tmux"
    tmux.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat > {tmp_path}/copied\n')
    tmux.chmod(0o755)
    monkeypatch.setenv("TMUX", "somewhere")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "_StridedShard(0, split_factor=4), Shard(0)" in walk(bug, "c").clipboard
    assert (tmp_path / "asked").read_text() == "load-buffer -w -\n"
    assert "_StridedShard(0, split_factor=4)" in (tmp_path / "copied").read_text()


def test_a_document_that_is_read_again_keeps_the_tensor_and_the_place(tmp_path: Path) -> None:
    before = document(tmp_path / "a.shardviz", "tp=2", {"a": "[4]", "b": "[4/tp, 3]"})
    after = document(tmp_path / "b.shardviz", "tp=2", {"new": "[2]", "a": "[4]", "b": "[4/tp, 3]"})
    carried = carried_over(before, after, of_entry(before, Selection(side="held"), 1))
    assert (after.entries[carried.entry].title, carried.side) == ("b", "held")


def test_without_textual_serve_the_line_says_what_to_install(bug: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    with pytest.raises(ShardvizError, match="needs textual-serve") as raised:
        web.serve(bug)
    assert raised.value.hint == "pip install 'shardviz[web]'"


def test_a_tensor_of_a_billion_elements_is_walked_to_its_last_id(tmp_path: Path) -> None:
    tensor = Made("[128256/fsdp/tp, 8192]", "[128256/tp/fsdp, 8192]")
    path = make_dump(tmp_path / "one.shardviz", MESH, {"output.weight": tensor})
    shown = walk(path, "enter", *["+"] * 16, "g", "type -1 -1", "enter")
    assert f"{128256 * 8192 - 1}" in shown.text
    assert "[128255, 8191]" in shown.text


def test_two_threads_that_draw_a_map_at_once_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map keeps its zoom as long as it shows the same sides."""
    both = threading.Barrier(2, timeout=PATIENCE)

    def drawn(*args: Any) -> Sides:
        both.wait()
        return drawn_sides(*args)

    monkeypatch.setattr("shardviz.tui.model.document.drawn_sides", drawn)
    doc = document(tmp_path / "one.shardviz", "tp=2", {"a": "[4/tp, 3]"})
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(doc.sides, [0, 0])
    assert first is second is doc.sides(0)


@pytest.mark.parametrize("also", [(), ("each shard transposed",)])
def test_a_card_has_the_whole_sentence_first_and_what_else_fits_behind_the_fix(also: tuple[str, ...]) -> None:
    sentence = "the name is odd; this fits as well: no, it does not"
    found = finding_of("misordered", "error", "w", (0,), sentence, details=("an example",), fix="mend it", also=also)
    printed = io.StringIO()
    Console(file=printed, width=100).print(finding_body(found))
    first, *rows = [row.rstrip() for row in printed.getvalue().splitlines()]
    others = [*(f"or    {text}" for text in also), "see   shardviz explain told", "more  an example"]
    assert (first, rows) == (sentence, ["fix   mend it", *others])


def test_the_fix_stands_between_the_sentence_and_the_table_of_ranks() -> None:
    rows = [Row(f"rank {rank}", plain([rank])) for rank in range(8)]
    found = finding_of("misordered", "error", "w", (0,), "the order is odd", fix="mend it " * 15, cause="unknown")
    printed = io.StringIO()
    Console(file=printed, width=60).print(finding_body(found, exhibit("its rows", ("rank", "is"), rows), 60))
    starts = [row.split()[0] for row in printed.getvalue().splitlines() if row.strip()]
    assert starts[:4] == ["the", "fix", "it", "mend"]
    assert starts[-3:] == ["rank", "cause", "see"]


def test_a_name_that_does_not_fit_keeps_both_of_its_ends() -> None:
    assert fitted("layers.[0-7].attention.wk.weight", 40) == "layers.[0-7].attention.wk.weight"
    assert fitted("layers.[0-7].attention.wk.weight", 18) == "layers….wk.weight"
    assert fitted("layers.[0-7].attention.wk.weight (grad)", 18) == "….wk.weight (grad)"
    assert fitted("embedding", 6) == "em…ing"
    assert len(fitted("layers.[0-7].attention.wk.weight", 8)) == 8


@pytest.mark.parametrize("room", range(1, 24))
def test_names_with_wide_characters_are_cut_to_columns(room: int) -> None:
    for name in ("层.注意力.weight", "层" * 30, "ab层" * 9, "layers.0.weight" * 3):
        text = fitted(name, room)
        assert cell_len(text) <= room
        assert ("…" in text) == (cell_len(name) > room)


@pytest.mark.parametrize(
    ("has_claimed", "has_held", "drawn"),
    [
        (True, True, ("claimed", "held", "difference")),
        (True, False, ("claimed",) * 3),
        (False, True, ("held",) * 3),
    ],
)
def test_a_side_that_is_not_known_is_not_drawn(has_claimed: bool, has_held: bool, drawn: tuple[str, ...]) -> None:
    sides = Sides(Holders((2, 2), {}, {}), 1, has_claimed, has_held)
    assert tuple(drawn_side(sides, side) for side in SIDES) == drawn
    assert drawn_side(Sides(Holders((0, 2), {}, {}), 1, has_claimed, has_held), "held") == "held", "nobody has nothing"


def test_only_so_many_maps_are_kept_and_equal_layouts_share_one(tmp_path: Path) -> None:
    names = {f"w{at}": (f"[{4 * at + 4}/fsdp, 4]", MESH) for at in range(MOST_KEPT + 8)}
    made = make_plan(tmp_path / "plan", MESH, [{**names, "again": names["w0"]}])
    found = Document(made, dump_of(read_files(made)))
    entry = {one.title: at for at, one in enumerate(found.entries)}
    assert found.sides(entry["w0"]) is found.sides(entry["again"])
    for at in range(len(found.entries)):
        found.sides(at)
    assert len(found._sides) == MOST_KEPT
