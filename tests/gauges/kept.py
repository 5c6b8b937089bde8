"""The file that keeps the gauges, `today.txt`: a line each, `name: value`, and what of them may not get worse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.gauges.flow import against_the_flow, circles, product
from tests.gauges.size import Size, by_room, called_once, literal_tolerances, long_functions, num_private
from tests.gauges.tree import sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TODAY = Path(__file__).parent / "today.txt"

DENSITY = "statements a line"
LONG = "functions over 60 lines"
AGAINST = "imports against the flow"
CIRCLES = "circles of imports"
UPDATE = "`make gauges` writes the file anew. Look at its difference, and say in the commit why it got worse"


def ratchet() -> dict[str, str]:
    """Return what may not rise, by name."""
    files = product()
    return {
        DENSITY: f"{Size.of(files).density:.2f}",
        LONG: str(len(long_functions(files))),
        AGAINST: str(len(against_the_flow(files))),
        CIRCLES: str(len(circles(files))),
    }


def static_gauges() -> dict[str, str]:
    """Return what the source alone shows, by name, in the order in which it is printed."""
    files = product()
    return {
        **{f"{room}: lines, statements, modules": _sizes(size) for room, size in by_room(sources()).items()},
        "shardviz, tui and probes: lines, statements, modules": _sizes(Size.of(files)),
        "private functions called once": f"{len(called_once(files))} of {num_private(files)}",
        "comparisons with a literal tolerance": str(len(literal_tolerances(files))),
        **ratchet(),
    }


def _sizes(size: Size) -> str:
    return f"{size.lines} {size.statements} {size.modules}"


def details() -> list[str]:
    """Return what the counts count, a line each."""
    files = product()
    return [
        *(f"{LONG}: {name}: {lines}" for name, lines in long_functions(files)),
        *(f"{AGAINST}: {module} imports {room}" for module, room in against_the_flow(files)),
        *(f"{CIRCLES}: {', '.join(group)}" for group in circles(files)),
        *(f"comparisons with a literal tolerance: {text}" for text in literal_tolerances(files)),
    ]


def read(file: Path = TODAY) -> dict[str, str]:
    """Return the gauges that a file keeps, by name."""
    lines = file.read_text(encoding="utf-8").splitlines()
    pairs = (line.rpartition(": ") for line in lines if ": " in line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def write(gauges: Mapping[str, str], more: Iterable[str], file: Path = TODAY) -> None:
    """Keep gauges, and lines that are for readers alone."""
    lines = [f"{name}: {value}" for name, value in gauges.items()]
    file.write_text("\n".join([*lines, *(f"# {line}" for line in more), ""]), encoding="utf-8")


def worse(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    """Say in a line each what has risen and may not.

    A density counts in hundredths, so that a few lines more or less do not move it.
    """
    return [
        f"{name}: {now[name]}, and {TODAY.name} says {then[name]}. {UPDATE}"
        for name in (DENSITY, LONG, AGAINST, CIRCLES)
        if float(now[name]) > float(then[name])
    ]
