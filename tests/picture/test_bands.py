"""Lines between claimed and held in text: they join a part with itself, and none lies on another."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.model.subject import of_tensor
from shardviz.picture.text.page import page_lines
from shardviz.picture.text.panels import LANE, LEFT, RIGHT, BandLine, _lanes, _line_cells
from shardviz.picture.text.terminal import ASCII, Terminal
from tests.dumps import Made, make_dump
from tests.lanes import cases

if TYPE_CHECKING:
    from pathlib import Path


def drawn(tmp_path: Path, claimed: str, held: str, terminal: Terminal, mesh: str = "fsdp=2,tp=2") -> str:
    files = make_dump(tmp_path / "d.shardviz", parse_mesh(mesh), {"w": Made(claimed, held)})
    dump = dump_of(read_files(files))
    subject = of_tensor(dump, dump.tensors[0], "w", report_on(dump))
    return "\n".join(row.plain.rstrip() for row in page_lines(subject, terminal))


def test_a_line_leads_from_where_a_part_should_be_to_where_it_is(tmp_path: Path) -> None:
    text = drawn(tmp_path, "[6/fsdp/tp, 1]", "[6/tp/fsdp, 1]", Terminal())
    assert "2:3 │       1        │ ─┐ ┌──▸ 2:3 │      ✗ 2       │" in text
    assert "3:5 │       2        │  └─┼──▸ 3:5 │      ✗ 1       │" in text


def test_equal_parts_that_change_places_get_room_for_their_lines(tmp_path: Path) -> None:
    text = drawn(tmp_path, "[8/fsdp/tp, 1]", "[8/tp/fsdp, 1]", Terminal())
    assert text.count("▸") == 2


@pytest.mark.parametrize("terminal", [Terminal(50), Terminal(46, ASCII)])
def test_without_room_there_are_no_lines_and_no_part_is_lost(tmp_path: Path, terminal: Terminal) -> None:
    text = drawn(tmp_path, "[8/fsdp/tp, 1]", "[8/tp/fsdp, 1]", terminal)
    assert "▸" not in text
    assert f"{terminal.glyphs.wrong} 2" in text


def test_a_terminal_without_unicode_gets_lines_too(tmp_path: Path) -> None:
    text = drawn(tmp_path, "[6/fsdp/tp, 1]", "[6/tp/fsdp, 1]", Terminal(100, ASCII))
    assert "2:3 |       1        | -+ +--" in text


def test_two_that_change_places_row_by_row_cannot_be_drawn() -> None:
    assert _lanes([BandLine(1, 3, ""), BandLine(3, 1, "")]) is None


@cases(50)
@given(st.permutations(range(6)), st.sampled_from([1, 2]))
def test_no_line_lies_on_another(held: list[int], height: int) -> None:
    moves = [
        BandLine(height * at + height - 1, height * place, str(at))
        for at, place in enumerate(held)
        if height * at != place
    ]
    order = _lanes(moves)
    if order is None:
        assert height == 1  # with two rows for each part there is always an order
        return
    width = LANE * len(order) + 2
    taken = [
        {(row, col) for row, col, arm in _line_cells(move, LANE * lane + 1, width) if arm & (LEFT | RIGHT)}
        for lane, move in enumerate(order)
    ]
    assert not any(one & other for one, other in combinations(taken, 2))
