"""The style sheet of a run's HTML page: `page.css`, with the palette before it and rules for its ranks behind it."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from shardviz.picture.model.palette import BLUE, GREEN, ORANGE, PURPLE, SKY
from shardviz.picture.svg.style import FONT, STYLE

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_LIT = 64
"""Ranks below this light up with all that they hold; each costs a rule."""


def style_sheet(ranks: Iterable[int]) -> str:
    """Return the style of a page and of the pictures in it.

    Args:
        ranks: The ranks of the mesh: a pointer over a part of a map lights up everything that its ranks hold.
    """
    colours = {"blue": BLUE, "green": GREEN, "orange": ORANGE, "purple": PURPLE, "sky": SKY, "mono": FONT}
    variables = "".join(f"--{name}:{value};" for name, value in colours.items())
    page = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    lit = (rank for rank in ranks if rank < MOST_LIT)
    lights = "".join(f"figure .sv:has(.sv-r{rank}:hover) g.sv-r{rank}{{opacity:1}}" for rank in lit)
    return f":root{{{variables}}}\n{page}{STYLE}{lights}"
