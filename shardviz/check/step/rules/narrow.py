"""Gradients that are off by less than the rounding between two steps in narrow numbers.

A sum in a narrow dtype, where a policy of the model asks for a wider one, has numbers of that dtype only, and so has
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

from shardviz.dump.records.step import of_replay
from shardviz.explain.step.changed import ScaleOfPart
from shardviz.explain.step.scales import SmallFactor
from shardviz.explain.step.sums import NarrowSum
from shardviz.explain.templates import number
from shardviz.layout.dtypes import itemsize
from shardviz.relate.casts import rounded
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import EXPLAINED_BY_LINE, MANY, STEP, SURE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.records.step import CastRecord
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
    name = of_replay(comparison.name)
    tensor = evidence.dump.find("reference", "activation", name)
    assert tensor is not None
    whole = evidence.dump.values(tensor.first, name)
    expected = np.concatenate([comparison.part(whole, rank).ravel() for rank in comparison.reduced])
    got = np.concatenate([values.ravel() for values in comparison.reduced.values()])
    square, factor = float(np.sum(expected * expected)), factor_of(got, expected)
    if factor is None:
        return 1.0, 0.0, 0.0
    unexplained = math.sqrt(float(np.sum(np.square(got - factor * expected))) / square)
    effective = square * square / float(np.sum(expected**4))
    return factor, unexplained / math.sqrt(max(effective, 1.0)), unexplained


def scale_of_part(evidence: Evidence) -> ScaleOfPart | None:
    """Return that ranks cast parts to float8 which the same scale rule brings to one largest number; None if not.

    With one scale only the rank that has the largest number of the whole reaches it. An axis that splits the batch is
    unexplained out: numbers of each rank's own rows often have a scale of their own on purpose.
    """
    records, mesh = evidence.dump.files.ranks, evidence.dump.files.mesh
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.axes if mesh.axis_size(axis) > 1}
    axes = [axis for axis in sizes if not (evidence.batch or {}).get(axis, True)]
    of_batch = [size for axis, size in sizes.items() if axis not in axes]
    whole = [cast for record in records.values() for cast in record.casts if cast.unsharded]
    of_ranks = [[cast for cast in record.casts if not cast.unsharded] for record in records.values()]
    if not axes or not whole or any(len(casts) != len(whole) for casts in of_ranks):
        return None
    rows = zip(whole, *of_ranks, strict=True)
    scaled = [cast for cast, *parts in rows if all(_is_own(part, cast, of_batch) for part in parts)]
    modules = tuple(dict.fromkeys(cast.module or "the model itself" for cast in scaled))
    return ScaleOfPart(modules, scaled[0].dtype, scaled[0].largest, " and ".join(axes)) if scaled else None


def _is_own(part: CastRecord, whole: CastRecord, of_batch: Sequence[int]) -> bool:
    """Whether a rank casts a part, not of the batch, and its scale makes the largest number of the whole of it."""
    is_part = (part.module, part.dtype) == (whole.module, whole.dtype) and part.size < whole.size
    is_of_batch = any(whole.size // part.size % size == 0 for size in of_batch)
    return is_part and not is_of_batch and math.isclose(part.largest, whole.largest, rel_tol=STEP)
