"""The functions of a map, by name: their syntax, shapes and elements.

None of them changes a value. A function that uses all of its operands gives views of what it makes, so that a tensor is
compared with what it is made of piece by piece, without making it; the others give views of their operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = "NDArray[Any]"
Shaped: TypeAlias = "Callable[[Sequence[Shape], Sequence[int]], Shape]"
Views: TypeAlias = "Callable[[Array, Sequence[Shape], Sequence[int]], list[Array]]"
Taken: TypeAlias = "Callable[[Array, Sequence[int]], Array]"
MANY = 1 << 30
"""As many tensors or numbers as are written."""

INVERSE = {"rotary": "unrotary", "unrotary": "rotary"}
"""The function that undoes another."""


class MapArgumentError(ValueError):
    """A function does not accept shapes or numbers; the text says which."""


def _dim(numbers: Sequence[int], at: int, shape: Shape, default: int = 0, extra: int = 0) -> int:
    """Return a dim that is written at a place among the numbers, counted from 0."""
    dim = numbers[at] if len(numbers) > at else default
    ndim = len(shape) + extra
    if not -ndim <= dim < ndim:
        raise MapArgumentError(f"there is no dim {dim} in {list(shape)}")
    return dim % ndim


def _slices(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None),) * dim, slice(start, stop))


def _index(dim: int, index: int) -> tuple[slice | int, ...]:
    return (*(slice(None),) * dim, index)


def _joined_shape(shapes: Sequence[Shape], dim: int) -> Shape:
    first = shapes[0]
    for later_shape in shapes[1:]:
        if (
            len(later_shape) != len(first)
            or later_shape[:dim] + later_shape[dim + 1 :] != first[:dim] + first[dim + 1 :]
        ):
            raise MapArgumentError(f"{list(first)} and {list(later_shape)} can't be concatenated along dim {dim}")
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


def _cat_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    return _joined_shape(shapes, _dim(numbers, 0, shapes[0]))


def _cat_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    dim = _dim(numbers, 0, shapes[0])
    return _consecutive(whole, dim, [shape[dim] for shape in shapes])


def _consecutive(whole: Array, dim: int, sizes: Sequence[int]) -> list[Array]:
    """Return views of these sizes along a dim, one behind the other."""
    ends = accumulate(sizes)
    return [whole[_slices(dim, end - size, end)] for end, size in zip(ends, sizes, strict=True)]


def _stack_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    dim = _dim(numbers, 0, shapes[0], extra=1)
    if odd := next((shape for shape in shapes if shape != shapes[0]), None):
        raise MapArgumentError(f"{list(shapes[0])} and {list(odd)} are not of one shape")
    return (*shapes[0][:dim], len(shapes), *shapes[0][dim:])


def _stack_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    dim = _dim(numbers, 0, shapes[0], extra=1)
    return [whole[_index(dim, at)] for at in range(len(shapes))]


def _blocks(shapes: Sequence[Shape], numbers: Sequence[int], dim: int) -> int:
    blocks = numbers[1] if len(numbers) > 1 else shapes[0][dim]
    if odd := next((shape for shape in shapes if blocks < 1 or shape[dim] % blocks), None):
        raise MapArgumentError(f"dim {dim} of {list(odd)} is not {blocks} equal blocks")
    return blocks


def _interleave_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    dim = _dim(numbers, 0, shapes[0])
    shape = _joined_shape(shapes, dim)
    _blocks(shapes, numbers, dim)
    return shape


def _interleave_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    dim = _dim(numbers, 0, shapes[0])
    blocks = _blocks(shapes, numbers, dim)
    shape = whole.shape
    turns = whole.reshape(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    return _consecutive(turns, dim + 1, [one[dim] // blocks for one in shapes])


def _split_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    (shape,), (count, which, *_) = shapes, numbers
    dim = _dim(numbers, 2, shape)
    if count < 1 or shape[dim] % count or not 0 <= which < count:
        raise MapArgumentError(f"dim {dim} of {list(shape)} has no part {which} of {count} equal ones")
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])


def _split_taken(operand: Array, numbers: Sequence[int]) -> Array:
    count, which = numbers[:2]
    dim = _dim(numbers, 2, operand.shape)
    size = operand.shape[dim] // count
    return operand[_slices(dim, which * size, (which + 1) * size)]


def _take_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    (shape,) = shapes
    dim = _dim(numbers, 1, shape)
    if not 0 <= numbers[0] < shape[dim]:
        raise MapArgumentError(f"dim {dim} of {list(shape)} has no index {numbers[0]}")
    return (*shape[:dim], *shape[dim + 1 :])


def _take_taken(operand: Array, numbers: Sequence[int]) -> Array:
    found: Array = operand[_index(_dim(numbers, 1, operand.shape), numbers[0])]
    return found


def _slice_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    (shape,), (start, stop, *_) = shapes, numbers
    dim = _dim(numbers, 2, shape)
    if not 0 <= start <= stop <= shape[dim]:
        raise MapArgumentError(f"dim {dim} of {list(shape)} has no {start} to {stop}")
    return (*shape[:dim], stop - start, *shape[dim + 1 :])


def _slice_taken(operand: Array, numbers: Sequence[int]) -> Array:
    return operand[_slices(_dim(numbers, 2, operand.shape), numbers[0], numbers[1])]


def _pad_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    (shape,), (size, *_) = shapes, numbers
    dim = _dim(numbers, 1, shape)
    if size < shape[dim]:
        raise MapArgumentError(f"dim {dim} of {list(shape)} is longer than {size}")
    return (*shape[:dim], size, *shape[dim + 1 :])


def _pad_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    """Return where the tensor is: all but the padding."""
    dim = _dim(numbers, 1, shapes[0])
    return [whole[_slices(dim, 0, shapes[0][dim])]]


def _pair(shape: Shape, numbers: Sequence[int]) -> tuple[int, int]:
    if len(shape) < 2:
        raise MapArgumentError(f"{list(shape)} has no two dims to exchange")
    return _dim(numbers, 0, shape, -2), _dim(numbers, 1, shape, -1)


def _transpose_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    first_dim, second_dim = _pair(shapes[0], numbers)
    shape = list(shapes[0])
    shape[first_dim], shape[second_dim] = shape[second_dim], shape[first_dim]
    return tuple(shape)


def _transpose_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    """Return the whole with the two dims exchanged back."""
    return [whole.swapaxes(*_pair(shapes[0], numbers))]


def _permute_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    (shape,) = shapes
    dims = [_dim([number], 0, shape) for number in numbers]
    if sorted(dims) != list(range(len(shape))):
        raise MapArgumentError(f"{list(numbers)} are not the dims of {list(shape)}, each once")
    return tuple(shape[dim] for dim in dims)


def _permute_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    """Return the whole with its dims in their first order."""
    dims = [number % len(shapes[0]) for number in numbers]
    return [whole.transpose([dims.index(dim) for dim in range(len(dims))])]


def _reshape_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    """Return another shape of the same elements; -1 stands for what is left."""
    (shape,) = shapes
    size = math.prod(shape)
    product = math.prod(number for number in numbers if number != -1)
    open_size, remainder = divmod(size, product) if product else (0, size)
    new_shape = tuple(open_size if number == -1 else number for number in numbers)
    if min(new_shape, default=0) < 0 or list(numbers).count(-1) > 1 or remainder or math.prod(new_shape) != size:
        raise MapArgumentError(f"{list(shape)} cannot be seen as {list(numbers)}")
    return new_shape


def _reshape_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    """Return the whole: its elements keep their order."""
    return [whole]


def _rotary_shape(shapes: Sequence[Shape], numbers: Sequence[int]) -> Shape:
    """Return the shape of rows of heads: reordering them keeps it."""
    (shape,), (head,) = shapes, numbers
    if not shape or head < 2 or head % 2 or shape[0] % head:
        raise MapArgumentError(f"dim 0 of {list(shape)} is not heads of {head} rows")
    return shape


def _rotary_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    """Return the whole with the halves of each head taken for pairs."""
    half = numbers[0] // 2
    return [whole.reshape(-1, 2, half, *whole.shape[1:]).swapaxes(1, 2)]


def _unrotary_views(whole: Array, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    """Return the whole with the pairs of each head taken for halves."""
    half = numbers[0] // 2
    return [whole.reshape(-1, half, 2, *whole.shape[1:]).swapaxes(1, 2)]


@dataclass(frozen=True)
class Function:
    """One function of the language.

    Attributes:
        usage: How it is written.
        text: What it does, in a few words.
        operands: The fewest and the most tensors that it takes.
        numbers: The fewest and the most numbers.
        shape: Returns the shape that it makes of operands of some shapes, or raises `MapArgumentError`.
        views: Returns for each operand the view of the whole that has its elements in their order; None if some
            elements of the operand are not used.
        taken: Returns the view of its operand that it is; None if it has several.
    """

    usage: str
    text: str
    operands: tuple[int, int]
    numbers: tuple[int, int]
    shape: Shaped
    views: Views | None = None
    taken: Taken | None = None

    @property
    def takes(self) -> str:
        """How many tensors and numbers it takes, in words."""
        tensors = counted(1, "tensor") if self.operands[1] == 1 else f"{self.operands[0]} or more tensors"
        few, many = self.numbers
        numbers = counted(few, "number") if few == many else f"{few} to {many} numbers" if many < MANY else "numbers"
        return f"{tensors} and {numbers}"


FUNCTIONS = {
    "cat": Function("cat(a, b, dim)", "concatenated along a dim", (1, MANY), (0, 1), _cat_shape, _cat_views),
    "stack": Function("stack(a, b, dim)", "stacked along a new dim", (1, MANY), (0, 1), _stack_shape, _stack_views),
    "interleave": Function(
        "interleave(q, k, v, dim, n)",
        "the first of n blocks of each, then the second, ...; without n, single indices",
        (2, MANY),
        (0, 2),
        _interleave_shape,
        _interleave_views,
    ),
    "split": Function(
        "split(a, n, i, dim)",
        "part i of n equal parts, counted from 0",
        (1, 1),
        (2, 3),
        _split_shape,
        taken=_split_taken,
    ),
    "slice": Function(
        "slice(a, from, to, dim)",
        "indices `from` to `to` - 1 of a dim",
        (1, 1),
        (2, 3),
        _slice_shape,
        taken=_slice_taken,
    ),
    "pad": Function(
        "pad(a, n, dim)", "padded to n indices; the padding is not compared", (1, 1), (1, 2), _pad_shape, _pad_views
    ),
    "take": Function(
        "take(a, i, dim)", "index i of a dim, which is dropped", (1, 1), (1, 2), _take_shape, taken=_take_taken
    ),
    "transpose": Function(
        "transpose(a, dim, dim)",
        "two dims exchanged; by default the last two",
        (1, 1),
        (0, 2),
        _transpose_shape,
        _transpose_views,
    ),
    "permute": Function("permute(a, 0, 2, 1)", "dims in this order", (1, 1), (1, MANY), _permute_shape, _permute_views),
    "reshape": Function(
        "reshape(a, 8, -1)", "the same elements in a different shape", (1, 1), (1, MANY), _reshape_shape, _reshape_views
    ),
    "rotary": Function(
        "rotary(a, head_dim)",
        "rows of each head from pairs (Meta) to halves (Hugging Face)",
        (1, 1),
        (1, 1),
        _rotary_shape,
        _rotary_views,
    ),
    "unrotary": Function(
        "unrotary(a, head_dim)", "from halves to pairs", (1, 1), (1, 1), _rotary_shape, _unrotary_views
    ),
}
"""Every function of the language, by its name."""


def views_in(whole: Array, function: str, shapes: Sequence[Shape], numbers: Sequence[int]) -> list[Array]:
    """Return each operand's view in a function's result; the function must use all of them."""
    views = FUNCTIONS[function].views
    assert views is not None, "the caller knows the function"
    return views(whole, shapes, numbers)
