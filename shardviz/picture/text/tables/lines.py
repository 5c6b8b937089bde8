"""The lines of a module as text: what each gives every rank, and its type along each axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.text.terminal import BAD, DIM, line, wrapped
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.check.step.lines.types import Row, Table
    from shardviz.picture.text.terminal import Terminal

INDENT = 6


def lines_lines(table: Table, terminal: Terminal) -> list[Text]:
    """Return each line once, with its calls below it."""
    name = table.module or "the model"
    about = f"{counted(len(table.rows), 'call')} inside of {name}, as they ran"
    lines = [line((printable(about), "bold"))]
    place = ""
    for row in table.rows:
        if row.place != place:
            place = row.place
            first = ("  first wrong line", BAD) if row.is_wrong else ("", "")
            lines.append(line((printable(place), BAD if row.is_wrong else "bold"), f"  {printable(row.source)}", first))
        lines += _call(row, terminal)
    return lines


def _call(row: Row, terminal: Terminal) -> list[Text]:
    only = " (sharded only)" if row.is_sharded_only else ""
    gradient = "" if row.gradient == "not compared" else f"; gradient: {row.gradient}"
    head = line(("    ", DIM), printable(row.function), (printable(only), DIM), "  ", (row.types_text, "bold"))
    return [head, *wrapped(printable(f"{row.held}{gradient}"), terminal.width, line(" " * INDENT), INDENT)]
