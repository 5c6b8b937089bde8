"""The numbers that ranks have of one tensor, as the dump has them: small ones only, equal ones once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardviz.dump.content import leaves
from shardviz.picture.model.holders import mask_of, ranks_text
from shardviz.picture.text.terminal import DIM, line

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.dump.dump import Shard, Tensor
    from shardviz.picture.text.terminal import Terminal

MOST_NUMBERS = 64
"""Tensors with more numbers than this on a rank are not shown."""

MOST_BLOCKS = 16
"""How many different sets of numbers are shown."""


def value_lines(tensor: Tensor, terminal: Terminal, *, all_ranks: bool = False) -> list[Text]:
    """Return a block of numbers for each set of ranks that have the same; none where the dump does not have them all.

    Args:
        tensor: The tensor; a stamped one has ids instead of numbers of its own.
        terminal: What the lines are for.
        all_ranks: Whether every rank's are shown, however many there are.
    """
    blocks: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for rank, shard in tensor.shards.items():
        if shard.body.values is None or math.prod(shard.body.local_shape) > MOST_NUMBERS:
            return []
        blocks.setdefault(_rows(shard), []).append(rank)
    names = {rows: ranks_text(mask_of(ranks)) for rows, ranks in blocks.items()}
    width = max((len(name) for name in names.values()), default=0)
    lines = [line((f"   {'ranks'.ljust(width)}  values", DIM))]
    for rows, name in list(names.items())[: None if all_ranks else MOST_BLOCKS]:
        lines += _block(rows, name.ljust(max(width, 5)), terminal.width)
    left = 0 if all_ranks else len(names) - MOST_BLOCKS
    return [*lines, line((f"   and {left:,} more sets of ranks: --all", DIM))] if left > 0 else lines


def _rows(shard: Shard) -> tuple[tuple[str, ...], ...]:
    """Return a shard's numbers as rows of its last dim."""
    flat = [_written(value) for value in leaves(shard.body.values)]
    columns = shard.body.local_shape[-1] if shard.body.local_shape else 1
    return tuple(tuple(flat[at : at + columns]) for at in range(0, len(flat), max(columns, 1)))


def _written(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _block(rows: tuple[tuple[str, ...], ...], name: str, width: int) -> list[Text]:
    if not rows:
        return [line(f"   {name}  ", ("nothing", DIM))]
    cell = max(len(text) for row in rows for text in row)
    texts = ["  ".join(text.rjust(cell) for text in row) for row in rows]
    room = max(width - len(name) - 5, 8)
    cut = [text if len(text) <= room else text[: room - 4] + " ..." for text in texts]
    return [line(f"   {name if at == 0 else ' ' * len(name)}  {text}") for at, text in enumerate(cut)]
