"""The memory table: bytes a rank by role and by tensor, and the closed formulas beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.memory import ROLES, schemes, total, under_way, uses
from shardviz.picture.text.terminal import DIM, line
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.text import Text

    from shardviz.dump.dump import Dump
    from shardviz.dump.memory import Use

MAX_RANKS = 16
MAX_NAMES = 40


def memory_lines(dump: Dump, *, all_ranks: bool = False) -> list[Text]:
    """Return the tables of what a run's tensors take.

    Args:
        dump: The dump.
        all_ranks: Every rank's line and every tensor's, however many there are.
    """
    found = uses(dump)
    roles = [role for role in ROLES if any(use.role == role for use in found)]
    if not found:
        return [line("the dump has no tensors that take memory")]
    return [
        *_by_rank(dump, found, roles, all_ranks=all_ranks),
        *_under_way(dump),
        line(""),
        *_by_tensor(found, all_names=all_ranks),
        line(""),
        *_formulas(dump, found),
    ]


def _by_rank(dump: Dump, found: Sequence[Use], roles: Sequence[str], *, all_ranks: bool) -> list[Text]:
    ranks = sorted(dump.files.ranks)
    shown = ranks if all_ranks else ranks[:MAX_RANKS]
    rows = [["bytes", *roles, "together"]]
    rows += [
        [f"rank {rank}", *(f"{total(found, rank, role):,}" for role in roles), f"{total(found, rank):,}"]
        for rank in shown
    ]
    wholes = [sum(use.whole for use in found if use.role == role) for role in roles]
    rows.append(["unsharded", *(f"{whole:,}" for whole in wholes), f"{sum(wholes):,}"])
    lines = table(rows)
    if len(shown) < len(ranks):
        most = max(total(found, rank) for rank in ranks)
        lines.insert(-1, line((f"and {len(ranks) - len(shown):,} ranks more, of all the most {most:,}", DIM)))
    return lines


def _under_way(dump: Dump) -> list[Text]:
    """Say how often a pipeline's activations are counted."""
    counts = {under_way(record.schedule) for record in dump.files.ranks.values() if record.schedule}
    if counts <= {1.0}:
        return []
    most = f"{min(counts):g} to {max(counts):g}" if len(counts) > 1 else f"{max(counts):g}"
    return [line((f"activations of {most} micro-batches, as many as wait on a rank for their backward at once", DIM))]


def _by_tensor(found: Sequence[Use], *, all_names: bool) -> list[Text]:
    rows = [["tensor", "role", "a rank", "unsharded"]]
    ordered = sorted(found, key=lambda use: -max(use.bytes.values()))
    shown = ordered if all_names else ordered[:MAX_NAMES]
    rows += [[printable(use.name), use.role, _range(use.bytes.values()), f"{use.whole:,}"] for use in shown]
    lines = table(rows, left=2)
    if len(shown) < len(ordered):
        lines.append(line((f"and {len(ordered) - len(shown):,} tensors more: --all", DIM)))
    return lines


def _range(sizes: Iterable[int]) -> str:
    known = sorted(sizes)
    return f"{known[0]:,}" if known[0] == known[-1] else f"{known[0]:,} to {known[-1]:,}"


def _formulas(dump: Dump, found: Sequence[Use]) -> list[Text]:
    """Return what DDP and the ZeRO stages would take, beside what the fullest rank has without its activations."""
    params = sum(use.whole for use in found if use.role == "param")
    num_ranks = dump.files.run.num_ranks
    counted = [use for use in found if use.role in ("param", "grad", "optim")]
    most = max((total(counted, rank) for rank in dump.files.ranks), default=0)
    rows = [[f"P = {params:,} bytes, N = {num_ranks} ranks, Adam", "param + grad + optim", "bytes a rank"]]
    rows += [[scheme.name, scheme.formula, f"{scheme.bytes:,}"] for scheme in schemes(params, num_ranks)]
    rows.append(["this run", "the fullest rank", f"{most:,}"])
    return table(rows, left=2)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[Text]:
    """Return rows of cells as lines, the first row dim.

    Args:
        rows: Each with as many cells.
        left: So many columns are set flush left, the others flush right.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text = "  ".join(cells)
        lines.append(line((text, DIM)) if number == 0 else line(text))
    return lines
