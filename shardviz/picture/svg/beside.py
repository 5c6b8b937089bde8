"""A job's tensor beside a checkpoint's as SVG: who claims what, which file has it, and the bytes of what is wrong."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardviz.picture.markup import element, words
from shardviz.picture.model.drawing import draw
from shardviz.picture.model.palette import Colouring
from shardviz.picture.svg.exhibit import exhibit_drawing
from shardviz.picture.svg.map import GAP, TITLE_HEIGHT, scale_for, side, title_width
from shardviz.picture.svg.mesh import Drawn
from shardviz.picture.svg.page import BUDGET, MAX_WIDTH, panels, paragraph, sheet, stacked, with_left_out
from shardviz.picture.svg.stored import NAME_CHAR, about, beside_map, files_drawing
from shardviz.picture.text.terminal import UNICODE

if TYPE_CHECKING:
    from shardviz.picture.model.drawing import Panel
    from shardviz.picture.model.subjects.beside import Beside, Marked

NOUNS = ("rank", "file")
UNLIKE = " (not what the checkpoint has)"


def beside_svg(one: Beside) -> str:
    """Draw a tensor of a job beside the checkpoint's, as a whole SVG file."""
    return beside_figure(one, style=True) + "\n"


def beside_figure(one: Beside, *, style: bool, headlines: bool = True) -> str:
    """Draw a tensor of a job beside the checkpoint's as an `svg` element.

    Args:
        one: The tensor.
        style: Whether it brings its own style; a page that has it once needs none.
        headlines: Whether it says what became of the tensor; a page that does needs none.
    """
    parts = [*(_headlines(one) if headlines else []), _heading(one)]
    maps = _maps(one.shape, one.sides) if one.sides is not None else Drawn("", 0, 0)
    parts.append(beside_map(maps, files_drawing(one.stored)) if one.stored is not None else maps)
    parts += [exhibit_drawing(one.exhibit)] if one.exhibit is not None else []
    return sheet(parts, one.name, f"{one.outcome.verdict}: {one.outcome.why}", style=style)


def _headlines(one: Beside) -> list[Drawn]:
    outcome = one.outcome
    glyph = UNICODE.differs if one.is_wrong else UNICODE.good if outcome.verdict == "equal" else UNICODE.unknown
    lines = [paragraph(f"{glyph} {outcome.verdict}", "sv-bad" if one.is_wrong else "sv-good")]
    lines += [paragraph(text, "sv-bad sv-said") for text in (outcome.why, outcome.cause, outcome.fix) if text]
    return lines


def _heading(one: Beside) -> Drawn:
    facts = about(one.stored) if one.stored is not None else ""
    lines = [paragraph(text, "sv-soft") for text in (facts, one.why) if text]
    return stacked(paragraph(one.name, "sv-name", NAME_CHAR), *lines)


def _maps(shape: tuple[int, ...], sides: Marked) -> Drawn:
    drawing = draw(sides, shape, BUDGET)
    return with_left_out(panels(drawing, partial(_panel, sides=sides)), drawing)


def _panel(panel: Panel, sides: Marked) -> Drawn:
    """Draw both sides next to each other, or below each other if they are wide."""
    scale, titles = scale_for(panel), title_width(panel)
    kinds = zip(sides.titles, (panel.claimed, panel.held), NOUNS, (sides.colouring, Colouring()), strict=True)
    shown = [(title, grid, noun, colouring) for title, grid, noun, colouring in kinds if grid is not None]
    upright = 2 * (titles + scale.width) + GAP > MAX_WIDTH or len(panel.rows) == 1
    across, down = titles + scale.width + GAP, 2 * TITLE_HEIGHT + scale.height + GAP
    markup = ""
    for at, (title, grid, noun, colouring) in enumerate(shown):
        x, y = (titles, at * down) if upright else (titles + at * across, 0)
        drawn = side(panel, grid, scale, colouring, marked=True, noun=noun, unlike=UNLIKE)
        heading = element("text", words(title), x=scale.width // 2, y=-26, class_="sv-h sv-l")
        markup += element("g", heading, drawn, transform=f"translate({x} {y + 2 * TITLE_HEIGHT})")
    many = len(shown)
    width = titles + scale.width if upright else many * across - GAP
    return Drawn(markup, width, many * down - GAP if upright else down - GAP)
