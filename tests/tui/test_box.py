"""Titles of boxes: names are cut to columns, and a title that took a name's place stays."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from rich.cells import cell_len
from textual.app import App

from shardviz.tui.model.names import LEAST_NAME
from shardviz.tui.widgets.frame import CORNERS, Box

if TYPE_CHECKING:
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
        box.set_name_title(NAME, before="名 ", after=(" on rank 0 of the job", " 在"))
        first = str(box.border_title)
        if is_plain:
            box.set_titles("plain")
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
