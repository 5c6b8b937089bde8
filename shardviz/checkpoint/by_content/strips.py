"""A few values of each slice of a tensor along a dim, and where another tensor has the same slices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.agreement import can_cast, narrower
from shardviz.errors import DumpError
from shardviz.reference.windows import line_hashes
from shardviz.relate.casts import cast, values_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.checkpoint.tensor import Tensor

WIDTH = 16
"""Values of a slice that are looked up."""

FEWEST = 8
"""Values that tell slices apart: shorter slices are looked up with those behind them."""

SAMPLES = 256
"""Values that two tensors of nearly the same values are compared by."""

UNKNOWN = -2
"""The place of a slice that is there several times, or whose values are all alike."""

MISSING = -1
LEAST_PART = 0.5
"""The part of all slices that must be where they are expected: a few of them may be wrong."""

ALIKE = 0.8
"""The correlation of two tensors of nearly the same values; that of 256 unrelated ones is below 0.4."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor, or one index of the first dims of it, with its last two dims exchanged or not.

    Attributes:
        tensor: The tensor.
        index: The index of each of its first dims.
        turned: Whether the last two dims are exchanged.
    """

    tensor: Tensor
    index: tuple[int, ...] = ()
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape = self.tensor.shape[len(self.index) :]
        return (*shape[:-2], shape[-1], shape[-2]) if self.turned else shape

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers: a view of what is mapped, where it is stored in one piece."""
        bits: NDArray[Any] = self.tensor.bits[self.index]
        return bits.swapaxes(-1, -2) if self.turned else bits


@dataclass
class Strips:
    """Slices of tensors, by a few of their values; what cannot be read has none."""

    _strips: dict[tuple[int, tuple[int, ...], bool, int, str], NDArray[Any] | None] = field(default_factory=dict)

    def places(self, part: View, whole: View, dim: int) -> NDArray[np.int64] | None:
        """Return where a tensor has the slices of another one along a dim; None if that cannot be said.

        Args:
            part: The tensor whose slices are looked up.
            whole: The one that may have them; equal in all other dims.
            dim: The dim.
        """
        types = part.tensor.dtype, whole.tensor.dtype
        if not can_cast(*types):
            return None
        narrow = narrower(*types)
        mine, theirs = self._of(part, dim, narrow), self._of(whole, dim, narrow)
        if mine is None or theirs is None or mine.shape[1] != theirs.shape[1]:
            return None
        keys, first, counts = np.unique(line_hashes(theirs), return_index=True, return_counts=True)
        own = line_hashes(mine)
        at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        places = np.where(keys[at] == own, np.where(counts[at] > 1, UNKNOWN, first[at]), MISSING)
        return np.where((mine == mine[:, :1]).all(1), UNKNOWN, places)

    def _of(self, view: View, dim: int, dtype: str) -> NDArray[Any] | None:
        key = id(view.tensor), view.index, view.turned, dim, dtype
        if key not in self._strips:
            try:
                strip = cast(_strip(view.bits, dim), view.tensor.dtype, dtype)
            except (DumpError, OSError):
                strip = None
            self._strips[key] = strip
        return self._strips[key]


def _strip(bits: NDArray[Any], dim: int) -> NDArray[Any]:
    """Return a few values of each slice along a dim, a row for each; of short slices, with those that follow."""
    moved = np.moveaxis(bits, dim, 0)
    others = moved.shape[1:]
    spread = np.unique(np.linspace(0, math.prod(others) - 1, WIDTH).astype(np.int64))
    inside: tuple[Any, ...] = (slice(None), *np.unravel_index(spread, others)) if others else (slice(None), None)
    strip = moved[inside]
    behind = min(-(-FEWEST // strip.shape[1]), len(strip))
    if behind > 1:
        strip = np.lib.stride_tricks.sliding_window_view(strip, behind, 0).reshape(len(strip) - behind + 1, -1)
    return np.ascontiguousarray(strip)


def share(places: NDArray[np.int64], expected: NDArray[Any]) -> float:
    """Return the part of all slices that can be told apart that are where they are expected."""
    known = places != UNKNOWN
    is_there = places[known] == expected[: len(places)][known]
    return float(is_there.mean()) if len(is_there) else 0.0


def fits(places: NDArray[np.int64], expected: NDArray[Any]) -> bool:
    """Whether most slices are where they are expected."""
    return share(places, expected) > LEAST_PART


def constant(tensor: Tensor) -> float | None:
    """Return the number that all values of a tensor are; None if they differ, or cannot be read."""
    try:
        bits = tensor.bits
    except (DumpError, OSError):
        return None
    if not bits.size:
        return None
    start = bits[(slice(0, 8),) * bits.ndim]
    first = bits.flat[0]
    if not (start == first).all() or not (bits == first).all():
        return None
    try:
        return float(values_of(np.array([first]), tensor.dtype)[0])
    except TypeError:  # numpy has no such type: the scales of MX formats, floats of eight bits without infinity
        return None


def are_near(tensor: View, other: View) -> bool:
    """Whether two tensors of one shape have nearly the same values, such as those of two steps, or one scaled."""
    try:
        sides = [_spread(view) for view in (tensor, other)]
    except (DumpError, OSError):
        return False
    if len(sides[0]) < 2 * FEWEST or not np.isfinite(sides).all():
        return False
    centered = [values - values.mean() for values in sides]
    norms = [float(np.linalg.norm(values)) for values in centered]
    return bool(min(norms) > 0 and abs(float(centered[0] @ centered[1])) >= ALIKE * norms[0] * norms[1])


def _spread(view: View) -> NDArray[np.float64]:
    bits = view.bits
    places = np.unique(np.linspace(0, bits.size - 1, SAMPLES).astype(np.int64))
    return values_of(bits[np.unravel_index(places, bits.shape)], view.tensor.dtype)
