"""The page of one tensor as SVG, standalone for issues and papers, in light and dark.

It uses the same drawing model as the text page. Nothing is fetched, and the same tensor gives the same bytes. Color is
never the only sign: a rank is also its number, a difference also `✗` and a hatch.
"""

from __future__ import annotations

from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.layout import notation
from shardviz.layout.placements import spell
from shardviz.picture.markup import element, words
from shardviz.picture.model.drawing import Budget, draw
from shardviz.picture.model.palette import WRONG
from shardviz.picture.svg.map import BAND, GAP, TITLE_HEIGHT, bands, has_bands, scale_for, side, title_width
from shardviz.picture.svg.mesh import mesh_drawing
from shardviz.picture.svg.tile import CHAR, PATTERN, STYLE, SvgFragment, canvas, exhibit_drawing
from shardviz.picture.text.page import as_claimed, notes, slice_title
from shardviz.picture.text.terminal import UNICODE, Glyphs
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.drawing import Drawing, Panel
    from shardviz.picture.model.mesh import Heat
    from shardviz.picture.model.subjects.subject import Subject

BUDGET = Budget(rows=32, cols=12, panels=4)
MARGIN = 20
LINE = 20
MAX_WIDTH = 900
TEXT_AT = 72
MOST_LINES = 4
"""Lines that a name or a layout is broken into at most; the rest is left out."""

NAME_CHAR = 9.7
"""Pixels of a character of the name."""


def svg(subject: Subject) -> str:
    """Draw a tensor, claimed beside held if they differ, and its mesh, as a whole SVG file."""
    return figure(subject, style=True) + "\n"


def figure(subject: Subject, *, style: bool, headlines: bool = True) -> str:
    """Draw a tensor as an `svg` element.

    Args:
        subject: The tensor.
        style: Whether it brings `STYLE` and `PATTERN`; a page that has them once needs none.
        headlines: Whether it begins with its findings; a page that has them in words needs none.
    """
    drawing = draw(subject.sides, subject.shape, BUDGET)
    mesh = mesh_drawing(subject.mesh, subject.marked, subject.sides.axes)
    body = beside_map(panels(drawing, partial(_panel, subject=subject)), mesh, 2 * GAP)
    exhibits = [exhibit_drawing(one) for one in subject.exhibits]
    parts = [*(_headlines(subject) if headlines else []), _heading(subject), *exhibits, body, _notes(drawing, subject)]
    name = subject.name or notation.write(subject.claimed, subject.dtype) if subject.claimed else subject.name
    return sheet(parts, name, describe(drawing, subject), style=style)


def sheet(parts: Sequence[SvgFragment], name: str, about: str, *, style: bool) -> str:
    """Put the parts of a picture below each other on paper, as an `svg` element.

    Args:
        parts: From top to bottom.
        name: What is drawn.
        about: What it shows, for screen readers.
        style: As in `figure`.
    """
    width = max(part.width for part in parts) + 2 * MARGIN
    markup, top = "", MARGIN
    for part in parts:
        markup += element("g", part.markup, transform=f"translate({MARGIN} {top})")
        top += part.height + (16 if part.height else 0)
    height = top - 16 + MARGIN
    return canvas(
        f"{name}: {about}",
        width,
        height,
        element("title", words(name)),
        element("desc", words(about)),
        f"<style>{STYLE}</style>{PATTERN}" if style else "",
        element("rect", width=width, height=height, rx=6, class_="sv-paper"),
        markup,
    )


def mesh_figure(mesh: Mesh, *, style: bool, marked: Collection[int] = (), heat: Heat | None = None) -> str:
    """Draw a mesh alone as an `svg` element.

    Args:
        mesh: The mesh.
        style: As in `figure`.
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


def stack(*parts: SvgFragment) -> SvgFragment:
    """Put parts below each other."""
    markup, top = "", 0
    for part in parts:
        markup += element("g", part.markup, transform=f"translate(0 {top})")
        top += part.height
    return SvgFragment(markup, max((part.width for part in parts), default=0), top)


def _heading(subject: Subject) -> SvgFragment:
    """Write the tensor's name and its two layouts; long lines are broken."""
    name = paragraph(subject.name, "sv-name", NAME_CHAR)
    parts = [(0, name), (0, paragraph(f"{_sizes(subject)} on mesh {subject.mesh}", "sv-soft"))]
    markup, width, top = "", 0, 0
    for title, text, style in _sides(subject):
        parts.append((TEXT_AT, paragraph(text, style, title=title)))
    for at, (left, part) in enumerate(parts):
        top += 6 if at == 2 else 0
        markup += element("g", part.markup, transform=f"translate({left} {top})")
        width, top = max(width, left + part.width), top + part.height
    return SvgFragment(markup, width, top + 4)


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
        markup += element("g", part.markup, transform=f"translate(0 {top})")
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
    """Draw one side, or both if they differ: next to each other, or stacked if they are wide."""
    scale, titles = scale_for(panel), title_width(panel)
    grids = zip(subject.sides.titles, (panel.claimed, panel.held), strict=True)
    sides = [(name, grid) for name, grid in grids if grid is not None]
    if len(sides) == 2 and not panel.is_different:
        sides = [(" and ".join(subject.sides.titles), sides[0][1])]
    upright = 2 * (titles + scale.width) + GAP > MAX_WIDTH or len(panel.rows) == 1
    across = scale.width + (BAND if has_bands(panel) else GAP + titles)
    down = scale.height + 2 * TITLE_HEIGHT + GAP
    markup = ""
    for at, (name, grid) in enumerate(sides):
        x, y = (titles, at * down + 2 * TITLE_HEIGHT) if upright else (titles + at * across, 2 * TITLE_HEIGHT)
        marked, on_right = panel.marks_on(name), bool(at) and not upright
        drawn = side(panel, grid, scale, subject.sides.coloring, marked=marked, on_right=on_right)
        heading = element("text", words(name), x=scale.width // 2, y=-26, class_="sv-h sv-l")
        markup += element("g", heading, drawn, transform=f"translate({x} {y})")
    if not upright and len(sides) == 2:
        run = bands(panel, scale, subject.sides.coloring, BAND)
        markup = (
            element("g", run, transform=f"translate({titles + scale.width} {2 * TITLE_HEIGHT})") if run else ""
        ) + markup
    more = len(sides) - 1
    wide = titles + scale.width + (0 if upright else more * (across + titles))
    return SvgFragment(markup, wide, 2 * TITLE_HEIGHT + scale.height + (more * down if upright else 0))


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
    return SvgFragment(
        picture.markup + element("g", other.markup, transform=f"translate({at[0]} {at[1]})"), width, height
    )


def _notes(drawing: Drawing, subject: Subject) -> SvgFragment:
    return stack(*(paragraph(text, "sv-soft") for text in notes(drawing, subject, Glyphs())))
