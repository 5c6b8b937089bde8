"""What a small terminal shows: nothing cut that could be said shorter, numbers under their heads, the fix in view."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.tensors import Position
from shardviz.layout.mesh import parse_mesh
from shardviz.tui.app import ShardvizApp
from shardviz.tui.loading import checked
from shardviz.tui.model.document import Document
from shardviz.tui.model.selection import Selection, of_entry
from shardviz.tui.widgets.mesh_grid import lights_of
from shardviz.tui.widgets.tensor_map import inspector_text
from tests.check.records import add_values, change_rank
from tests.dumps import Made, make_dump
from tests.findings import finding_of
from tests.lanes import at_night, nightly
from tests.tui.driving import press, rest, settle, walk

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def made(path: Path, tensors: Mapping[str, Made | str], mesh: str = "fsdp=2,tp=2") -> Path:
    return make_dump(path / "made.shardviz", parse_mesh(mesh), tensors)


def opened(folder: Path) -> Document:
    dump = dump_of(read_files(folder))
    return Document(folder, dump, report_on(dump))


def test_a_finding_of_the_whole_run_marks_its_ranks_on_the_mesh(tmp_path: Path) -> None:
    folder = made(tmp_path, {"w": "[8/tp/fsdp]"})
    for rank in range(2):
        change_rank(folder, rank, positions=(Position(0, (0, rank), (0, 1 - rank)),))
    document = opened(folder)
    lights = lights_of(document, Selection())
    assert [finding.kind for finding in document.findings] == ["rank-order"]
    assert lights.guilty == {0, 1}


@nightly
def test_the_name_of_a_finding_is_whole_in_a_small_terminal(tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.gate_up_proj.weight"
    folder = made(tmp_path, {name: Made("[16/fsdp/tp, 8]", "[16/tp/fsdp, 8]")})
    assert f"misordered {name}" in walk(folder, size=(80, 24)).text


def test_coordinates_below_the_map_give_way_where_they_do_not_fit(tmp_path: Path) -> None:
    document = opened(made(tmp_path, {"w": "[8/tp/fsdp]"}))
    selection = of_entry(document, Selection(), 0)
    wide = "[0]  claimed 0 (fsdp=0 tp=0)  held 0 (fsdp=0 tp=0)"
    below = [inspector_text(document, selection, document.sides(0), width=len(wide) - less).plain for less in (0, 1)]
    assert below == [wide, "[0]  claimed 0  held 0"]


def test_of_copies_the_one_that_holds_something_else_is_named(tmp_path: Path) -> None:
    document = opened(made(tmp_path, {"w": Made("[4/tp, 2]", "[4/fsdp, 2]")}))
    selection = of_entry(document, Selection(), 0)
    assert (
        "claimed 0,2  held 0-1\nrank 2 holds [2, 0] instead"
        in inspector_text(document, selection, document.sides(0)).plain
    )


def test_a_shard_in_another_order_has_not_moved(tmp_path: Path) -> None:
    document = opened(made(tmp_path, {"w": Made("[4]", ids={1: np.array([4, 3, 2, 1])})}, "tp=2"))
    selection = of_entry(document, Selection(), 0)
    assert selection.side == "difference"
    assert "moved" not in inspector_text(document, selection, document.sides(0)).plain


def test_long_names_leave_the_numbers_of_memory_under_their_heads(tmp_path: Path) -> None:
    lines = walk(made(tmp_path, {"w": "[8/tp]", "w" * 50: "[8/tp]"}), "6", size=(80, 24)).text.splitlines()
    head = next(line for line in lines if "fullest" in line)
    rows = [line for line in lines if " 1.00 " in line]
    assert len(rows) == 2
    assert {line.index("1.00") + len("1.00") for line in rows} == {head.index("imbalance") + len("imbalance")}
    assert not any("…" in line[40:] for line in rows)


def test_parts_exchanged_among_the_same_ranks_do_not_read_as_in_place(tmp_path: Path) -> None:
    tensor = Made("[64/32/tp, 4]", "[64/2/tp, 4]")
    text = walk(made(tmp_path, {"w": tensor}, "tp=2"), size=(80, 24)).text
    assert "✗ part: 1→0" in text
    assert "tp 0…1 → tp 0…1" not in text


def test_a_map_drawn_before_the_check_is_marked_once_that_found_something(tmp_path: Path) -> None:
    folder = made(tmp_path, {"other": "[4]"}, "tp=2")
    same = np.random.default_rng(0).normal(size=(2, 4))
    add_values(folder, "w", "[4/tp, 4]", {0: same, 1: same})
    before = Document(folder, dump_of(read_files(folder)))
    entry = next(at for at, one in enumerate(before.entries) if "w" in one.names)
    assert not before.sides(entry).guilty
    after = checked(before)
    assert after.sides(entry).guilty == 0b11
    text = inspector_text(after, of_entry(after, Selection(), entry), after.sides(entry)).plain
    assert text.endswith("rank 0: the same values as other shards"), "without ids nobody knows where they are"


def test_the_inspector_says_which_copy_has_an_element_in_another_place(tmp_path: Path) -> None:
    whole = np.arange(1, 33).reshape(32, 1)
    order = [*range(14), 15, 14]
    ids = {0: whole[:16], 1: whole[16:], 2: whole[order], 3: whole[16:]}
    document = opened(made(tmp_path, {"w": Made("[32/tp, 1]", ids=ids)}, "dp=2,tp=2"))
    chosen, sides = of_entry(document, Selection(), 0), document.sides(0)
    assert chosen.plane is not None
    texts = {
        row: inspector_text(document, replace(chosen, plane=replace(chosen.plane, at=(row, 0))), sides).plain
        for row in (3, 14)
    }
    assert texts[14].endswith("\nin another place of the shard on rank 2")
    assert "\n" not in texts[3], "it is in order"


@pytest.mark.parametrize("size", [(80, 24), *at_night([[(120, 40)]])])
def test_the_fix_is_in_view_whole_however_long_the_sentence(size: tuple[int, int], tmp_path: Path) -> None:
    document = opened(made(tmp_path, {"w": Made("[8/tp/fsdp]", "[8/fsdp/tp]")}))
    assert document.report is not None
    fix = "mend it by hand " * 8
    found = finding_of("misordered", "error", "w", (0,), "the order is odd " * 20, fix=fix, cause="unknown " * 20)
    document = replace(document, report=replace(document.report, findings=(found,)))

    async def run() -> str:
        app = ShardvizApp(document.path)
        async with app.run_test(size=size) as pilot:
            await rest(pilot)
            app.document = document
            return await settle(pilot)

    assert asyncio.run(run()).count("mend") == 8


@nightly
def test_nothing_is_judged_before_all_ranks_are_read_and_checked(tmp_path: Path) -> None:
    folder = made(tmp_path, {"w": Made("[8/tp/fsdp]", "[8/fsdp/tp]")})
    dump = dump_of(read_files(folder))
    one_rank = dump_of(replace(read_files(folder), ranks={0: dump.files.ranks[0]}))

    async def run(*documents: Document) -> list[str]:
        app, texts = ShardvizApp(folder), []
        async with app.run_test(size=(120, 40)) as pilot:
            await rest(pilot)
            for document in documents:
                app.document = document
                for key in "vvv12345":
                    await press(pilot, key)
                    texts.append(await settle(pilot))
        return texts

    unread, unchecked = Document(folder, one_rank, is_partial=True), Document(folder, dump)
    for text in asyncio.run(run(unread, unchecked)):
        assert not re.search(r"[✗○+]\d|✗ (?!in the finding)|nobody|lacks|no readable", text), text
