"""The table of meshes that fit: each row is what a plan of that mesh alone says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.picture.text.tables.table import table
from shardviz.picture.text.terminal import line, wrapped
from shardviz.plan.counting.amounts import Amounts
from shardviz.plan.counting.traffic import crossing
from shardviz.plan.report import NO_STEP
from shardviz.text import bytes_text, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.text import Text

    from shardviz.layout.mesh import Mesh
    from shardviz.plan.ranks import PlannedRanks

_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) *((?P<unit>[KMGTP])(?P<binary>i?)B?|B)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """One mesh that was planned.

    Attributes:
        mesh: The mesh.
        bytes: Bytes that the GPU of the fullest rank has to hold.
        offloaded: Bytes that a rank has in a CPU's memory at most.
        crossing: Bytes the busiest rank receives in groups that cross nodes; None where no node size is given.
        failed: Why it was not planned; empty where it was.
        without_step: Why activations and collectives are not in it; empty where they are.
        notes: What a plan of this mesh alone says of how it was made.
        place: Where it stands among the meshes that were tried: rows come as they are known.
    """

    mesh: Mesh
    bytes: int = 0
    offloaded: int = 0
    crossing: int | None = None
    failed: str = ""
    without_step: str = ""
    notes: tuple[str, ...] = ()
    place: int = 0


def row_of(ranks: PlannedRanks) -> Row:
    """Return a plan's row."""
    amounts = Amounts(ranks)
    has_step = all(part.peak is not None for part in ranks.plan.parts)
    without = "" if has_step else ranks.plan.without_step or NO_STEP
    across = crossing(ranks.plan, ranks.mesh) if ranks.plan.node else None
    return Row(
        ranks.mesh,
        int(amounts.on_gpu.max()),
        int(amounts.offloaded.max()),
        across,
        without_step=without,
        notes=ranks.plan.how[1:],
    )


def bytes_of(text: str) -> int:
    """Read a number of bytes: `80GB`, `79.6GiB`, `80G`.

    Raises:
        ShardvizError: It is not one.

    Example:
        >>> bytes_of("80GB"), bytes_of("1.5KiB")
        (80000000000, 1536)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ShardvizError(f"--memory {text!r} is not a number of bytes with its unit", "write it as 80GB or 79GiB")
    power = " KMGTP".index((match["unit"] or " ").upper())
    base = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * float(base) ** power)


def choice_lines(rows: Sequence[Row], memory: int, width: int) -> Iterator[Text]:
    """Yield the meshes that fit, those that cross nodes least first, and then how many do not and why.

    Those without activations come last: they may not fit.

    Args:
        rows: The meshes that were planned.
        memory: Bytes that a rank has; 0 where it is not given.
        width: Columns.
    """
    rows = sorted(rows, key=lambda row: row.place)
    planned = [row for row in rows if not row.failed]
    fits = [row for row in planned if not memory or row.bytes <= memory]
    fits.sort(key=lambda row: (bool(row.without_step), row.crossing or 0, row.bytes))
    if fits:
        yield from table(_cells(fits))
    for text in (*_notes(fits), *_too_large(planned, fits, memory), *_failed(rows)):
        yield from wrapped(text, width, line(), 2)


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table, without the columns that say nothing of these meshes."""
    columns = [["mesh", *(str(row.mesh) for row in rows)], ["fullest rank", *map(_fullest, rows)]]
    if any(row.offloaded for row in rows):
        columns.append(["in the CPU's memory", *(bytes_text(row.offloaded) for row in rows)])
    if any(row.crossing is not None for row in rows):
        columns.append(["crosses nodes", *map(_crossing, rows)])
    return [list(cells) for cells in zip(*columns, strict=True)]


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what is to be known of the rows, a text for each reason, with its meshes where it is not about all."""
    said = [(note, row) for row in rows for note in row.notes]
    said += [(f"without activations and collectives: {row.without_step}", row) for row in rows if row.without_step]
    for note in dict.fromkeys(note for note, _ in said):
        own = [str(row.mesh) for other, row in said if other == note]
        yield printable(note) if len(own) == len(rows) else f"{', '.join(own)}: {printable(note)}"


def _too_large(planned: Sequence[Row], fits: Sequence[Row], memory: int) -> Iterator[str]:
    """Yield how many meshes do not fit, and what the smallest of them needs."""
    large = [row for row in planned if row not in fits]
    if large:
        least = min(large, key=lambda row: row.bytes)
        meshes = "1 mesh needs" if len(large) == 1 else f"{len(large)} meshes need"
        yield f"{meshes} more than {bytes_text(memory)}, at least {bytes_text(least.bytes)} on {least.mesh}"


def _failed(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which meshes were not planned, those with the same reason together."""
    for why in dict.fromkeys(row.failed for row in rows if row.failed):
        own = ", ".join(str(row.mesh) for row in rows if row.failed == why)
        yield f"not planned: {own}: {printable(why)}"


def _fullest(row: Row) -> str:
    return f"at least {bytes_text(row.bytes)}" if row.without_step else bytes_text(row.bytes)


def _crossing(row: Row) -> str:
    return "not known" if row.without_step or row.crossing is None else bytes_text(row.crossing)
