"""The numbers that ranks have of one tensor, as the dump has them: small ones only, equal ones once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.dump.content import leaves
from shardviz.picture.model.holders import mask_of, ranks_text
from shardviz.picture.text.terminal import BAD, DIM, line
from shardviz.text import counted, join_numbers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rich.text import Text

    from shardviz.dump.dump import Shard, Tensor
    from shardviz.picture.text.terminal import Glyphs, Terminal

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
        ranks: The ranks that have them.
        rows: The numbers, in rows of the last dim.
        is_named: Whether a finding names these ranks.
        wrong: Row and column of the numbers that ranks with the same part have otherwise, where no finding names these.
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
    """Return a block of numbers for each set of ranks that have the same; none if the dump does not have them all.

    Args:
        tensor: The tensor; a stamped one has ids instead of numbers of its own.
        terminal: What the lines are for.
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
    """Return the ranks by what they have, in as few digits as tell the ranks that findings name from the others."""
    coarsest: list[_Block] = []
    for digits in DIGITS:
        ranks: dict[tuple[Rows, bool], list[int]] = {}
        for rank, shard in tensor.shards.items():
            ranks.setdefault((_rows(shard, digits), rank in named), []).append(rank)
        blocks = [_Block(tuple(own), rows, is_named) for (rows, is_named), own in ranks.items()]
        coarsest = coarsest or blocks
        if len({block.rows for block in blocks}) == len(blocks):
            return blocks
    return coarsest


def _compared(blocks: Sequence[_Block], parts: Mapping[int, str]) -> list[_Block]:
    """Mark what ranks that findings name have otherwise than most of the ranks with the same part that none names."""
    usual: dict[str, _Block] = {}
    for block in sorted(blocks, key=lambda block: len(block.ranks)):
        if not block.is_named:
            usual[parts.get(block.ranks[0], "")] = block
    return [_against(block, usual.get(parts.get(block.ranks[0], ""))) for block in blocks]


def _against(block: _Block, right: _Block | None) -> _Block:
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
    """Return the columns that there is room for, those with wrong numbers and unlike ones first, and how many exist."""
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
    flat = [_written(value, digits) for value in leaves(shard.body.values)]
    columns = shard.body.local_shape[-1] if shard.body.local_shape else 1
    return tuple(tuple(flat[at : at + columns]) for at in range(0, len(flat), max(columns, 1)))


def _written(value: Any, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


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
