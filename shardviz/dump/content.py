"""Check what a rank wrote of a tensor: ranges, runs and values must fit the claimed shapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardviz.dump.digests import hash_of, hash_of_bytes
from shardviz.dump.records.base import MAX_NUMBER
from shardviz.dump.records.tensors import Body
from shardviz.errors import DumpError
from shardviz.layout.dtypes import is_dtype
from shardviz.layout.region import length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.tensors import GatherRecord, LayoutRecord
    from shardviz.layout.region import Ranges

NOT_FINITE = ("nan", "inf", "-inf")

STORED_AS = {
    **{"float64": "<f8", "float32": "<f4", "float16": "<f2", "complex128": "<f8", "complex64": "<f4", "bool": "?"},
    **{f"{sign}int{bits}": f"<{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""The bytes of an element, or of both parts of a complex one, as numpy writes them. It has no bfloat16."""

SHOWN = 20
"""Characters of a wrong value that a message shows."""

Item = TypeVar("Item")
Shape = tuple[int, ...]


def check_body(body: Body, layouts: Sequence[LayoutRecord]) -> None:
    """Make sure that the parts of a body fit each other and its layout.

    Raises:
        DumpError: They do not; the message names the field and what was expected.
    """
    numel_of("shape", body.shape)
    local_numel = numel_of("local_shape", body.local_shape)
    if not is_dtype(body.dtype):
        raise DumpError(f"dtype is {body.dtype[:SHOWN]!r}, expected a dtype such as float32")
    if body.layout is not None:
        layout = item_at("layout", body.layout, layouts)
        claimed = layout.flat.shape if layout.flat else layout.shape
        if body.shape != claimed:
            raise DumpError(f"shape is {list(body.shape)}, expected the {list(claimed)} of layouts[{body.layout}]")
    if body.held is not None:
        flat = body.layout is not None and layouts[body.layout].flat is not None
        if len(body.held) != (1 if flat else len(body.shape)):
            raise DumpError(f"held has {len(body.held)} dims, expected those of shape {list(body.shape)}")
        covered = tuple(map(length, body.held))
        if covered != body.local_shape:
            raise DumpError(f"held covers {list(covered)}, expected the local_shape {list(body.local_shape)}")
    if body.runs is not None and check_runs(body.runs) != local_numel:
        raise DumpError(f"runs count {check_runs(body.runs)} ids, expected those of {list(body.local_shape)}")
    check_one_form(body)
    if body.values is not None:
        _check_values(body)


def check_one_form(content: Body | GatherRecord) -> None:
    """Make sure that ids are written in one way: two could contradict each other."""
    forms = {"held": content.held is not None, "runs": content.runs is not None}
    if isinstance(content, Body):
        forms["dense"] = content.dense
    forms_there = [form for form, is_there in forms.items() if is_there]
    if len(forms_there) > 1:
        raise DumpError(f"{' and '.join(forms_there)} are both there, expected one form of the ids")


def check_spans(held: Sequence[Ranges], shapes: set[Shape], *, flat: bool = False) -> None:
    """Check that index ranges rise and lie within tensors of `shapes`, flattened if `flat`."""
    if any(start >= stop for ranges in held for start, stop in ranges):
        raise DumpError("held has a range that does not rise, expected [start, stop] with start below stop")
    ends = [max((stop for _, stop in ranges), default=0) for ranges in held]
    for shape in shapes:
        bounds = (math.prod(shape),) if flat else shape
        if len(held) != len(bounds) or any(end > size for end, size in zip(ends, bounds, strict=True)):
            raise DumpError(f"held ends at {ends}, expected indices of the stamped shape {list(shape)}")


def check_runs(runs: Sequence[tuple[int, int, int]] | None) -> int:
    """Return how many ids runs hold, which must all be ids."""
    for first, step, count in runs or ():
        last = first + step * (count - 1)
        if not -1 <= last <= MAX_NUMBER:
            raise DumpError(f"runs has {[first, step, count]}, expected ids from -1 to {MAX_NUMBER:,}")
    return sum(count for _, _, count in runs or ())


