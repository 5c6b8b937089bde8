"""Ranks as text: a finding's exhibit, each rank's part, and the numbers of small tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.dump.validate import leaves
from shardviz.layout.mesh import ranks_by
from shardviz.picture.exhibits.exhibit import columns_of
from shardviz.picture.exhibits.steps import LEVELS
from shardviz.picture.model.holders import mask_of, ranks_in_words, ranks_text
from shardviz.picture.model.palette import RIGHT, WRONG
from shardviz.picture.model.subject import NOTHING, PLAIN
from shardviz.picture.text.terminal import ASCII, BAD, DIM, GOOD, align, line, pad, widest, wrapped
from shardviz.text import counted, join_numbers, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rich.text import Text

    from shardviz.dump.dump import Shard, Tensor
    from shardviz.picture.exhibits.exhibit import Cell, Exhibit
    from shardviz.picture.model.subject import Subject
    from shardviz.picture.text.terminal import Glyphs, Terminal


INDENT = "   "
GAP = 2
_IN_ASCII = str.maketrans(
    dict(zip(LEVELS, ".12345678", strict=True)) | {"…": ASCII.more, WRONG: ASCII.wrong, RIGHT: ASCII.good}
)


def exhibit_lines(exhibit: Exhibit, terminal: Terminal) -> list[Text]:
    """Return an exhibit's caption and table; `…` stands for columns on the right that don't fit."""
    spelled = _in_ascii if terminal.glyphs == ASCII else printable
    titles = [spelled(title) for title in (exhibit.heads[0], *(row.title for row in exhibit.rows))]
    columns = columns_of(exhibit, spelled)
    widths = [widest(titles), *map(widest, columns)]
    room = terminal.width - len(INDENT)
    more = (" " * GAP + terminal.glyphs.more, DIM) if _num_fitting(widths, room) < len(widths) else ("", "")
    kept = _num_fitting(widths, room - len(more[0]))
    lines = wrapped(printable(exhibit.caption), terminal.width, line("  "), 2)
    for caption in lines:
        caption.stylize("bold", 2)
    lines.append(line(_line(titles, columns, widths[:kept], 0, []), more))
    for at, row in enumerate(exhibit.rows, 1):
        lines += [line("")] if row.is_apart and at > 1 else []
        lines.append(_line(titles, columns, widths[:kept], at, row.cells))
    if exhibit.left_out:
        left_out = line((f"{INDENT}{terminal.glyphs.more} {exhibit.more}", DIM))
        lines.insert(len(lines) - exhibit.sums_up, left_out)
    return lines


def _line(titles: list[str], columns: list[list[str]], widths: list[int], at: int, cells: Sequence[Cell]) -> Text:
    """Write the heads of the columns, which come first, or one of the rows below them."""
    styles = [BAD if cell.is_wrong else GOOD if cell.is_right else "" for cell in cells] or [DIM] * len(columns)
    texts = zip(columns, widths[1:], [*styles, *[""] * len(columns)], strict=False)
    parts = ((" " * GAP + pad(column[at], width), style) for column, width, style in texts)
    return line(INDENT, (pad(titles[at], widths[0]), "" if at else DIM), *parts)


def _in_ascii(text: str) -> str:
    return printable(text).translate(_IN_ASCII)


def _num_fitting(widths: list[int], room: int) -> int:
    """Return how many columns fit, at least two."""
    used = 0
    for count, width in enumerate(widths):
        used += width + GAP * bool(count)
        if used > room and count >= 2:
            return count
    return len(widths)


MOST_RANK_LINES = 32


def rank_lines(subject: Subject, terminal: Terminal, *, all_ranks: bool = False) -> list[Text]:
    """List the claimed and the held part of each rank; ranks with the same parts share a line.

    Args:
        all_ranks: Print every line, however many there are.
    """
    rows, left = rank_rows(subject, None if all_ranks else MOST_RANK_LINES)
    lines = _rank_table(rows, terminal, subject) if rows else []
    if left:
        more = f"{counted(left, 'more line')}: --all prints {'it' if left == 1 else 'them'}"
        lines.append(line((f"{terminal.glyphs.more} {more}", DIM)))
    return lines


@dataclass(frozen=True, slots=True)
class RankRow:
    """A line of the list of ranks.

    Attributes:
        claims: The part that they claim; empty if unknown.
        holds: The part that they hold; empty if unknown.
        is_named: Whether a finding names them.
    """

    ranks: str
    claims: str
    holds: str
    is_named: bool = False

    @property
    def is_same(self) -> bool:
        """Whether they hold the part they claim, or one of the two is unknown."""
        return self.claims in ("", PLAIN) or self.holds in ("", self.claims)


def rank_rows(subject: Subject, most: int | None) -> tuple[list[RankRow], int]:
    """Return rows of ranks with their claimed and held parts, and how many rows are left out.

    Args:
        most: Rows to return at most, those that differ or that findings name before the others; None for all.
    """
    marked = subject.marked
    ranks = sorted({*subject.claims, *subject.holds})
    groups = ranks_by(
        (rank, (subject.claims.get(rank, ""), subject.holds.get(rank, ""), rank in marked)) for rank in ranks
    )
    rows = [RankRow(join_numbers(ranks, ","), *key) for key, ranks in groups.items()]
    order = sorted(range(len(rows)), key=lambda at: (rows[at].is_same, not rows[at].is_named))[:most]
    return [rows[at] for at in sorted(order)], len(rows) - len(order)


def _rank_table(rows: list[RankRow], terminal: Terminal, subject: Subject) -> list[Text]:
    heads = ("ranks", subject.sides.titles[0] if subject.name else "part", subject.sides.titles[1])
    cells = [(terminal.spelled(row.ranks), row.claims, row.holds) for row in rows]
    kept = [column for column in range(3) if column == 0 or any(row[column] for row in cells)]
    if len(kept) == 3 and all(row.claims == row.holds for row in rows):
        heads, kept = ("ranks", " and ".join(subject.sides.titles), ""), [0, 1]
    heading, *texts = align([[row[column] for column in kept] for row in (heads, *cells)], len(kept))
    lines = [line((f"   {heading}", DIM))]
    owners = ranks_by((rank, text) for rank, text in subject.claims.items() if text not in (NOTHING, PLAIN))
    in_place = " and ".join(words for _, words in subject.sides.blamed)
    for row, text in zip(rows, texts, strict=True):
        if row.is_same and not row.is_named:
            lines.append(line(f"   {text}"))
            continue
        is_moved = not row.is_same and row.holds in owners
        owner = f"  the part of {ranks_in_words(owners[row.holds], 20)}" if is_moved else ""
        owner = f"  {in_place}" if row.is_same and in_place else owner
        lines.append(line((f"{terminal.glyphs.wrong:<3}{text}", BAD), owner))
    return lines


MOST_NUMBERS = 64
"""Tensors with more numbers than this on a rank are not shown."""

MOST_BLOCKS = 16
"""How many different sets of numbers are shown."""

DIGITS = (5, 9, 17)
"""Digits that numbers are written in: more only if fewer do not tell a finding's ranks from the others."""

