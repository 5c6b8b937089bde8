"""Titles of boxes: names are cut to columns, and a title that took a name's place stays. Bars beside what scrolls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from rich.cells import cell_len
from textual.app import App
from textual.scrollbar import ScrollBar

from shardviz.tui.widgets.box import CORNERS, LEAST_NAME, Box
from shardviz.tui.widgets.grids.side_scroll import SideScroll

if TYPE_CHECKING:
    from rich.segment import Segment
    from textual.app import ComposeResult

NAME = "层.注意力.layers.0.权重.weight"


class Boxed(App[None]):
    def compose(self) -> ComposeResult:
        yield Box()


async def titles(width: int, *, is_plain: bool) -> tuple[str, str]:
    """Return the title of a box named by a tensor, then, where it is given a plain one, that after a resize."""
    app = Boxed()
    async with app.run_test(size=(width, 10)) as pilot:
        box = app.query_one(Box)
        box.entitle_by_name(NAME, before="名 ", after=(" on rank 0 of the job", " 在"))
        first = str(box.border_title)
        if is_plain:
            box.entitle("plain")
        await pilot.resize_terminal(width + 3, 10)
        await pilot.pause()
        return first, str(box.border_title)


@pytest.mark.parametrize("width", [24, 31, 40, 60])
def test_a_name_of_wide_characters_is_cut_to_the_columns_of_its_box(width: int) -> None:
    first, wider = asyncio.run(titles(width, is_plain=False))
    room = max(width - CORNERS, LEAST_NAME)
    assert cell_len(first) <= room
    assert cell_len(wider) <= room + 3
    assert ("…" in first) == (cell_len(f"名 {NAME} 在") > room)


def test_a_plain_title_stays_when_the_box_has_another_width() -> None:
    assert asyncio.run(titles(40, is_plain=True))[1] == "plain"


class Bars(App[None]):
    CSS = "Screen { background: green; text-style: bold; } ScrollBar { width: 1; height: 30; background: red 20%; }"

    def compose(self) -> ComposeResult:
        yield ScrollBar()
        yield SideScroll(1)


async def bar_lines(app: Bars, **looks: float | bool) -> tuple[list[list[Segment]], list[list[Segment]]]:
    """Return the lines of Textual's own scroll bar and of ours, which look alike."""
    async with app.run_test(size=(10, 62)) as pilot:
        bars = [*app.query(ScrollBar)]
        for bar in bars:
            for name, value in looks.items():
                setattr(bar, name, value)
        await pilot.pause()
        theirs, ours = ([list(line) for line in bar.render_lines(bar.size.region)] for bar in bars)
        return theirs, ours


@pytest.mark.parametrize("mouse_over", [False, True])
@pytest.mark.parametrize("position", [0, 0.875, 35, 3970])
@pytest.mark.parametrize("virtual", [10, 30, 31, 4000])
def test_the_bar_beside_a_grid_looks_as_textual_paints_it(virtual: int, position: float, mouse_over: bool) -> None:
    looks = {"window_virtual_size": virtual, "window_size": 29, "position": position, "mouse_over": mouse_over}
    theirs, ours = asyncio.run(bar_lines(Bars(), **looks))
    assert len(theirs) == 30
    assert ours == theirs
