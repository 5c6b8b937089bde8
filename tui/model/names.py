"""Names of tensors: split into the modules that they are in, and cut between words to the room of a line."""

from __future__ import annotations

import re
from functools import lru_cache

from rich.cells import cell_len, set_cell_size

from shardviz.text import printable

Part = tuple[str, int | None]
"""A module's name, and its number where it is one of several."""

LEAST_NAME = 8
"""The columns of a name, however narrow its place is."""

MOST_NAME = 48
"""The most columns of a name in a line with other texts."""

_WORDS = re.compile(r"(?=[._,/-])")
"""Where a name or a layout may be cut: before what joins two words."""

_PARTS = re.compile(r"[^.\[]*\[[^\]]*\][^.]*|[^.]+")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def fitted(name: str, room: int = MOST_NAME) -> str:
    """Return the name in at most so many columns, cut in its middle: the ends tell tensors apart."""
    if cell_len(name) <= room:
        return name
    first, *words = _WORDS.split(name)
    for head in (first, ""):
        for at in range(len(words)):
            if cell_len(text := f"{head}…{''.join(words[at:])}") <= room:
                return text
    start = room // 3
    end = set_cell_size(name[::-1], max(room - start - 1, 0))[::-1]
    return f"{set_cell_size(name, start).rstrip()}…{end.lstrip()}"


@lru_cache(maxsize=1 << 16)
def place_of(name: str, role: str = "param") -> tuple[tuple[Part, ...], Part]:
    """Split a name at its dots; return the modules around it, and its own part.

    A number stays with the module before it. An optimizer's state of a parameter, `weight.exp_avg`, is beside that
    parameter.
    """
    parts = _split(name) or [("(no name)", None)]
    if role == "optim" and len(parts) > 1:
        parts[-2:] = [(".".join(map(label, parts[-2:])), None)]
    if role != "param":
        parts[-1] = (f"{label(parts[-1])} ({role})", None)
    return tuple(parts[:-1]), parts[-1]


def _split(name: str) -> list[Part]:
    parts: list[Part] = []
    for text in _PARTS.findall(printable(f"the model{name}" if name.startswith(": ") else name)):
        if not _NUMBER.fullmatch(text):
            parts.append((text, None))
        elif parts and parts[-1][1] is None:
            parts[-1] = (parts[-1][0], int(text))
        else:
            parts.append(("", int(text)))
    return parts


def label(part: Part) -> str:
    """Return a module's name with its number."""
    prefix, number = part
    return prefix if number is None else f"{prefix}{'.' if prefix else ''}{number}"
