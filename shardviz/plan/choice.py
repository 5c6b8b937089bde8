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
    from collections.abc import Iterator, Mapping, Sequence

    from rich.text import Text

    from shardviz.layout.mesh import Mesh
    from shardviz.plan.ranks import PlannedRanks
    from shardviz.plan.records import StepFails

_NUMBER = re.compile(r"[0-9]+")
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
        step_fails: Whether that is because the step fails, on real ranks too.
        notes: What a plan of this mesh alone says of how it was made.
        place: Where it stands among the meshes that were tried: rows come as they are known.
    """

    mesh: Mesh
    bytes: int = 0
    offloaded: int = 0
    crossing: int | None = None
    failed: str = ""
    without_step: str = ""
    step_fails: StepFails = "no"
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
        step_fails=ranks.plan.step_fails,
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


def fitting(rows: Sequence[Row], memory: int) -> list[Row]:
    """Return the meshes that fit, those that cross nodes least first; those without activations last: they may not.

    A mesh on which the step fails is none of them.

    Args:
        rows: The meshes that were planned.
        memory: Bytes that a rank has; 0 where it is not given.
    """
    fits = [row for row in rows if not (row.failed or _is_too_large(row, memory) or _fails(row, rows))]
    return sorted(fits, key=lambda row: (bool(row.without_step), row.crossing or 0, row.bytes, row.place))


def _is_too_large(row: Row, memory: int) -> bool:
    return bool(memory) and row.bytes > memory


def _fails(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a mesh's step fails: where only one without values has, it may be the plan's fault if it does on all."""
    has_step = any(not (one.failed or one.without_step) for one in rows)
    return row.step_fails == "yes" or (row.step_fails == "perhaps" and has_step)


def choice_lines(rows: Sequence[Row], memory: int, width: int) -> Iterator[Text]:
    """Yield the meshes that fit, as `fitting` sorts them, and then which do not and why.

    Args:
        rows: The meshes that were planned.
        memory: Bytes that a rank has; 0 where it is not given.
        width: Columns.
    """
    rows = sorted(rows, key=lambda row: row.place)
    fits = fitting(rows, memory)
    large = [row for row in rows if not row.failed and _is_too_large(row, memory)]
    fails = {row: row.without_step for row in rows if row not in large and _fails(row, rows)}
    failed = {row: row.failed for row in rows if row.failed}
    if fits:
        yield from table(_cells(fits))
    apart = (*_because("the step fails on", fails), *_too_large(large, memory), *_because("not planned:", failed))
    for text in (*_notes(fits), *apart):
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


def _too_large(large: Sequence[Row], memory: int) -> Iterator[str]:
    """Yield how many meshes do not fit, and what the smallest of them needs."""
    if large:
        least = min(large, key=lambda row: row.bytes)
        meshes = "1 mesh needs" if len(large) == 1 else f"{len(large)} meshes need"
        yield f"{meshes} more than {bytes_text(memory)}, at least {bytes_text(least.bytes)} on {least.mesh}"


def _because(what: str, reasons: Mapping[Row, str]) -> Iterator[str]:
    """Yield of which meshes something is true, those together whose reasons are the same, but for numbers in them."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for row, why in reasons.items():
        kinds.setdefault(_NUMBER.sub("", why), {}).setdefault(why, []).append(str(row.mesh))
    for kind in kinds.values():
        (why, own), *others = kind.items()
        more = ", ".join(mesh for _, meshes in others for mesh in meshes)
        yield f"{what} {', '.join(own)}: {printable(why)}{more and f'; with other numbers on {more}'}"


def _fullest(row: Row) -> str:
    return f"at least {bytes_text(row.bytes)}" if row.without_step else bytes_text(row.bytes)


def _crossing(row: Row) -> str:
    return "not known" if row.without_step or row.crossing is None else bytes_text(row.crossing)
