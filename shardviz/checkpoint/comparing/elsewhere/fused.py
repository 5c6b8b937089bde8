"""Tensors that one checkpoint has as several and the other as one: q, k and v one after the other, experts stacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.errors import DumpError
from shardviz.reference.windows import line_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Saved

MAX_CANDIDATES = 8
"""Parts with the same first line that are tried."""

_Key = tuple[str, int, int]


def find_fused(parts: Iterable[Saved], wholes: Iterable[Saved]) -> dict[str, list[str]]:
    """Return the tensors that are others one after the other, along their first dims, with those others in order.

    Args:
        parts: Tensors that only one checkpoint has.
        wholes: Those that only the other has.
    """
    known: dict[_Key, list[Saved]] = {}
    for part in parts:
        if (key := next(_keys(part, 1), None)) is not None:
            known.setdefault(key, []).append(part)
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for whole in wholes if known else ():
        names = _tiled(whole, known, taken)
        if len(names) > 1:
            found[whole.name] = names
            taken.update(names)
    return found


def _lines(tensor: Saved) -> NDArray[Any]:
    """Return a tensor's bits as lines along its last dim; single values where that is its only dim."""
    return tensor.bits.reshape(-1, tensor.shape[-1] if len(tensor.shape) > 1 else 1)


def _keys(tensor: Saved, most: int | None = None) -> Iterator[_Key]:
    """Yield what stands for each of a tensor's lines; nothing where it cannot be read."""
    if not tensor.shape or not tensor.size:
        return
    try:
        lines = _lines(tensor)[:most]
    except DumpError:
        return
    yield from ((tensor.dtype, lines.shape[1], hashed) for hashed in line_hashes(lines).tolist())


def _tiled(whole: Saved, known: dict[_Key, list[Saved]], taken: set[str]) -> list[str]:
    """Return the parts that a tensor is made of, in order; none where any of its lines is of none."""
    keys = list(_keys(whole))
    names: list[str] = []
    at = 0
    while at < len(keys):
        candidates = [part for part in known.get(keys[at], ()) if part.name not in taken and part.name not in names]
        part = next((part for part in candidates[:MAX_CANDIDATES] if _is_at(whole, part, at)), None)
        if part is None:
            return []
        names.append(part.name)
        at += len(_lines(part))
    return names


def _is_at(whole: Saved, part: Saved, at: int) -> bool:
    """Whether a tensor has all lines of a part, from a line on."""
    lines = _lines(part)
    return np.array_equal(_lines(whole)[at : at + len(lines)], lines)