def _check_values(body: Body) -> None:
    """Make sure that nested lists have the local shape, and are made of numbers."""
    shape = _listed_shape(body)
    level: list[Any] = [body.values]
    for size in shape:
        if any(type(item) is not list or len(item) != size for item in level):
            raise DumpError(f"values are not nested lists of shape {list(shape)}")
        level = [inner for item in level for inner in item]
    if set(map(type, level)) <= {float, bool}:
        return
    for value in level:
        number = type(value) in (float, bool) or (type(value) is int and -(1 << 63) <= value < 1 << 64)
        if not number and not (type(value) is str and value in NOT_FINITE):
            raise DumpError(f"values hold {str(value)[:SHOWN]!r}, expected numbers or one of {', '.join(NOT_FINITE)}")


def leaves(values: Any) -> list[Any]:
    """Return the numbers of nested lists, row-major."""
    return [leaf for item in values for leaf in leaves(item)] if isinstance(values, list) else [values]


def digests_of(body: Body) -> tuple[str, ...]:
    """Return the digests of a body's values, in the current form and that of older versions.

    Empty if JSON doesn't determine the digest: there are no values, they include NaN (which was written in several
    ways), or numpy lacks the dtype.
    """
    if body.values is None:
        return ()
    numbers = _flat(body)
    if str in set(map(type, numbers)):  # what JSON has no number for
        numbers = [float(value) if isinstance(value, str) else value for value in numbers]
        if any(number != number for number in numbers):
            return ()
    try:
        with np.errstate(over="ignore"):
            stored = np.frombuffer(_as_stored(numbers, body.dtype), np.uint8)
    except (KeyError, OverflowError, ValueError):
        return ()
    return hash_of(stored, body.dtype, body.local_shape), hash_of_bytes(stored, body.dtype, body.local_shape)


def bits_of_values(body: Body) -> NDArray[Any] | None:
    """Return a body's values as unsigned integers in the local shape; None if they are unknown."""
    if body.values is None or body.dtype.startswith("complex"):
        return None
    numbers = [float(value) if isinstance(value, str) else value for value in _flat(body)]
    try:
        with np.errstate(over="ignore"):
            stored = _as_stored(numbers, body.dtype)
    except (KeyError, OverflowError, ValueError):
        return None
    width = len(stored) // max(len(numbers), 1) or 1
    return np.frombuffer(stored, f"<u{width}").reshape(body.local_shape)


def _as_stored(numbers: list[Any], dtype: str) -> bytes:
    """Return numbers as they lie in memory: of bfloat16, the upper half of a float32."""
    if dtype == "bfloat16":
        return (np.array(numbers, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.array(numbers, STORED_AS[dtype]).tobytes()


def _flat(body: Body) -> list[Any]:
    level: list[Any] = [body.values]
    for _ in _listed_shape(body):
        level = [inner for item in level for inner in item]
    return level


def _listed_shape(body: Body) -> Shape:
    """Return the shape of a body's nested lists, in which a complex number is a pair."""
    return (*body.local_shape, 2) if body.dtype.startswith("complex") else body.local_shape


def numel_of(field: str, shape: Shape) -> int:
    """Return how many elements a shape has.

    Raises:
        DumpError: More than a dump may number.
    """
    numel = math.prod(shape)
    if numel > MAX_NUMBER:
        raise DumpError(f"{field} is {list(shape)}, expected at most {MAX_NUMBER:,} elements")
    return numel


def item_at(field: str, index: int, of: Sequence[Item]) -> Item:
    """Return the item at an index that a file names.

    Raises:
        DumpError: There is none.
    """
    if index >= len(of):
        raise DumpError(f"{field} is {index}, expected an index below {len(of)}")
    return of[index]
