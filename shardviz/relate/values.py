"""Arrays of numbers or of their bits: parts, padding, blocks, and how far two arrays differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.tolerance import KINKS, LEAST_SLICE, MOST_NOISE, MOST_OF_SLICE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.layout.region import Region

BLOCK = 1 << 18
"""Elements that are looked at together: a file that is mapped into memory is never copied whole."""

SAMPLES = 256
"""Elements that a factor or an offset is estimated from before all are verified."""


def padded_to(whole: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Pad an array with zeros to a shape; return it unchanged if a dim of the shape is shorter."""
    if (
        shape == whole.shape
        or len(shape) != whole.ndim
        or any(length < size for length, size in zip(shape, whole.shape, strict=True))
    ):
        return whole
    return np.pad(whole, [(0, length - size) for length, size in zip(shape, whole.shape, strict=True)])


def part_of(array: NDArray[Any], region: Region) -> NDArray[Any]:
    """Return a region's elements in the region's order: a view if each dim has one range.

    Example:
        >>> from shardviz.layout.region import Region
        >>> part_of(np.arange(12).reshape(4, 3), Region((((3, 4), (0, 1)), ((1, 3),)))).tolist()
        [[10, 11], [1, 2]]
    """
    if all(len(ranges) == 1 for ranges in region.dims):
        return array[tuple(slice(*ranges[0]) for ranges in region.dims)]
    whole = array
    for dim, ranges in enumerate(region.dims):
        pieces = [whole[(slice(None),) * dim + (slice(*pair),)] for pair in ranges]
        whole = np.concatenate(pieces, dim) if pieces else np.take(whole, [], dim)
    return whole


def is_alike(array: NDArray[Any]) -> bool:
    """Whether all elements are equal: such content does not say where it belongs."""
    return array.size == 0 or bool((array == array.flat[0]).all())


def constant_of(values: NDArray[Any]) -> float | None:
    """Return the number that all elements equal, or NaN; None for a single nonzero element.

    Example:
        >>> constant_of(np.array([2.0, 2.0])), constant_of(np.array([2.0])), constant_of(np.array([0.0]))
        (2.0, None, 0.0)
    """
    if not values.size or (values.size == 1 and values.flat[0]):
        return None
    first = values.flat[0]
    is_constant = np.array_equal(values, np.broadcast_to(first, values.shape), equal_nan=True)
    return float(first) if is_constant else None


def blocks(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Cut an array along its first dim, or its elements, into views of about `BLOCK` elements."""
    if not array.ndim or array.size > BLOCK * max(len(array), 1):
        array = array.reshape(-1)  # a single row may be all of it
    rows = max(BLOCK // max(array.size // max(len(array), 1), 1), 1)
    return [array[at : at + rows] for at in range(0, len(array), rows)]


def sampled(array: NDArray[Any]) -> NDArray[Any]:
    """Return up to `SAMPLES` elements, evenly spread."""
    places = np.unique(np.linspace(0, array.size - 1, SAMPLES).astype(np.int64))
    samples: NDArray[Any] = array[np.unravel_index(places, array.shape)]
    return samples


def magnitude(values: NDArray[Any]) -> float:
    """Return the size of the largest element; 0 of no elements, NaN if one is NaN."""
    return float(np.max(np.abs(values), initial=0.0))


def finite_magnitude(values: NDArray[Any]) -> float:
    """Return the size of the largest finite element: NaN says nothing of how others are rounded; 0 of none."""
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def root_mean_square(values: NDArray[Any]) -> float:
    """Return the root of the mean of all squares; 0 of no elements."""
    return math.sqrt(float(np.mean(np.square(values)))) if values.size else 0.0


def is_near_but_for_kinks(off: NDArray[np.float64], near: float, expected: NDArray[np.float64]) -> bool:
    """Whether few elements of a gradient are farther off than allowed, and all together by no more than noise."""
    beyond = off > near
    are_few = np.count_nonzero(beyond) <= KINKS * off.size
    if not are_few or root_mean_square(off) > MOST_NOISE * root_mean_square(expected):
        return False
    for dim in range(off.ndim if off.ndim > 1 else 0):
        errors, sizes, of_slices = (slices_of(array, dim) for array in (off, expected, beyond))
        norms = np.linalg.norm(errors, axis=1), np.linalg.norm(sizes, axis=1)
        if np.any(of_slices.any(axis=1) & (norms[0] > MOST_OF_SLICE * norms[1])):
            return False  # a slice that is lost, or another one's
    return True


def slices_of(array: NDArray[Any], dim: int) -> NDArray[Any]:
    """Return the slices along a dim as rows."""
    return np.moveaxis(array, dim, 0).reshape(array.shape[dim], array.size // max(array.shape[dim], 1))


def farthest(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return two arrays' largest difference; infinite if shapes differ or NaN meets a number."""
    if actual.shape != expected.shape:
        return math.inf
    with np.errstate(invalid="ignore"):  # the difference of two infinities
        apart = np.abs(actual - expected)
        worst = float(np.max(apart, initial=0.0))
        if math.isnan(worst):
            equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
            worst = float(np.max(np.where(equal, 0.0, apart), initial=0.0))
    return math.inf if math.isnan(worst) else worst


def error_of(actual: NDArray[Any], expected: NDArray[Any], size: float = 0.0, enough: float = math.inf) -> float:
    """Return the larger relative error: of the whole, or of the worst slice along any dim.

    A norm of the whole hides one exchanged pair in 600 slices, which moves it by 2 / sqrt(n); a slice does not. A slice
    counts as at least a tenth of the typical one, for rows near zero would alarm. NaN must meet NaN.

    Args:
        size: The norm of a sum's terms. A sum that cancels is rounded as its terms are.
        enough: Slices are not looked at if the whole is farther off than this.

    Returns:
        The error; infinite if shapes differ, or if one side has NaN or infinity at places where the other does not.

    Example:
        >>> wanted = np.ones((100, 1)); actual = wanted.copy(); actual[0] = 2
        >>> error_of(actual, wanted)  # the norm alone differs by 0.1
        1.0
    """
    if actual.shape != expected.shape:
        return math.inf
    if np.array_equal(actual, expected):
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        apart, square = np.square(actual - expected), np.square(expected)
        off, total = float(apart.sum()), max(float(square.sum()), size * size)
    if not math.isfinite(off + total):
        finite = np.isfinite(expected)
        if finite.all() and np.isfinite(actual).all():  # their squares are not
            return math.inf if apart.any() else 0.0
        if (
            not np.array_equal(actual[~finite], expected[~finite], equal_nan=True)
            or not np.isfinite(actual[finite]).all()
        ):
            return math.inf
        return error_of(np.where(finite, actual, 0), np.where(finite, expected, 0), size, enough)
    if not total:  # all zeros, or so small that their squares are
        largest = magnitude(expected)
        if not largest:
            return math.inf
        with np.errstate(over="ignore"):
            return error_of(actual / largest, expected / largest, size / largest, enough)
    worst = off / total
    if math.sqrt(worst) > enough:
        return math.sqrt(worst)
    for dim in range(expected.ndim):
        other_axes, typical = tuple(axis for axis in range(expected.ndim) if axis != dim), total / expected.shape[dim]
        room = typical if size else np.maximum(square.sum(other_axes), LEAST_SLICE**2 * typical)
        worst = max(worst, float((apart.sum(other_axes) / room).max()))
    return math.sqrt(worst)
