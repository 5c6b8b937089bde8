"""Gradients that are off by less than the rounding between two steps in narrow numbers.

A sum in a narrow dtype, if a policy of the model asks for a wider one, has numbers of that dtype only, and so has
its mean over a power of two of ranks. A weight whose gradient one rank alone computes, as a row of an embedding, may
have them in a wide sum, too, so that rows of zeros leave a gradient out.

A small factor does not show in a comparison with the unsharded model's gradient: two right steps are further apart.
It does in one with the gradient that the sharded step's own activations give: there only the rounding of the gradient
itself is left, which is unbiased, and of many elements leaves a factor of nearly 1. A factor within one unit of
rounding may be rounding: that of one third is, in bfloat16, for all gradients alike.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared, whole_of
from shardviz.dump.records.step import CastRecord, of_replay
from shardviz.explain.step.scales import ScaleOfPart, SmallFactor, UnlikeScale
from shardviz.explain.step.sums import NarrowSum
from shardviz.explain.templates import number
from shardviz.layout.dtypes import itemsize
from shardviz.relate.casts import rounded
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import EPSILON, EXPLAINED_BY_LINE, MANY, STEP, SURE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding


def check_narrow_sums(evidence: Evidence) -> Iterator[Finding]:
    """Yield the gradients that have numbers of a dtype in which the step summed against a policy."""
    for dtype in sorted({dtype for record in evidence.dump.files.ranks.values() for dtype in record.narrow_sums}):
        dense = [result for result in evidence.gradients.values() if _is_dense(result.wanted) and not result.wrong]
        wider = (result for result in dense if _is_wider(evidence, result, dtype))
        gradients = [result for result in wider if _has_only(list(result.values.values()), dtype)]
        cause = NarrowSum(dtype, of_all=len(gradients) == len(dense))
        sentence = f"every number of the gradient is a {dtype} number: its terms were summed in {dtype}"
        for comparison in gradients:
            ranks = tuple(sorted(comparison.values))
            yield comparison.finding(cause, sentence, ranks, severity="warning").seen_in(comparison)


def _is_wider(evidence: Evidence, result: Compared, dtype: str) -> bool:
    tensor = evidence.dump.find("step", "grad", result.name)
    return tensor is not None and itemsize(tensor.dtype) > itemsize(dtype)


def _is_dense(whole: NDArray[np.float64]) -> bool:
    return bool(np.any(whole.reshape(len(whole), -1), axis=1).all()) if whole.ndim else False


def _has_only(held: list[NDArray[np.float64]], dtype: str) -> bool:
    numbers = np.concatenate([values.ravel() for values in held])
    return int(np.count_nonzero(numbers)) >= MANY and np.array_equal(rounded(numbers, dtype), numbers)


FEWEST = 3
"""Of so many gradients there is a factor that most have."""


def check_small_factor(evidence: Evidence) -> Iterator[Finding]:
    """Yield the gradients of a step in narrow numbers that are off by a factor too small to show otherwise."""
    measurements = [
        (result, _measured(evidence, result)) for result in evidence.gradients.values() if _is_known(evidence, result)
    ]
    common = float(np.median([factor for _, (factor, _, _) in measurements])) if len(measurements) >= FEWEST else 1.0
    for comparison, (factor, error, unexplained) in measurements:
        off = min(abs(factor - common), abs(factor - 1))
        is_told = not comparison.wrong and unexplained <= EXPLAINED_BY_LINE
        if is_told and off > max(comparison.rounding.epsilon, SURE * error):
            sentence = f"the gradient is {number(factor)} times what its module's own input and output gradient make"
            yield comparison.finding(SmallFactor(), sentence, tuple(sorted(comparison.reduced)))


def _is_known(evidence: Evidence, result: Compared) -> bool:
    tensor = evidence.dump.find("reference", "activation", of_replay(result.name)) if evidence.is_narrow else None
    return tensor is not None and tensor.shape == result.wanted.shape and result.wanted.size >= MANY


def _measured(evidence: Evidence, comparison: Compared) -> tuple[float, float, float]:
    """Return a gradient's factor to the replayed one, its standard error, and the residual."""
    whole = whole_of(evidence.dump, "activation", of_replay(comparison.name))
    assert whole is not None
    expected = np.concatenate([comparison.part(whole, rank).ravel() for rank in comparison.reduced])
    got = np.concatenate([values.ravel() for values in comparison.reduced.values()])
    square, factor = float(np.sum(expected * expected)), factor_of(got, expected)
    if factor is None:
        return 1.0, 0.0, 0.0
    unexplained = math.sqrt(float(np.sum(np.square(got - factor * expected))) / square)
    effective = square * square / float(np.sum(expected**4))
    return factor, unexplained / math.sqrt(max(effective, 1.0)), unexplained


