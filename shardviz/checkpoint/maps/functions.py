"""The functions of a map, by their names: how each is written, and what it makes of shapes and elements.

None of them changes a value. A function that uses all of its operands gives views of what it makes, so that a tensor is
compared with what it is made of piece by piece, without making it; the others give views of their operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from shardviz.checkpoint.maps import views
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.checkpoint.maps.views import Array, Shape

Shaped: TypeAlias = "Callable[[Sequence[Shape], Sequence[int]], Shape]"
Views: TypeAlias = "Callable[[Array, Sequence[Shape], Sequence[int]], list[Array]]"
Taken: TypeAlias = "Callable[[Array, Sequence[int]], Array]"

MANY = 1 << 30
"""As many tensors or numbers as are written."""


@dataclass(frozen=True)
class Function:
    """One function of the language.

    Attributes:
        usage: How it is written.
        text: What it does, in a few words.
        operands: The fewest and the most tensors that it takes.
        numbers: The fewest and the most numbers.
        shape: Returns the shape that it makes of operands of some shapes, or raises `MisfitError`.
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
    "cat": Function(
        "cat(a, b, dim)", "one after the other along a dim", (1, MANY), (0, 1), views.cat_shape, views=views.cat_views
    ),
    "stack": Function(
        "stack(a, b, dim)",
        "one after the other along a new dim",
        (1, MANY),
        (0, 1),
        views.stack_shape,
        views=views.stack_views,
    ),
    "interleave": Function(
        "interleave(q, k, v, dim, n)",
        "alternating: the first of n blocks of each, then the second, ...; without n, single indices",
        (2, MANY),
        (0, 2),
        views.interleave_shape,
        views=views.interleave_views,
    ),
    "split": Function(
        "split(a, n, i, dim)",
        "part i, from 0, of n equal ones",
        (1, 1),
        (2, 3),
        views.split_shape,
        taken=views.split_taken,
    ),
    "slice": Function(
        "slice(a, from, to, dim)",
        "the indices from `from` up to, and without, `to`",
        (1, 1),
        (2, 3),
        views.slice_shape,
        taken=views.slice_taken,
    ),
    "pad": Function(
        "pad(a, n, dim)",
        "n indices, the last ones padding: these are not compared",
        (1, 1),
        (1, 2),
        views.pad_shape,
        views=views.pad_views,
    ),
    "take": Function(
        "take(a, i, dim)", "index i, without that dim", (1, 1), (1, 2), views.take_shape, taken=views.take_taken
    ),
    "transpose": Function(
        "transpose(a, dim, dim)",
        "two dims exchanged; by default the last two",
        (1, 1),
        (0, 2),
        views.transpose_shape,
        views.transpose_views,
    ),
    "permute": Function(
        "permute(a, 0, 2, 1)", "dims in this order", (1, 1), (1, MANY), views.permute_shape, views.permute_views
    ),
    "reshape": Function(
        "reshape(a, 8, -1)",
        "the same elements in another shape",
        (1, 1),
        (1, MANY),
        views.reshape_shape,
        views.reshape_views,
    ),
    "rotary": Function(
        "rotary(a, head_dim)",
        "rows of each head from pairs (Meta) to halves (Hugging Face)",
        (1, 1),
        (1, 1),
        views.rotary_shape,
        views.rotary_views,
    ),
    "unrotary": Function(
        "unrotary(a, head_dim)", "from halves to pairs", (1, 1), (1, 1), views.rotary_shape, views.unrotary_views
    ),
}
"""Every function of the language, by its name."""

INVERSE = {"rotary": "unrotary", "unrotary": "rotary"}
"""The function that undoes another."""
