"""Which cases of a room that a script makes are kept: the first few of each verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.judge import Verdicts

SAID = ("in", "kind", "cause_id", "tensor", "exit", "verdict", "name")
"""What two verdicts have in common if one of them is enough: not the ranks, the numbers or what is claimed."""


def chosen(verdicts: Verdicts, most: int, group: Callable[[str], str], also: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the first `most` cases of each verdict in each group of names.

    Args:
        verdicts: The verdicts by name.
        most: How many cases of one verdict are kept.
        group: Returns of a name which group it is in.
        also: What two verdicts must have in common besides.
    """
    alike: dict[str, list[str]] = {}
    for name, rows in verdicts.items():
        said = [{key: row.get(key) for key in (*SAID, *also)} for row in rows]
        alike.setdefault(f"{group(name)} {said}", []).append(name)
    return [name for names in alike.values() for name in sorted(names)[:most]]