def other_scale(evidence: Evidence) -> tuple[ScaleOfPart | UnlikeScale, str] | None:
    """Return how ranks cast parts to float8 with other scales than the unsharded model's, and what shows it.

    Either the same rule brings each part to one largest number: with one scale only the rank that has the largest
    number of the whole reaches it. Or no rank's numbers reach it. An axis that splits the batch is left out: numbers of
    each rank's own rows often have a scale of their own on purpose.
    """
    records, mesh = evidence.dump.files.ranks, evidence.dump.files.mesh
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.long_axes}
    axes = [axis for axis in sizes if not (evidence.batch or {}).get(axis, True)]
    of_batch = [size for axis, size in sizes.items() if axis not in axes]
    whole = [cast for record in records.values() for cast in record.casts if cast.unsharded]
    of_ranks = [[cast for cast in record.casts if not cast.unsharded] for record in records.values()]
    if not axes or not whole or any(len(casts) != len(whole) for casts in of_ranks):
        return None
    rows = [
        (cast, parts)
        for cast, *parts in zip(whole, *of_ranks, strict=True)
        if all(_is_part(part, cast, of_batch) for part in parts)
    ]
    over = " and ".join(axes)
    scaled = [cast for cast, parts in rows if all(_is_like(part.largest, cast) for part in parts)]
    if scaled:
        text = f"the largest number of every rank's part is {number(scaled[0].largest)}, as that of the whole"
        return ScaleOfPart(_modules_of(scaled), scaled[0].dtype, scaled[0].largest, over), text
    unlike = [(cast, parts) for cast, parts in rows if _is_unlike(max(part.largest for part in parts), cast)]
    if not unlike:
        return None
    first, parts = unlike[0]
    held, op = max(part.largest for part in parts), "" if of_batch else _op_of(first, parts)
    text = f"the largest number of all ranks is {number(held)}, that of the whole {number(first.largest)}"
    return UnlikeScale(_modules_of([cast for cast, _ in unlike]), first.dtype, held, first.largest, op, over), text


def _is_part(part: CastRecord, whole: CastRecord, of_batch: Sequence[int]) -> bool:
    """Whether what a rank casts is a part of what the unsharded model casts, and not of the batch."""
    is_part = (part.module, part.dtype) == (whole.module, whole.dtype) and part.size < whole.size
    return is_part and not any(whole.size // part.size % size == 0 for size in of_batch)


def _is_like(largest: float, whole: CastRecord) -> bool:
    return math.isclose(largest, whole.largest, rel_tol=STEP)


def _is_unlike(largest: float, whole: CastRecord) -> bool:
    """Whether a largest number is further from the unsharded model's than rounding of what is cast makes it."""
    return not math.isclose(largest, whole.largest, rel_tol=EPSILON.get(whole.dtype, 1.0))


def _op_of(whole: CastRecord, parts: Sequence[CastRecord]) -> str:
    """Return the op by which a scale was made of the largest magnitudes of ranks; empty if none makes it."""
    largest = [part.largest for part in parts]
    made = {"SUM": sum(largest), "AVG": sum(largest) / len(largest), "MIN": min(largest)}
    return next((op for op, value in made.items() if _is_like(value, whole)), "")


def _modules_of(casts: Sequence[CastRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cast.module or "the model itself" for cast in casts))
