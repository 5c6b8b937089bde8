"""The page of one tensor as SVG, standalone for issues and papers, in light and dark.

It uses the same drawing model as the text page. Nothing is fetched, and the same tensor gives the same bytes. Color is
never the only sign: a rank is also its number, a difference also `✗` and a hatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.layout import notation
from shardviz.layout.placements import spell
from shardviz.picture.markup import element, words
from shardviz.picture.model.drawing import Budget, draw
from shardviz.picture.model.mesh import grids_of, kept_positions, marked_among, rows_and_columns
from shardviz.picture.model.palette import WRONG, Coloring
from shardviz.picture.svg.map import (
    BAND,
    CHAR,
    GAP,
    PATTERN,
    STYLE,
    TITLE_HEIGHT,
    PixelBox,
    Scale,
    SvgFragment,
    bands,
    canvas,
    exhibit_drawing,
    has_bands,
    scale_for,
    side,
    tile,
    title_width,
)
from shardviz.picture.text.page import as_claimed, notes, slice_title
from shardviz.picture.text.terminal import UNICODE, Glyphs
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.drawing import Drawing, Panel
    from shardviz.picture.model.mesh import Heat, RankGrid
    from shardviz.picture.model.subject import Subject

TILE_HEIGHT = 24
HEAD = 20
MOST_ROWS = 12
MOST_COLS = 10
MOST_GRIDS = 4


@dataclass(frozen=True, slots=True)
class _TileMarks:
    """What a mesh's tiles show besides ranks: marks or heat."""

    coloring: Coloring
    marked: Collection[int]
    heat: Heat | None


def mesh_drawing(
    mesh: Mesh, marked: Collection[int] = (), axes: tuple[str, ...] = (), heat: Heat | None = None
) -> SvgFragment:
    """Draw a mesh.

    Args:
        marked: Ranks that carry the glyph `✗`; their rows and columns are shown before others.
        axes: The axes that ranks get their colors by, outermost first; by default all.
        heat: What ranks are colored by instead, with a sign for how much.
    """
    marks = _TileMarks(Coloring(mesh, axes), marked, heat)
    shown, left = grids_of(mesh, MOST_GRIDS, marked)
    drawn = stack(*(_draw_grid(grid, marks) for grid in shown), gap=12, at=(0, HEAD if heat is not None else 0))
    markup, width, height = drawn.markup, drawn.width, drawn.height
    if heat is not None:
        markup = element("text", words(str(heat)), x=0, y=12, class_="sv-soft") + markup
        width = max(width, round(cell_len(str(heat)) * CHAR))
    if left:
        hidden = (rank for rank in marked if rank in mesh and not any(rank in grid for grid in shown))
        text = f"… {counted(left, 'more grid')}{marked_among(hidden, marks.marked)}"
        markup += element("text", words(text), x=0, y=height + HEAD, class_="sv-i sv-start")
        height += HEAD
    return SvgFragment(markup, width, height)


