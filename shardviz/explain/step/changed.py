"""Causes of results changed by one operation: an added number, zeros, a cast, a transpose."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class AddedNumber(Cause):
    """The same number is added to every element of a result.

    Shapes stay the same, and a later normalization or softmax can cancel the number.
    """

    number: float
    ranks: tuple[int, ...]
    of_all: bool
    why = (
        "{of_all:?The sharded code|The code on {ranks:ranks}} adds {number:.5g} to every element, and the unsharded "
        "model doesn't"
    )
    how = "look for an offset, an epsilon or a shift of positions of {number:.5g} that only the sharded code has"


class OnlyZerosThere(Cause):
    """Ranks return zeros, and the unsharded model returns other values.

    A weight that was created and never loaded, a mask over all of a rank's part, or an index outside the part gives
    zeros of the right shape.
    """

    ranks: tuple[int, ...]
    of_all: bool
    why = (
        "{of_all:?All ranks multiply|The code on {ranks:ranks} multiplies} by a weight or buffer that nothing filled",
        "A mask or an index covers none of the rank's part",
    )
    how = (
        "print the weights and buffers that the code reads there, and fill those that are zero",
        "compute masks and indices from the rank's own part",
    )


class RoundedResult(Cause):
    """A result is the unsharded model's rounded to a narrower dtype.

    Autocast, a mixed-precision policy or a cast around a collective rounds the result. A later cast to the wide dtype
    hides it.
    """

    dtype: str
    why = (
        "The sharded step rounds the result to {dtype}, and the unsharded model doesn't: autocast, a "
        "MixedPrecisionPolicy, or a cast around a collective"
    )
    how = "use the same dtypes in both, or remove the cast to {dtype}"


class ScaleOfPart(Cause):
    """Ranks cast a tensor to float8 with the scale of their own part, not of the whole.

    A scale brings the largest number of a tensor to the largest that float8 has. If each rank takes the largest of its
    own shard, each shard is rounded with a scale of its own. The result is near enough for any tolerance of float8.

    Attributes:
        largest: What the scale makes of the largest number.
        axes: The axes that split what is cast.
    """

    modules: tuple[str, ...]
    dtype: str
    largest: float
    axes: str
    why = (
        "Each rank scales its own part of what {modules:3} {modules:1?casts|cast} to {dtype} by the largest number of "
        "that part. The parts are rounded with different scales, and the unsharded model has one scale for the whole"
    )
    how = "all_reduce the largest magnitude (amax) over {axes} with ReduceOp.MAX before it becomes a scale"


class UnlikeScale(Cause):
    """Ranks cast a tensor to float8 with a different scale than the unsharded model's.

    The largest magnitude of the whole is the maximum of the ranks' largest. Their sum, the default of
    `all_reduce`, is larger, so the scale leaves most numbers of float8 unused.

    Attributes:
        held: What the scale makes of the largest number.
        wanted: What that of the unsharded model makes of it.
        op: With which op the ranks' largest magnitudes make this scale; empty if none of them does.
        axes: The axes that split what is cast.
    """

    modules: tuple[str, ...]
    dtype: str
    held: float
    wanted: float
    op: str
    axes: str
    why = (
        "{op:?The ranks' largest magnitudes (amax) are reduced over {axes} with {op}, not with MAX. }The scale brings "
        "the largest number that {modules:3} {modules:1?casts|cast} to {dtype} to {held:.5g}, and that of the "
        "unsharded model to {wanted:.5g}"
    )
    how = "make the scale from the whole tensor's largest magnitude (amax): all_reduce that of each part with MAX"


class TransposedResult(Cause, kind="misordered"):
    """A result has its dims exchanged.

    Code that splits or gathers along a dim other than the first transposes before and after. If one transpose is
    missing and the dims have equal sizes, the shape is right.

    Attributes:
        dims: For each dim, the dim of the unsharded model's result that it is.
    """

    dims: tuple[int, ...]
    why = "The dims are in the order {dims}: the code doesn't undo a transpose before or after a collective"
    how = "transpose back by the inverse permutation, or leave out both transposes and pass the dim to the collective"


class NotFiniteAfterStep(Cause):
    """A weight or an optimizer's state has nan or infinite elements after the step.

    The gradients are finite, and so is what the unsharded model has. A part of a weight may be all zeros or empty where
    the whole isn't: its norm or its mean is then zero, or of nothing.
    """

    why = (
        "The optimizer divides by a norm, a mean or a second moment that is zero in this rank's part",
        "The optimizer's state was loaded or cast with such elements",
        "Code that runs after the step wrote them",
    )
    how = (
        "reduce the norm or the mean over the ranks that have parts, and add eps before dividing",
        "look at the optimizer's state on these ranks before the step",
        "look for writes to the weight between the steps",
    )
