"""The mesh as text and SVG: ranks that findings name are always seen, and numbers of ranks are read as heat."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.check.report import named_ranks
from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.mesh import parse_mesh
from shardviz.picture.model.mesh import Heat, bytes_held, findings_on, grids_of, heats_of, kept_positions
from shardviz.picture.model.palette import HEAT_COLORS, HEAT_COLORS_256, HEAT_SIGNS, ink_on
from shardviz.picture.svg.page import mesh_figure
from shardviz.picture.text.meshes import heat_lines, mesh_lines
from shardviz.picture.text.terminal import ASCII, UNICODE, Terminal
from tests.dumps import Made, make_dump
from tests.findings import finding_of
from tests.picture.contrast import contrast, luminance

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardviz.explain.finding import Finding

LARGE = parse_mesh("fsdp=128,tp=8")


def text_of(mesh: str, marked: Collection[int] = (), width: int = 100, heat: Heat | None = None) -> str:
    return Terminal(width).render(mesh_lines(parse_mesh(mesh), width, UNICODE, marked, heat=heat))


@given(st.integers(1, 200), st.integers(3, 40), st.sets(st.integers(0, 199), max_size=30))
def test_positions_are_shown_or_left_out_once_and_in_order(count: int, most: int, wanted: set[int]) -> None:
    found = kept_positions(count, most, {position for position in wanted if position < count})
    assert len(found) <= most
    flat = [at for one in found for at in ([one] if isinstance(one, int) else one)]
    assert flat == list(range(count))
    assert isinstance(found[0], int)
    assert isinstance(found[-1], int)


def test_wanted_positions_are_shown_before_others() -> None:
    shown = [one for one in kept_positions(128, 10, {60, 61, 90}) if isinstance(one, int)]
    assert {0, 60, 61, 90, 127} <= set(shown)
    assert kept_positions(128, 6) == [0, 1, 2, 3, range(4, 127), 127]


@pytest.mark.parametrize("rank", [0, 500, 777, 1023])
@pytest.mark.parametrize("mesh", ["fsdp=128,tp=8", "pp=8,dp=16,tp=8", "tp=1024"])
def test_a_marked_rank_is_seen_wherever_it_is(mesh: str, rank: int) -> None:
    assert re.search(rf"✗{rank}\b", text_of(mesh, {rank}))
    assert f"✗ {rank}<" in mesh_figure(parse_mesh(mesh), style=False, marked={rank})


def test_what_is_left_out_says_how_many_ranks_are_marked() -> None:
    text = text_of("fsdp=128,tp=8", set(range(1, 1024)))
    assert re.search(r"… 113 more rows, 904 ranks ✗", text)
    assert "… 117 more rows, 936 ranks ✗" in mesh_figure(LARGE, style=False, marked=set(range(1, 1024)))
    assert "✗" not in text_of("fsdp=128,tp=8")
    many = parse_mesh("pp=16,dp=8,tp=8")
    grids, left = grids_of(many, 4, [1000])
    assert (grids[-1].title, len(grids), left) == ("pp=15", 4, 12)
    assert "more grids of 64 ranks, 1 ranks" not in text_of("pp=16,dp=8,tp=8", {1000})


def test_a_column_that_is_left_out_shows_a_mark_in_the_row_that_has_one() -> None:
    wide = text_of("dp=2,tp=64", set(range(64, 128)), width=60)
    first, second = (next(line for line in wide.splitlines() if line.startswith(f"dp={at}")) for at in (0, 1))
    assert " … " in first
    assert " ✗ " in second


def finding(*ranks: int) -> Finding:
    return finding_of("misordered", "error", "w", ranks, "wrong")


def test_a_finding_that_names_every_rank_points_at_none_beside_one_that_names_some() -> None:
    assert named_ranks([finding(*range(8)), finding(3), finding(5, 6)], 8) == {3, 5, 6}
    assert named_ranks([finding(*range(8))], 8) == set(range(8)), "alone it marks all"
    assert named_ranks([finding()], 8) == set()


HEAT = Heat("bytes held", {0: 100, 1: 100, 2: 150, 3: 800}, in_bytes=True)


def test_heat_is_read_from_signs_and_from_words() -> None:
    text = text_of("tp=4", heat=HEAT)
    assert str(HEAT) == "bytes held: ▁ 100 B on ranks 0-1, █ 800 B on rank 3"
    assert str(HEAT) in text
    assert re.search(r"▁0 +▁1 +▁2 +█3", text)
    picture = mesh_figure(parse_mesh("tp=4"), style=False, heat=HEAT)
    assert "█ 3<" in picture
    assert "sv-fh7" in picture
    assert "rank 2: tp=2, bytes held 150 B" in picture


def test_a_rank_without_a_number_is_not_the_coolest() -> None:
    lost = Heat("findings", {0: 1, 2: 9})
    assert (lost.level(1), lost.sign(1)) == (-1, "?")
    assert "?1" in text_of("tp=3", heat=lost)


def test_the_same_number_on_every_rank_is_one_line_and_no_picture() -> None:
    same = Heat("findings", dict.fromkeys(range(8), 2))
    assert str(same) == "findings: 2 on every rank"
    assert heat_lines(parse_mesh("tp=8"), same, Terminal()) == []
    assert heat_lines(parse_mesh("tp=4"), HEAT, Terminal()) != []


def test_heat_gets_brighter_level_by_level_and_can_be_written_on() -> None:
    for colors in (HEAT_COLORS, HEAT_COLORS_256):
        brightness = [luminance(color) for color in colors]
        assert brightness == sorted(brightness)
        assert min(contrast(color, ink_on(color)) for color in colors) >= 4.5
        assert len(colors) == len(HEAT_SIGNS)


def test_a_terminal_without_block_characters_gets_digits() -> None:
    terminal = Terminal(80, ASCII)
    text = terminal.render(mesh_lines(parse_mesh("tp=4"), 80, ASCII, heat=HEAT))
    assert text.isascii()
    assert re.search(r"10 +11 +12 +83", text)


def test_the_heat_of_a_dump_is_its_bytes_and_its_findings(tmp_path: Path) -> None:
    tensors = {"uneven": "[10/tp, 4]", "wrong": Made("[8/tp, 4]", "[8, 4/tp]")}
    dump = dump_of(read_files(make_dump(tmp_path / "d.shardviz", parse_mesh("tp=4"), tensors)))
    report = report_on(dump)
    assert bytes_held(dump).by_rank == {0: 80, 1: 80, 2: 80, 3: 48}
    assert set(findings_on(dump, report).by_rank.values()) == {len(report.findings)}
    assert [heat.title for heat in heats_of(dump, report)] == ["bytes held", "findings"], "no step was recorded"


@pytest.mark.parametrize(
    ("term", "colorterm", "code"),
    [("xterm", "", "30;103"), ("xterm-256color", "", "48;5;69"), ("xterm-256color", "truecolor", "48;2;134;221;171")],
)
def test_each_terminal_gets_colors_of_its_own(
    term: str, colorterm: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLORTERM", colorterm)
    text = Terminal(color=True).render(mesh_lines(parse_mesh("tp=8"), 80, UNICODE))
    fills = set(re.findall(r"\x1b\[([0-9;]*)m +\d\x1b", text))
    assert len(fills) == 8, "as many as ranks"
    assert any(fill.endswith(code) for fill in fills)


def test_a_single_row_is_not_left_out_for_a_line_that_says_so() -> None:
    assert kept_positions(9, 5, {3}) == [0, range(1, 3), 3, range(4, 8), 8]
    assert kept_positions(9, 5, {2}) == [0, 1, 2, range(3, 8), 8]


def test_one_grid_and_one_rank_that_are_left_out_are_one():
    mesh = parse_mesh("pp=4,dp=8,tp=2")
    (*_, last) = mesh_lines(mesh, 40, UNICODE, marked=range(0, 64, 16))
    assert last.plain == "… 1 more grid of 16 ranks, 1 rank ✗"
    mesh = parse_mesh("pp=5,dp=2,tp=2")
    assert "… 1 more grid, 1 rank ✗<" in mesh_figure(mesh, style=False, marked=range(0, 20, 4))