def _draw_grid(grid: RankGrid, marks: _TileMarks) -> SvgFragment:
    heads = [grid.row_title(row) for row in range(grid.num_rows)]
    titles = [grid.col_title(col) for col in range(grid.num_cols)]
    signs = 2 * bool(marks.marked) + 2 * (marks.heat is not None)
    longest = max(len(str(max(grid.mesh.ranks))) + signs, *map(len, titles))
    step = round(longest * CHAR) + (14 if marks.marked else 10)
    head = HEAD if grid.title else 0
    parts = [element("text", words(grid.title), x=0, y=12, class_="sv-h")] if grid.title else []
    wanted_rows, wanted_cols = rows_and_columns(marks.marked, grid)
    rows = kept_positions(grid.num_rows, MOST_ROWS, wanted_rows)
    cols = kept_positions(grid.num_cols, MOST_COLS, wanted_cols)
    texts = [heads[row] if isinstance(row, int) else _gap_text(grid, row, marks) for row in rows]
    gutter = round(max(map(len, texts)) * CHAR) + (8 if grid.down else 0) + 8 * any(WRONG in text for text in texts)
    for at, col in enumerate(cols):
        text = titles[col] if isinstance(col, int) else "…"
        parts.append(_title(text, gutter + at * step + step // 2, head + 13))
    for line, (row, text) in enumerate(zip(rows, texts, strict=True)):
        top = head + HEAD + line * TILE_HEIGHT
        parts.append(element("text", words(text), x=gutter - 8, y=top + 16, class_="sv-i sv-end") if gutter else "")
        places = [PixelBox(gutter + at * step, top, step, TILE_HEIGHT) for at in range(len(cols))]
        parts += (_cell(grid, row, col, place, marks) for col, place in zip(cols, places, strict=True))
    return SvgFragment("".join(parts), gutter + step * len(cols), head + HEAD + TILE_HEIGHT * len(rows))


def _gap_text(grid: RankGrid, rows: range, marks: _TileMarks) -> str:
    hidden = marked_among((grid.rank_at(row, col) for row in rows for col in range(grid.num_cols)), marks.marked)
    return f"… {counted(len(rows), 'more row')}{hidden}"


def _title(text: str, x: int, y: int) -> str:
    return element("text", words(text), x=x, y=y, class_="sv-i")


def _cell(grid: RankGrid, row: int | range, col: int | range, place: PixelBox, marks: _TileMarks) -> str:
    """Draw a rank, or in place of those that are left out whether any of them is marked."""
    if isinstance(row, int) and isinstance(col, int):
        return _tile(grid, grid.rank_at(row, col), place, marks)
    rows, cols = (range(at, at + 1) if isinstance(at, int) else at for at in (row, col))
    is_marked = any(grid.rank_at(one, other) in marks.marked for one in rows for other in cols)
    return _title(WRONG if is_marked else "…", place.left + place.width // 2, place.top + 16)


def _tile(grid: RankGrid, rank: int, place: PixelBox, marks: _TileMarks) -> str:
    tooltip, label = f"rank {rank}: {grid.mesh.label(rank)}", str(rank)
    color: object = marks.coloring.color(rank)
    if marks.heat is not None:
        known = rank in marks.heat.by_rank
        tooltip += f", {marks.heat.title} {marks.heat.text(marks.heat.by_rank[rank])}" if known else ""
        label, color = f"{marks.heat.sign(rank)} {rank}", f"h{marks.heat.level(rank)}" if known else "nobody"
    if rank in marks.marked:
        tooltip, label = f"{tooltip}, in a finding", f"{WRONG} {label}"
    return tile(place, label, tooltip, color=color, ranks=(rank,), differs=rank in marks.marked)


BUDGET = Budget(rows=32, cols=12, panels=4)
MARGIN = 20
LINE = 20
MAX_WIDTH = 900
TEXT_AT = 72
MOST_LINES = 4
"""Lines that a name or a layout is broken into at most; the rest is left out."""

NAME_CHAR = 9.7
"""Pixels of a character of the name."""


def svg(subject: Subject, *, is_alone: bool = True) -> str:
    """Draw a tensor, claimed beside held if they differ, and its mesh.

    Args:
        is_alone: Whether it is a whole file, with its findings and a style; a page has them once, in words.
    """
    drawing = draw(subject.sides, subject.shape, BUDGET)
    mesh = mesh_drawing(subject.mesh, subject.marked, subject.sides.axes)
    body = beside_map(panels(drawing, partial(_panel, subject=subject)), mesh, 2 * GAP)
    exhibits = [exhibit_drawing(one) for one in subject.exhibits]
    said = stack(*(paragraph(text, "sv-soft") for text in notes(drawing, subject, Glyphs())))
    parts = [*(_headlines(subject) if is_alone else []), _heading(subject), *exhibits, body, said]
    name = subject.name or notation.write(subject.claimed, subject.dtype) if subject.claimed else subject.name
    return sheet(parts, name, describe(drawing, subject), is_alone=is_alone)


def sheet(parts: Sequence[SvgFragment], name: str, about: str, *, is_alone: bool) -> str:
    """Put the parts of a picture below each other on paper, as an `svg` element.

    Args:
        parts: From top to bottom.
        about: What it shows, for screen readers.
    """
    body = stack(*parts, gap=16, at=(MARGIN, MARGIN))
    width, height = body.width + 2 * MARGIN, body.height + MARGIN
    drawn = canvas(
        f"{name}: {about}",
        width,
        height,
        element("title", words(name)),
        element("desc", words(about)),
        f"<style>{STYLE}</style>{PATTERN}" if is_alone else "",
        element("rect", width=width, height=height, rx=6, class_="sv-paper"),
        body.markup,
    )
    return drawn + "\n" * is_alone


def mesh_figure(mesh: Mesh, *, style: bool, marked: Collection[int] = (), heat: Heat | None = None) -> str:
    """Draw a mesh alone as an `svg` element.

    Args:
        marked: Ranks that carry the glyph `✗`.
        heat: What ranks are colored by, with a sign for how much; by their place by default.
    """
    drawn = mesh_drawing(mesh, marked, heat=heat)
    paper = f"<style>{STYLE}</style>" + element("rect", width=drawn.width, height=drawn.height, class_="sv-paper")
    about = f"mesh {mesh}: ranks {min(mesh.ranks)} to {max(mesh.ranks)} in a grid{f', {heat}' if heat else ''}"
    title = element("title", words(f"mesh {mesh}"))
    return canvas(about, drawn.width, drawn.height, title, paper if style else "", drawn.markup)


def describe(drawing: Drawing, subject: Subject) -> str:
    """Describe a picture in a few sentences, for screen readers."""
    parts = [f"{_sizes(subject)} on mesh {subject.mesh}", *(f"{title} {text}" for title, text, _ in _sides(subject))]
    if subject.misplaced:
        what = "what is intended" if subject.intended else "what they claim"
        parts.append(f"{len(subject.misplaced):,} of {len(subject.claims):,} ranks do not hold {what}")
    return ". ".join([*parts, *notes(drawing, subject, Glyphs())]) + "."


def _headlines(subject: Subject) -> list[SvgFragment]:
    """Write the kind of each finding, and what is wrong in numbers."""
    return [
        stack(
            paragraph(f"{UNICODE.of(finding.severity)} {finding.kind}", "sv-bad"),
            paragraph(finding.summary, "sv-bad sv-said"),
        )
        for finding in subject.findings
    ]


def stack(*parts: SvgFragment, gap: int = 0, at: tuple[int, int] = (0, 0)) -> SvgFragment:
    """Put parts below each other; the height is that of the last one's end."""
    markup, (left, top) = "", at
    for part in parts:
        markup += part.moved(left, top)
        top += part.height + gap * bool(part.height)
    return SvgFragment(markup, max((part.width for part in parts), default=0), top - gap)


def _heading(subject: Subject) -> SvgFragment:
    """Write the tensor's name and its two layouts; long lines are broken."""
    sizes = paragraph(f"{_sizes(subject)} on mesh {subject.mesh}", "sv-soft")
    head = stack(paragraph(subject.name, "sv-name", NAME_CHAR), sizes)
    layouts = (paragraph(text, style, title=title) for title, text, style in _sides(subject))
    below = stack(*layouts, at=(TEXT_AT, head.height + 6))
    return SvgFragment(head.markup + below.markup, max(head.width, TEXT_AT + below.width), below.height + 4)


def paragraph(text: str, style: str, char: float = CHAR, title: str = "") -> SvgFragment:
    """Write text in lines that are not wider than a picture, its title to the left of the first."""
    shown = printable(text)
    lines = wrap(shown, int((MAX_WIDTH - TEXT_AT * bool(title)) / char), max_lines=MOST_LINES, placeholder="…")
    markup = element("text", words(title), x=-TEXT_AT, y=14, class_="sv-soft") if title else ""
    for at, line in enumerate(lines):
        markup += element("text", words(line), x=0, y=14 + at * LINE, class_=style)
    return SvgFragment(markup, round(max(map(cell_len, lines), default=0) * char), LINE * len(lines))


def _sizes(subject: Subject) -> str:
    return f"{subject.dtype} {' × '.join(map(str, subject.shape)) or 'one number'}"


def _sides(subject: Subject) -> list[tuple[str, str, str]]:
    """Return the claimed and the held layout: title, text and style."""
    claimed, held = subject.claimed, subject.held
    sides = [("claimed", _layout_text(claimed, subject) if claimed else "nothing: a plain tensor", "sv-h")]
    if not subject.holds:
        return sides
    if subject.held_words:
        return [*sides, ("held", f"{WRONG} {subject.held_words}", "sv-bad")]
    if held is not None and held == claimed:
        text = as_claimed(subject)
        if subject.findings and not subject.silent:
            intended = [("intended", subject.intended, "sv-h")] if subject.intended else []
            return [*sides, ("held", text, "sv-soft"), *intended]
        return [*sides, ("held", f"? {text}", "sv-bad") if subject.silent else ("held", f"✓ {text}", "sv-good")]
    text = _layout_text(held, subject) if held is not None else "no layout fits"
    is_bad = claimed is not None or held is None
    return [*sides, ("held", f"{WRONG} {text}" if is_bad else text, "sv-bad" if is_bad else "sv-h")]


def _layout_text(layout: Layout, subject: Subject) -> str:
    placements = layout.placements()
    return notation.write(layout, subject.dtype) + (f"  {spell(placements)}" if placements else "")


def panels(drawing: Drawing, drawn: Callable[[Panel], SvgFragment]) -> SvgFragment:
    """Put the panels of a drawing below each other, each under the slice that it is."""
    markup, width, top = "", 0, 0
    for panel in drawing.panels:
        if panel.at:
            markup += element("text", words(slice_title(panel)), x=0, y=top + 12, class_="sv-h")
            top += LINE
        part = drawn(panel)
        markup += part.moved(0, top)
        width, top = max(width, part.width), top + part.height + GAP
    return SvgFragment(markup, width, max(top - GAP, 0))


def with_left_out(picture: SvgFragment, drawing: Drawing) -> SvgFragment:
    """Say below the panels how many more slices there are."""
    more = drawing.num_panels - len(drawing.panels)
    if more <= 0:
        return picture
    text = element("text", words(counted(more, "more slice")), x=0, y=picture.height + GAP, class_="sv-soft")
    return SvgFragment(picture.markup + text, picture.width, picture.height + LINE)


def _panel(panel: Panel, subject: Subject) -> SvgFragment:
    """Draw one side, or both if they differ."""
    scale, coloring = scale_for(panel), subject.sides.coloring
    grids = zip(subject.sides.titles, (panel.claimed, panel.held), strict=True)
    sides = [(name, grid) for name, grid in grids if grid is not None]
    if len(sides) == 2 and not panel.is_different:
        sides = [(" and ".join(subject.sides.titles), sides[0][1])]
    maps = [(name, partial(side, panel, grid, scale, coloring, marked=panel.marks_on(name))) for name, grid in sides]
    return maps_drawing(panel, scale, maps, coloring)


def maps_drawing(
    panel: Panel, scale: Scale, maps: Sequence[tuple[str, Callable[..., str]]], linked: Coloring | None = None
) -> SvgFragment:
    """Put the maps of a panel next to each other, or below each other if they are wide.

    Args:
        maps: Their titles, and what draws each.
        linked: What colors the bands between two maps, whose row titles are then on their outer sides.
    """
    titles, many = title_width(panel), len(maps)
    upright = 2 * (titles + scale.width) + GAP > MAX_WIDTH or len(panel.rows) == 1
    across = scale.width + (BAND if linked is not None and has_bands(panel) else GAP + titles)
    down = scale.height + 2 * TITLE_HEIGHT + GAP
    markup = ""
    if linked is not None and not upright and many == 2:
        run = bands(panel, scale, linked, BAND)
        markup = SvgFragment(run, BAND, scale.height).moved(titles + scale.width, 2 * TITLE_HEIGHT) if run else ""
    for at, (name, drawn) in enumerate(maps):
        x, y = (titles, at * down + 2 * TITLE_HEIGHT) if upright else (titles + at * across, 2 * TITLE_HEIGHT)
        heading = element("text", words(name), x=scale.width // 2, y=-26, class_="sv-h sv-l")
        picture = drawn(on_right=linked is not None and at > 0 and not upright)
        markup += element("g", heading, picture, transform=f"translate({x} {y})")
    more = many - 1
    wide = titles + scale.width + (0 if upright else more * (across + titles * (linked is not None)))
    return SvgFragment(markup, wide, down - GAP + (more * down if upright else 0))


def beside_map(picture: SvgFragment, other: SvgFragment, gap: int = GAP) -> SvgFragment:
    """Put the mesh, or files, beside the picture, or below it if there is no room."""
    if not picture.width:
        return other
    if picture.width + gap + other.width <= MAX_WIDTH:
        at, width = (picture.width + gap, TITLE_HEIGHT), picture.width + gap + other.width
        height = max(picture.height, other.height + TITLE_HEIGHT)
    else:
        at, width = (0, picture.height + GAP), max(picture.width, other.width)
        height = picture.height + GAP + other.height
    return SvgFragment(picture.markup + other.moved(*at), width, height)
