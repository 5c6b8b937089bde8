"""Tensors of a dump by the name that a user gives: a whole one, the end of one, a pattern."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.text import folded_names, nearest, printable, starred

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardviz.dump.dump import Dump, Tensor

MOST_CANDIDATES = 5
"""Names with one end that are written out."""


def find_tensors(dump: Dump, pattern: str) -> list[tuple[str, Tensor]]:
    """Find tensors by exact name, by a pattern with `*`, or by a unique end of a name.

    Returns:
        Names with their tensors, each name once, as it was captured first.

    Raises:
        ShardvizError: No name fits, or the end of a name fits several.

    Example:
        find_tensors(dump, "layers.0.up.weight")
        find_tensors(dump, "up.weight")  # the one whose name ends so
        find_tensors(dump, "layers.*.bias")
    """
    by_name = dump.first_captured
    return [(name, by_name[name]) for name in find_names(by_name, pattern, "the dump")]


def find_names(names: Collection[str], pattern: str, where: str) -> list[str]:
    """Find names as `find_tensors` does.

    Args:
        names: All names.
        pattern: A whole name, a pattern with `*`, or the end of a name.
        where: What has them, for the error.

    Raises:
        ShardvizError: No name fits, or the end of a name fits several.
    """
    if pattern in names:
        return [pattern]
    if is_pattern(pattern):
        matching = [name for name in names if matches_pattern(name, pattern)]
    else:
        matching = [name for name in names if name.endswith(f".{pattern}")]
        if len(matching) > 1:
            hint = f"write more of the name, as in {printable(matching[0])}, or '*.{pattern}' for all of them"
            raise ShardvizError(ambiguity(matching, pattern), hint)
    if not matching:
        raise ShardvizError(f"{where} has no tensor {pattern!r}", hint_at_name(pattern, list(names)))
    return matching


def ambiguity(names: Sequence[str], end: str) -> str:
    """Say which names end alike, identical layers as one."""
    return f"{len(names):,} tensors end in {end!r}: {printable(folded_names(names, MOST_CANDIDATES))}"


def hint_at_name(name: str, names: Sequence[str]) -> str:
    """Return a hint at the likeliest name or pattern, such as "did you mean up.weight?"."""
    close = _pattern_meant(name, names) if is_pattern(name) else None
    if not any(char in name for char in "*?"):  # brackets may be a part of the name
        close = close or _name_meant(name, names)
    return f"did you mean {printable(close)}?" if close else f"it has {_some_names(names) or 'none that can be read'}"


def is_pattern(name: str) -> bool:
    """Whether a name stands for all that it matches, as `fnmatch` does."""
    return any(char in name for char in "*?[")


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a name equals a pattern or matches it; names may contain brackets."""
    return name == pattern or fnmatchcase(name, pattern)


def _name_meant(name: str, names: Sequence[str]) -> str | None:
    of_module = [known for known in names if f".{name}." in f".{known}"]
    by_end = {known.rpartition(".")[2]: known for known in reversed(names)}
    return next(iter(of_module), None) or nearest(name, names) or by_end.get(nearest(name, by_end) or "")


def _pattern_meant(pattern: str, names: Sequence[str]) -> str | None:
    """Return the nearest pattern that matches a name, or None."""
    before, dot, _ = pattern.rpartition(".")
    by_star = (f"{before}{dot}{name.rpartition('.')[2]}" for name in names)
    patterns = [*dict.fromkeys((*by_star, *map(starred, names)))]
    fitting = [one for one in patterns if any(matches_pattern(name, one) for name in names)]
    return nearest(pattern, fitting)


def _some_names(names: Sequence[str]) -> str:
    nonempty = [name for name in names if name]
    shown = ", ".join(map(printable, nonempty[:3]))
    return shown if len(nonempty) <= 3 else f"{shown} and {len(nonempty) - 3:,} more"
