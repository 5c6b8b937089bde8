"""Causes of results that one operation makes of the unsharded model's: an added number, zeros, a cast, a transpose."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class AddedNumber(Cause):
    """The same number is added to every element of a result.

    Shapes stay as they are, and a normalization or a softmax behind it can take the number out again.

    Attributes:
        number: The number.
        ranks: The ranks that add it.
        of_all: Whether these are all ranks.
    """

    number: float
    ranks: tuple[int, ...]
    of_all: bool
    kinds = ("wrong-value",)
    why = (
        "{of_all:?The sharded code|The code on {ranks:ranks}} adds {number:.5g} to every element, and the unsharded "
        "model does not"
    )
    how = "look for an offset, an epsilon or a shift of positions of {number:.5g} that only the sharded code has"


class OnlyZerosThere(Cause):
    """Ranks return zeros where the unsharded model has other values.

    A weight that was created and never loaded, a mask that covers all of a rank's part, or an index that lies outside
    it gives zeros of the right shape.

    Attributes:
        ranks: The ranks.
        of_all: Whether these are all ranks.
    """

    ranks: tuple[int, ...]
    of_all: bool
    kinds = ("wrong-value",)
    why = (
        "Something that is multiplied in is 0 on {of_all:?all ranks|{ranks:ranks}}: most likely a weight or buffer "
        "that was created there and never filled"
    )
    how = (
        "print the weights and buffers that it reads there; if they are filled, look at masks and indices: they must "
        "be computed from the rank's own part"
    )


class RoundedResult(Cause):
    """A result is the unsharded model's rounded to a narrower dtype.

    Autocast, a mixed-precision policy or a cast around a collective rounds it. The dtype of the result may be wide
    again, so that nothing shows.

    Attributes:
        dtype: The dtype.
    """

    dtype: str
    kinds = ("wrong-value",)
    why = (
        "The sharded step rounds it to {dtype}, and the unsharded one does not, as autocast or a MixedPrecisionPolicy "
        "would"
    )
    how = "use the same dtypes in both, or leave out the cast to {dtype}, which may stand around a collective"


class TransposedResult(Cause):
    """A result has its dims exchanged.

    Code that splits or gathers along another dim than the first transposes before and after. If one of the two is
    missing and the dims are of equal size, the shape is right.

    Attributes:
        dims: For each dim, the dim of the unsharded model's result that it is.
    """

    dims: tuple[int, ...]
    kinds = ("misordered",)
    why = "Its dims stand in the order {dims}: a transpose before or after a collective is not undone"
    how = "transpose back by the inverse permutation, or leave both out and give the collective the dim"
