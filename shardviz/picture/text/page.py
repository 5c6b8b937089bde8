"""The page of one tensor as text: its layout, its picture next to the mesh, and its ranks; a mesh as text."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.layout import notation
from shardviz.layout.placements import spell
from shardviz.picture.model.drawing import Budget, draw
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.model.sides import CLAIMED_AND_HELD, INTENDED_AND_HELD, NO_FILE
from shardviz.picture.model.subject import NOTHING, PLAIN
from shardviz.picture.text.meshes import mesh_lines
from shardviz.picture.text.panels import band_lines, side_lines, sizes_for
from shardviz.picture.text.ranks import exhibit_lines
from shardviz.picture.text.report import headline
from shardviz.picture.text.terminal import BAD, DIM, GOOD, WARNING, line, side_by_side, wrapped
from shardviz.text import INSIDE, printable

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.layout.layout import Layout
    from shardviz.picture.model.drawing import Drawing, Panel
    from shardviz.picture.model.subject import Subject
    from shardviz.picture.text.panels import BoxSizes
    from shardviz.picture.text.terminal import Glyphs, Terminal


GAP = 4
TITLE = 9
"""Columns of the titles of layouts."""

MIN_PICTURE = 30
MAX_MESH = 64
MOST_RANKS = 48
"""Characters of a list of ranks within a sentence."""


def page_lines(subject: Subject, terminal: Terminal) -> list[Text]:
    """Describe a tensor and draw it, within the terminal's width if possible; findings first."""
    found = [row for finding in subject.findings for row in headline(finding, terminal)]
    seen = [row for one in subject.exhibits for row in (line(""), *exhibit_lines(one, terminal))]
    head = [*found, *([line("")] if found else []), *heading_lines(subject, terminal)]
    return [*head, *seen, line(""), *picture_lines(subject, terminal)]


def heading_lines(subject: Subject, terminal: Terminal) -> list[Text]:
    """Name the tensor, its claimed layout and its held layout."""
    sizes = f" {terminal.glyphs.times} ".join(map(str, subject.shape)) or "one number"
    what = f"{subject.dtype} {sizes} on mesh {subject.mesh}"
    return [
        *wrapped(what, terminal.width, line((printable(subject.name), "bold"), "  " if subject.name else ""), 2),
        *_side_lines("claimed", subject.claimed, subject, terminal),
        *(_side_lines("held", subject.held, subject, terminal) if subject.holds else []),
        *([line(f"{'intended':<{TITLE}}", (subject.intended, "bold"))] if subject.intended else []),
    ]


def _side_lines(title: str, layout: Layout | None, subject: Subject, terminal: Terminal) -> list[Text]:
    """Write one side in the notation and in torch's spelling, or why it cannot be."""
    head = line(f"{title:<{TITLE}}")
    if title == "held" and subject.held_words:
        rows = wrapped(printable(subject.held_words), terminal.width, head, TITLE)
        for row in rows:
            row.stylize(BAD, TITLE)
        return rows
    if layout is None:
        is_plain = title == "claimed"
        why = ("nothing: a plain tensor without placements", DIM) if is_plain else ("no layout fits", BAD)
        return [line(head, why)]
    if title == "held" and layout == subject.claimed:
        return [line(head, (as_claimed(subject), WARNING if subject.silent else DIM if subject.findings else GOOD))]
    written = line(head, (notation.write(layout, subject.dtype), "bold"))
    placements = layout.placements()
    spelled = f"  {spell(placements)}" if placements else ""
    if written.cell_len + cell_len(spelled) <= terminal.width:
        return [line(written, (spelled, DIM))]
    return [written, line(" " * (TITLE - 2), (spelled, DIM))]


def as_claimed(subject: Subject) -> str:
    """Say that every known rank holds its claim; with a finding, only that places are right."""
    text = "placed as claimed" if subject.findings else "as claimed"
    silent = ranks_in_words(subject.silent, MOST_RANKS)
    return f"{text}, but {silent} left no file that can be read" if subject.silent else text


