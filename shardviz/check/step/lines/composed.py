"""Intermediate results of torch functions, for ranks whose own lines compute them one by one.

The unsharded model calls `cross_entropy` once. Ranks with parts of the classes take the maximum, the sum of the
exponentials and the label's logit in lines of their own, each of which needs a reduction. The unsharded model records
none of these. All of them follow from what the function is given.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.relate.factors import over
from shardviz.relate.tolerance import FEW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.trace import LineRecord, LinesRecord
    from shardviz.layout.mesh import Mesh

    Values = NDArray[np.float64]

ROUGH = 0.02
"""Rounding takes what elements add up to no farther than this, relative to their sizes."""


def softmax_steps(logits: Values, labels: Values | None = None) -> Iterator[Values]:
    """Yield the steps of a softmax and a log_softmax over the last dim; with labels, also those of a cross entropy.

    A label that isn't a class, such as one to ignore, has the logit 0: a mask leaves that.
    """
    top = logits.max(axis=-1, keepdims=True)
    shifted = logits - top
    powers = np.exp(shifted)
    total = powers.sum(axis=-1, keepdims=True)
    of_rows = [top, total, np.log(total), top + np.log(total)]
    if labels is not None and labels.shape == logits.shape[:-1]:
        is_class = (labels >= 0) & (labels < logits.shape[-1])
        at = np.where(is_class, labels, 0).astype(np.int64)[..., None]
        chosen = [np.where(is_class[..., None], np.take_along_axis(side, at, -1), 0) for side in (logits, shifted)]
        of_rows += [*chosen, np.log(total) - chosen[1]]
    yield from (shifted, powers, shifted - np.log(total), powers / total)
    yield from (form for row in of_rows for form in (row[..., 0], row))


def chosen_steps(logits: Values, index: Values) -> Iterator[Values]:
    """Yield what an index chooses along the last dim, and how far that is from the largest element there."""
    is_index = index.size and index.ndim == logits.ndim and index.shape[:-1] == logits.shape[:-1]
    if is_index and index.min() >= 0 and index.max() < logits.shape[-1]:
        chosen = np.take_along_axis(logits, index.astype(np.int64), -1)
        for form in (chosen, chosen - logits.max(axis=-1, keepdims=True)):
            yield from ((form, form[..., 0]) if form.shape[-1] == 1 else (form,))


def norm_steps(features: Values, *_: Values) -> Iterator[Values]:
    """Yield the steps of a norm over the last dim, up to the variance without epsilon."""
    mean = features.mean(axis=-1, keepdims=True)
    squares = (features**2).mean(axis=-1, keepdims=True)
    size = features.shape[-1]
    variance = ((features - mean) ** 2).mean(axis=-1, keepdims=True)
    yield from (features**2, features - mean, (features - mean) ** 2)
    of_rows = (mean, mean * size, squares, squares * size, variance, variance * size)
    yield from (form for row in of_rows for form in (row, row[..., 0]))


def difference_steps(held: Values, wanted: Values, *_: Values) -> Iterator[Values]:
    """Yield the difference that a loss takes the mean square or mean magnitude of, and its squares and magnitudes."""
    if held.shape == wanted.shape:
        yield from (held - wanted, (held - wanted) ** 2, np.abs(held - wanted))


STEPS: Mapping[str, Callable[..., Iterator[Values]]] = {
    "cross_entropy": softmax_steps,
    "log_softmax": softmax_steps,
    "softmax": softmax_steps,
    "logsumexp": softmax_steps,
    "gather": chosen_steps,
    "layer_norm": norm_steps,
    "rms_norm": norm_steps,
    "mse_loss": difference_steps,
    "l1_loss": difference_steps,
}
"""The steps of functions whose first arguments are these tensors, over their last dim."""

OF_TWO = ("cross_entropy", "gather", "mse_loss", "l1_loss")
"""Functions whose second argument is one of these tensors, too."""

NEEDED = {"gather": 2, "mse_loss": 2, "l1_loss": 2}
"""How many tensors a function must be given: a tensor compared with itself is recorded once."""


def steps_in(unsharded: LinesRecord, whole: Callable[[int], Values | None]) -> Iterator[tuple[LineRecord, Values]]:
    """Yield what the unsharded model's functions compute on the way, with the function's line.

    Steps of one number alone, such as the distance of a chosen maximum from itself, are in any tensor of zeros.

    Args:
        unsharded: What it recorded.
        whole: Takes a tensor's number and returns the tensor; None if it was not kept.
    """
    shapes = [shape for record in unsharded.values if len(shape := record.shape) > 1]
    leading = dict.fromkeys(shape[:end] for shape in shapes for end in (-1, None))
    for line in unsharded.lines:
        given = [whole(number) for number in line.inputs] if line.function in STEPS else []
        arrays = [array for array in given if array is not None]
        for step in steps_of(line.function, arrays, [*leading]) if len(arrays) == len(given) else ():
            if step.size >= FEW and np.isfinite(step).all() and np.ptp(step) > 0:
                yield line, step


def candidates(
    steps: Iterable[tuple[int, Values]], held: Mapping[int, Values], mesh: Mesh, *, by_totals: bool
) -> Iterator[int]:
    """Yield the numbers of steps that ranks may have: relating a tensor takes a hundred times as long as to look.

    Args:
        steps: The steps with their numbers.
        held: What each rank has of a tensor.
        mesh: The mesh.
        by_totals: Whether what elements add up to must fit: that of parts, terms, means or the whole. It is not asked
            of maxima.
    """
    ways: list[Mapping[int, Values]] = [{rank: np.asarray(array.sum()) for rank, array in held.items()}]
    for axis in mesh.long_axes:
        ways += [over(axis, op, way, mesh) for way in ways for op in ("sum", "avg")]
    totals = np.array([float(next(iter(way.values()))) for way in ways if way])
    shapes, num_axes = {array.shape for array in held.values()}, len(mesh.long_axes)
    for number, step in steps:
        pairs = (zip(shape, step.shape, strict=False) for shape in shapes if len(shape) == step.ndim)
        fits = any(sum(own != whole for own, whole in pair) <= num_axes for pair in pairs)
        near = ROUGH * float(np.abs(step).sum())
        if fits and (not by_totals or np.any(np.abs(totals - float(step.sum())) <= near)):
            yield number


def steps_of(function: str, given: Sequence[Values], leading: Sequence[tuple[int, ...]]) -> Iterator[Values]:
    """Yield what a function computes on the way.

    Args:
        function: Its name.
        given: The tensors that it is given.
        leading: Shapes of the leading dims before they were merged, as those of a batch of sequences.
    """
    num_given = 2 if function in OF_TWO else 1
    if function not in STEPS or len(given) < NEEDED.get(function, 1) or not given[0].ndim or not given[0].size:
        return
    rows = given[0].shape[:-1]
    unmerged = [shape for shape in leading if shape != rows and math.prod(shape) == math.prod(rows)]
    with np.errstate(all="ignore"):
        for step in STEPS[function](*given[:num_given]):
            yield step
            for shape in unmerged if step.shape[: len(rows)] == rows else ():
                yield step.reshape(*shape, *step.shape[len(rows) :])
