"""The table of meshes that fit: each row is what a plan of that mesh alone says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.picture.text.tables.table import table
from shardviz.picture.text.terminal import DIM, line
from shardviz.plan.amounts import Amounts
from shardviz.plan.report import NO_STEP
from shardviz.plan.traffic import crossing
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
        bytes: Bytes of the fullest rank.
        crossing: Bytes the busiest rank receives in groups that cross nodes; None where no node size is given.
        failed: Why it was not planned; empty where it was.
        without_step: Why activations and collectives are not in it; empty where they are.
    """

    mesh: Mesh
    bytes: int = 0
    crossing: int | None = None
    failed: str = ""
    without_step: str = ""


def row_of(ranks: PlannedRanks) -> Row:
    """Return a plan's row."""
    amounts = Amounts(ranks)
    has_step = all(part.peak is not None for part in ranks.plan.parts)
    without = "" if has_step else ranks.plan.without_step or NO_STEP
    across = crossing(ranks.plan, ranks.mesh) if ranks.plan.node else None
    return Row(ranks.mesh, int(amounts.together.max()), across, without_step=without)


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


def choice_lines(rows: Sequence[Row], memory: int) -> Iterator[Text]:
    """Yield the meshes that fit, those that cross nodes least first, and then how many do not and why.

    Those without activations come last: they may not fit.

    Args:
        rows: The meshes that were planned.
        memory: Bytes that a rank has; 0 where it is not given.
    """
    planned = [row for row in rows if not row.failed]
    fits = [row for row in planned if not memory or row.bytes <= memory]
    fits.sort(key=lambda row: (bool(row.without_step), row.crossing or 0, row.bytes))
    if fits:
        cells = [["mesh", "fullest rank", "crosses nodes"]]
        cells += [[str(row.mesh), bytes_text(row.bytes), _crossing(row)] for row in fits]
        has_nodes = any(row.crossing is not None for row in fits)
        yield from table(cells if has_nodes else [own[:2] for own in cells])
    yield from _without_step(fits)
    large = [row for row in planned if row not in fits]
    if large:
        least = min(large, key=lambda row: row.bytes)
        meshes = "1 mesh needs" if len(large) == 1 else f"{len(large)} meshes need"
        need = f"{meshes} more than {bytes_text(memory)}, at least {bytes_text(least.bytes)} on {least.mesh}"
        yield line((need, DIM))
    for row in rows:
        if row.failed:
            yield line((f"not planned: {row.mesh}: {row.failed}", DIM))


def _without_step(rows: Sequence[Row]) -> Iterator[Text]:
    """Yield why no step was planned, a line for each reason."""
    for why in dict.fromkeys(row.without_step for row in rows if row.without_step):
        own = [str(row.mesh) for row in rows if row.without_step == why]
        meshes = ", ".join(own) if len(own) < len(rows) else "all of them"
        yield line((f"without activations and collectives: {meshes}: {printable(why)}", DIM))


def _crossing(row: Row) -> str:
    return "not known" if row.without_step or row.crossing is None else bytes_text(row.crossing)