def picture_lines(subject: Subject, terminal: Terminal) -> list[Text]:
    """Draw the tensor and the mesh, with notes on what the picture can't show."""
    drawing = draw(subject.sides, subject.shape, Budget(cols=max((terminal.width - 16) // 8, 3)))
    room = min(terminal.width, MAX_MESH)
    mesh = mesh_lines(subject.mesh, room, terminal.glyphs, subject.marked, subject.sides.axes)
    lines: list[Text] = []
    for at, panel in enumerate(drawing.panels):
        lines += [line("")] if at else []
        lines += [line((slice_title(panel), "bold"))] if panel.at else []
        lines += _arrange(panel, subject, [] if at else mesh, terminal)
    if not drawing.panels:
        lines += mesh
    words = _note_lines(drawing, subject, terminal)
    return [*lines, line(""), *words] if words else lines


def slice_title(panel: Panel) -> str:
    """Name the slice of a tensor that a panel shows."""
    return ", ".join(f"dim {dim} at {span}" for dim, span in panel.at)


def _arrange(panel: Panel, subject: Subject, mesh: list[Text], terminal: Terminal) -> list[Text]:
    """Put the sides of a panel, and the mesh, next to each other as far as they fit."""
    width, mesh_width = terminal.width, max((row.cell_len for row in mesh), default=-GAP)
    if not panel.is_different:
        left = width - mesh_width - GAP
        sides = _sides(panel, subject, _sizes(panel, subject, left, terminal), terminal) if left >= MIN_PICTURE else []
        if not sides or _width(sides) > left:
            sides = _sides(panel, subject, _sizes(panel, subject, width, terminal), terminal)
    else:
        sides = _sides_with_lines(panel, subject, terminal) if len(panel.rows) > 1 else []
        if not sides and len(panel.rows) > 1:
            sides = _sides(panel, subject, _sizes(panel, subject, (width - GAP) // 2, terminal), terminal)
        if not sides or _width(sides) > width:
            upright = _sides(panel, subject, _sizes(panel, subject, width, terminal), terminal)
            sides = [[row for side in upright for row in side]]
    if _width(sides) + GAP + mesh_width <= width:
        return side_by_side([*sides, mesh], GAP)
    return [*side_by_side(sides, GAP), line(""), *mesh]


def _sides_with_lines(panel: Panel, subject: Subject, terminal: Terminal) -> list[list[Text]]:
    """Draw both sides with lines from expected to actual places; empty if they don't fit."""
    coloring, glyphs = subject.sides.coloring, terminal.glyphs
    for tall in (False, True):
        sizes = sizes_for(panel, coloring, (terminal.width - GAP) // 2, glyphs, tall=tall)
        bands = band_lines(panel, sizes, coloring, glyphs)
        sides = _sides(panel, subject, sizes, terminal) if bands else []
        if len(sides) == 2:
            above = [line("")] * (len(sides[0]) - len(bands))
            joined = side_by_side([sides[0], [*above, *bands], sides[1]], 1)
            return [joined] if _width([joined]) <= terminal.width else []
    return []


def _width(blocks: list[list[Text]]) -> int:
    return sum(max(row.cell_len for row in block) for block in blocks) + GAP * (len(blocks) - 1)


def _sizes(panel: Panel, subject: Subject, width: int, terminal: Terminal) -> BoxSizes:
    return sizes_for(panel, subject.sides.coloring, width, terminal.glyphs)


def _sides(panel: Panel, subject: Subject, sizes: BoxSizes, terminal: Terminal) -> list[list[Text]]:
    """Draw the claimed and the held side; one picture if they are the same."""
    known = list(zip(subject.sides.titles, (panel.claimed, panel.held), strict=True))
    grids = [(title, grid) for title, grid in known if grid is not None]
    if len(grids) == 2 and not panel.is_different:
        grids = [(" and ".join(subject.sides.titles), grids[0][1])]
    elif not subject.name:
        grids = [("ranks", grids[0][1])]
    return [
        [
            line(" " * (sizes.gutter + 1), (title, "bold")),
            *side_lines(panel, grid, sizes, subject.sides.coloring, terminal.glyphs, marked=panel.marks_on(title)),
        ]
        for title, grid in grids
    ]


def _note_lines(drawing: Drawing, subject: Subject, terminal: Terminal) -> list[Text]:
    found = notes(drawing, subject, terminal.glyphs)
    return [row for text in found for row in wrapped(text, terminal.width, line("  "), 4)]


def notes(drawing: Drawing, subject: Subject, glyphs: Glyphs) -> list[str]:
    """Return notes on the picture: its signs, parts left out, copies and pending sums."""
    marks = (f"{glyphs.wrong} {text}" for text in _about_marks(drawing, subject))
    sentences = [*marks, *_about_drawing(drawing), *_about_layout(subject)]
    if any(map(_has_mixed, drawing.panels)):
        sentences.append(f"{INSIDE}: parts of the block are on different ranks")
    return sentences


def _about_marks(drawing: Drawing, subject: Subject) -> list[str]:
    """Say what the glyph `wrong` means: places first, then what is wrong in place."""
    sides, sentences = subject.sides, list[str]()
    if drawing.is_different:
        sentences.append(_NOT_AS_OFTEN if sides.copies else _WRONG[sides.titles])
    elif subject.misplaced:
        sentences.append("holds its elements in a different order, or too few: see the list")
    is_placed = sides.is_placed and not sentences
    sentences += [f"placed as claimed; {text}" if is_placed and text != NO_FILE else text for text in sides.reasons]
    return sentences if sentences or not subject.marked else ["one of the finding's ranks"]


_WRONG = {
    CLAIMED_AND_HELD: "not held where the placements claim it",
    INTENDED_AND_HELD: "held by other ranks than intended",
}
"""What the glyph `wrong` means on a map, by the map's sides."""

_NOT_AS_OFTEN = "held by too many ranks, or by none"


def _has_mixed(panel: Panel) -> bool:
    grids = [grid for grid in (panel.claimed, panel.held) if grid is not None]
    return any(block.is_mixed for grid in grids for row in grid for block in row)


def _about_drawing(drawing: Drawing) -> list[str]:
    sentences = []
    if len(drawing.drawn) == 2 and len(drawing.shape) > 2:
        sentences.append(f"drawn: dim {drawing.drawn[0]} downwards, dim {drawing.drawn[1]} to the right")
    if drawing.whole:
        sizes = ", ".join(f"dim {dim} ({drawing.shape[dim]})" for dim in drawing.whole)
        sentences.append(f"not drawn (whole on every rank): {sizes}")
    if drawing.num_panels > len(drawing.panels):
        sentences.append(f"{len(drawing.panels)} of {drawing.num_panels:,} slices are shown")
    for panel in islice(drawing.panels, 1):
        for word, spans in (("downwards", panel.rows), ("to the right", panel.cols)):
            left_out = sum(span.parts for span in spans if span.parts > 1)
            if left_out:
                total = sum(span.parts for span in spans)
                sentences.append(f"not to scale: {left_out:,} of {total:,} parts {word} are not shown one by one")
    return sentences


def _about_layout(subject: Subject) -> list[str]:
    sentences, layout = [], subject.claimed
    if not math.prod(subject.shape):
        sentences.append("the tensor has no elements")
    elif subject.idle:
        sentences.append(f"no part is assigned to {ranks_in_words(subject.idle, MOST_RANKS)}: {_why_idle(layout)}")
    if layout is None:
        return sentences
    if subject.plain:
        sentences.append(
            f"no placements say which part is on {ranks_in_words(subject.plain, MOST_RANKS)}: a plain tensor"
        )
    copied = [axis for axis in layout.replicate_axes if layout.mesh.axis_size(axis) > 1]
    if copied:
        num_terms = layout.mesh.size_over(axis for axis, _ in layout.partial)
        sentences += _about_copies(subject, " and ".join(copied), num_terms)
    for axis, op in layout.partial:
        sentences.append(f"pending over {axis}: each rank of a block holds one term, and their {op} is not taken yet")
    return sentences


def _about_copies(subject: Subject, axes: str, num_terms: int) -> list[str]:
    """Say how many ranks share each part, or its term of a sum, or only claim to if something is wrong or unread."""
    claims = Counter(text for text in subject.claims.values() if text not in (NOTHING, PLAIN))
    count = max(claims.values(), default=0) // num_terms
    if count < 2:
        return []
    what = "term" if num_terms > 1 else "part"
    if subject.findings or subject.silent:
        return [f"by its placements {count:,} ranks along {axes} share each {what}"]
    return [f"{'equal ' if subject.is_checked else ''}copies along {axes}: {count:,} ranks hold each {what}"]


def _why_idle(layout: Layout | None) -> str:
    if layout is not None and layout.flat is not None:
        return "their parts of the flat parameter belong to other tensors or are padding"
    return "the dim has fewer chunks than ranks"
