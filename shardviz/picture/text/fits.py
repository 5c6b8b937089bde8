"""Many planned meshes as text: a table of those that fit, and why the others do not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.picture.text.tables.table import table
from shardviz.picture.text.terminal import line, wrapped
from shardviz.plan.alternatives import fitting, is_failing, is_too_large
from shardviz.text import bytes_text, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.text import Text

    from shardviz.plan.alternatives import Row

_NUMBER = re.compile(r"[0-9]+")


def choice_lines(rows: Sequence[Row], memory: int, width: int) -> Iterator[Text]:
    """Yield the meshes that fit, as `fitting` sorts them, and then which do not and why.

    Args:
        rows: The meshes that were planned.
        memory: Bytes that a rank has; 0 if it is not given.
        width: Columns.
    """
    rows = sorted(rows, key=lambda row: row.place)
    fits = fitting(rows, memory)
    large = [row for row in rows if not row.failed and is_too_large(row, memory)]
    fails = {row: row.without_step for row in rows if row not in large and is_failing(row, rows)}
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
    """Yield what is to be known of the rows, a text for each reason, with its meshes if it is not about all."""
    notes = [(note, row) for row in rows for note in row.notes]
    notes += [(f"without activations and collectives: {row.without_step}", row) for row in rows if row.without_step]
    for note in dict.fromkeys(note for note, _ in notes):
        meshes = [str(row.mesh) for other, row in notes if other == note]
        yield printable(note) if len(meshes) == len(rows) else f"{', '.join(meshes)}: {printable(note)}"


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