MOST_NAMED = 24
"""Columns that a block's ranks take beside its first row; longer lists have a line of their own."""

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """The numbers of some ranks.

    Attributes:
        rows: The numbers, in rows of the last dim.
        is_named: Whether a finding names these ranks.
        wrong: Row and column of the numbers that ranks with the same part have otherwise, if no finding names these.
    """

    ranks: tuple[int, ...]
    rows: Rows
    is_named: bool = False
    wrong: frozenset[tuple[int, int]] = frozenset()

    @property
    def is_wrong(self) -> bool:
        """Whether its ranks or its numbers are marked."""
        return self.is_named or bool(self.wrong)


def value_lines(
    tensor: Tensor,
    terminal: Terminal,
    *,
    named: Collection[int] = (),
    parts: Mapping[int, str] | None = None,
    all_ranks: bool = False,
) -> list[Text]:
    """Return a block of numbers for each set of ranks with equal ones; empty if any are unknown.

    Args:
        tensor: The tensor; a stamped one has ids instead of numbers of its own.
        named: The ranks that findings name, which are marked.
        parts: The part that each rank has, in words: ranks with the same part should have the same numbers.
        all_ranks: Whether every rank's are shown, however many there are.
    """
    bodies = [shard.body for shard in tensor.shards.values()]
    if any(body.values is None or math.prod(body.local_shape) > MOST_NUMBERS for body in bodies):
        return []
    blocks = _compared(_blocks(tensor, frozenset(named)), parts or {})
    left = 0 if all_ranks else max(len(blocks) - MOST_BLOCKS, 0)
    kept = {block.ranks for block in sorted(blocks, key=lambda block: not block.is_wrong)[: len(blocks) - left]}
    lines = _table(tensor, [block for block in blocks if block.ranks in kept], terminal)
    return [*lines, line((f"   and {counted(left, 'more set')} of ranks: --all", DIM))] if left else lines


