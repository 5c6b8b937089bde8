"""A checkpoint's tensor as SVG: the map colored by file, a list of files, and byte ranges."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardviz.picture.markup import element, words
from shardviz.picture.model.drawing import draw
from shardviz.picture.model.palette import Coloring, rank_color
from shardviz.picture.svg.map import (
    CHAR,
    RANKS,
    TITLE_HEIGHT,
    BoxWords,
    PixelBox,
    SvgFragment,
    exhibit_drawing,
    scale_for,
    side,
    tile,
    title_width,
)
from shardviz.picture.svg.page import (
    BUDGET,
    LINE,
    NAME_CHAR,
    beside_map,
    maps_drawing,
    panels,
    paragraph,
    sheet,
    stack,
    with_left_out,
)
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import bytes_text, counted, printable

if TYPE_CHECKING:
    from shardviz.picture.model.drawing import Panel
    from shardviz.picture.model.stored import CheckpointSubject, ComparisonSubject, MarkedSides, StoredPart

MOST_FILES = 14
"""Files that are named beside a map."""

MOST_PARTS = 16
"""Parts whose bytes are written below a map."""

MOST_NAME = 44
"""Characters of a file's name."""

CHIP = 40
FILES = BoxWords("file")
UNLIKE = " (not what the checkpoint has)"


def stored_svg(stored: CheckpointSubject, *, is_alone: bool = True) -> str:
    """Draw which file holds which part of a tensor; the arguments are those of `svg`."""
    drawing = draw(stored.sides, stored.tensor.shape, BUDGET)
    parts = (
        stack(paragraph(stored.tensor.name, "sv-name", NAME_CHAR), paragraph(summary_text(stored), "sv-soft")),
        beside_map(with_left_out(panels(drawing, _panel), drawing), files_drawing(stored)),
        _bytes(stored),
    )
    return sheet(parts, stored.tensor.name, summary_text(stored), is_alone=is_alone)


def summary_text(stored: CheckpointSubject) -> str:
    """Describe a tensor in one line."""
    tensor = stored.tensor
    sizes = " × ".join(map(str, tensor.shape)) or "one number"
    where = f"{counted(len(stored.parts), 'part')} in {counted(len(stored.files), 'file')}"
    return f"{printable(tensor.dtype)} {sizes}, {bytes_text(tensor.num_bytes)}, {where}"


def _panel(panel: Panel) -> SvgFragment:
    scale, titles = scale_for(panel), title_width(panel)
    drawn = side(panel, panel.claimed or (), scale, Coloring(), said=FILES)
    markup = element("g", drawn, transform=f"translate({titles} {TITLE_HEIGHT})")
    return SvgFragment(markup, titles + scale.width, TITLE_HEIGHT + scale.height)


def files_drawing(stored: CheckpointSubject) -> SvgFragment:
    """List the files with their numbers, colors and how many of the tensor's bytes they have."""
    sizes: Counter[int] = Counter()
    for part in stored.parts:
        if part.file is not None:
            sizes[part.file] += part.size
    markup, width = "", 0
    for at, (number, name) in enumerate([*stored.files.items()][:MOST_FILES]):
        label = f"{_short_name(printable(name))}  {bytes_text(sizes[number])} of the file"
        place = PixelBox(0, at * (LINE + 2), CHIP, LINE)
        markup += tile(place, str(number), name, color=rank_color(number), ranks=(number,), differs=False)
        markup += element("text", words(label), x=CHIP + 8, y=place.top + 14)
        width = max(width, CHIP + 8 + round(len(label) * CHAR))
    more = len(stored.files) - MOST_FILES
    if more > 0:
        markup += element("text", f"{more:,} more", x=CHIP + 8, y=MOST_FILES * (LINE + 2) + 14, class_="sv-soft")
    return SvgFragment(markup, width, min(len(stored.files), MOST_FILES + 1) * (LINE + 2))


def _bytes(stored: CheckpointSubject) -> SvgFragment:
    """Write which bytes of which file are which part."""
    lines = [_line(part) for part in stored.parts[:MOST_PARTS]]
    more = len(stored.parts) - len(lines)
    lines += [f"{more:,} more: shardviz show CHECKPOINT TENSOR --all"] if more else []
    texts = (element("text", words(text), x=0, y=14 + at * LINE, class_="sv-soft") for at, text in enumerate(lines))
    return SvgFragment("".join(texts), round(max(map(len, lines), default=0) * CHAR), LINE * len(lines))


def _line(part: StoredPart) -> str:
    where = "in no file" if part.file is None else f"file {part.file}, {part.bytes}"
    return f"{part.region}  {where}"


def _short_name(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 1]}…"


def beside_svg(pair: ComparisonSubject, *, is_alone: bool = True) -> str:
    """Draw a tensor of a job next to the checkpoint's; the arguments are those of `svg`."""
    parts = [*(_headlines(pair) if is_alone else []), _heading_beside(pair)]
    maps = _maps_beside(pair.shape, pair.sides) if pair.sides is not None else SvgFragment("", 0, 0)
    parts.append(beside_map(maps, files_drawing(pair.stored)) if pair.stored is not None else maps)
    parts += [exhibit_drawing(pair.exhibit)] if pair.exhibit is not None else []
    return sheet(parts, pair.name, f"{pair.outcome.verdict}: {pair.outcome.why}", is_alone=is_alone)


def _headlines(pair: ComparisonSubject) -> list[SvgFragment]:
    outcome = pair.outcome
    glyph = UNICODE.differs if pair.is_wrong else UNICODE.good if outcome.verdict == "equal" else UNICODE.unknown
    lines = [paragraph(f"{glyph} {outcome.verdict}", "sv-bad" if pair.is_wrong else "sv-good")]
    lines += [paragraph(text, "sv-bad sv-said") for text in (outcome.why, outcome.cause, outcome.fix) if text]
    return lines


def _heading_beside(pair: ComparisonSubject) -> SvgFragment:
    facts = summary_text(pair.stored) if pair.stored is not None else ""
    lines = [paragraph(text, "sv-soft") for text in (facts, pair.why) if text]
    return stack(paragraph(pair.name, "sv-name", NAME_CHAR), *lines)


def _maps_beside(shape: tuple[int, ...], sides: MarkedSides) -> SvgFragment:
    drawing = draw(sides, shape, BUDGET)
    return with_left_out(panels(drawing, partial(_panel_beside, sides=sides)), drawing)


def _panel_beside(panel: Panel, sides: MarkedSides) -> SvgFragment:
    scale = scale_for(panel)
    kinds = zip(sides.titles, (panel.claimed, panel.held), (RANKS, FILES), (sides.coloring, Coloring()), strict=True)
    maps = [
        (title, partial(side, panel, grid, scale, coloring, marked=True, said=replace(said, unlike=UNLIKE)))
        for title, grid, said, coloring in kinds
        if grid is not None
    ]
    return maps_drawing(panel, scale, maps)