def _table(tensor: Tensor, blocks: Sequence[_Block], terminal: Terminal) -> list[Text]:
    names = [terminal.spelled(ranks_text(mask_of(block.ranks))) for block in blocks]
    width = max(5, *(len(name) for name in names if len(name) <= MOST_NAMED))
    columns, count = _columns(blocks, terminal.width - width - 5)
    title = "values of the gradient" if tensor.role == "grad" else "values"
    if len(columns) < count:
        title += f", columns {join_numbers(columns, ', ')} of {count}"
    lines = [line((f"   {'ranks'.ljust(width)}  {title}", DIM))]
    for block, name in zip(blocks, names, strict=True):
        lines += _lines(block, name, width, columns, terminal.glyphs)
    return lines


def _blocks(tensor: Tensor, named: frozenset[int]) -> list[_Block]:
    """Group ranks by their numbers, in as few digits as set named ranks apart from the others."""
    coarsest: list[_Block] = []
    for digits in DIGITS:
        ranks = ranks_by((rank, (_rows(shard, digits), rank in named)) for rank, shard in tensor.shards.items())
        blocks = [_Block(tuple(own), rows, is_named) for (rows, is_named), own in ranks.items()]
        coarsest = coarsest or blocks
        if len({block.rows for block in blocks}) == len(blocks):
            return blocks
    return coarsest


def _compared(blocks: Sequence[_Block], parts: Mapping[int, str]) -> list[_Block]:
    """Mark what named ranks have differently from most unnamed ranks with the same part."""
    usual: dict[str, _Block] = {}
    for block in sorted(blocks, key=lambda block: len(block.ranks)):
        if not block.is_named:
            usual[parts.get(block.ranks[0], "")] = block
    return [_compare_with(block, usual.get(parts.get(block.ranks[0], ""))) for block in blocks]


def _compare_with(block: _Block, right: _Block | None) -> _Block:
    if right is None or not block.is_named or list(map(len, right.rows)) != list(map(len, block.rows)):
        return block
    wrong = (
        (row, column)
        for row, texts in enumerate(block.rows)
        for column, text in enumerate(texts)
        if text != right.rows[row][column]
    )
    return _Block(block.ranks, block.rows, block.is_named, frozenset(wrong))


def _columns(blocks: Sequence[_Block], room: int) -> tuple[list[int], int]:
    """Return the columns that fit, wrong and differing ones first, and how many there are."""
    count = max((len(row) for block in blocks for row in block.rows), default=0)
    wide = 2 + max((len(text) for block in blocks for row in block.rows for text in row), default=1)
    wide += any(block.wrong for block in blocks)
    wrong = Counter(column for block in blocks for _, column in block.wrong)
    alike = {column for column in range(count) if len({_column(block, column) for block in blocks}) == 1}
    order = sorted(range(count), key=lambda column: (-wrong[column], column in alike, column))
    return sorted(order[: max((room + 2) // wide, 1)]), count


def _column(block: _Block, column: int) -> tuple[str, ...]:
    return tuple(row[column] for row in block.rows if column < len(row))


def _rows(shard: Shard, digits: int) -> Rows:
    """Return a shard's numbers as rows of its last dim."""
    values = leaves(shard.body.values)
    flat = [f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in values]
    columns = shard.body.local_shape[-1] if shard.body.local_shape else 1
    return tuple(tuple(flat[at : at + columns]) for at in range(0, len(flat), max(columns, 1)))


def _lines(block: _Block, name: str, width: int, columns: Sequence[int], glyphs: Glyphs) -> list[Text]:
    """Write a block's ranks and its rows; ranks that take much room have a line of their own."""
    title = (f"{glyphs.wrong if block.is_named else '':<3}{name:<{width}}", BAD if block.is_named else "")
    if not block.rows:
        return [line(title, "  ", ("nothing", DIM))]
    kept = [column for column in columns if column < len(block.rows[0])]
    if not kept:
        return [line(title, "  ", (glyphs.more, DIM))]
    table = [[_cell(block, (row, column), glyphs.wrong) for column in kept] for row in range(len(block.rows))]
    wide = max(len(text) for row in table for text, _ in row)
    lines = [line(title)] if len(name) > width else []
    for row in table:
        cells = [(f"  {text:>{wide}}", style) for text, style in row]
        lines.append(line((" " * (width + 3), "") if lines else title, *cells))
    return lines


def _cell(block: _Block, at: tuple[int, int], sign: str) -> tuple[str, str]:
    text = block.rows[at[0]][at[1]]
    return (f"{sign}{text}", BAD) if at in block.wrong else (text, "")
