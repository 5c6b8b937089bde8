"""Optimizers that are defined for whole matrices, and ran on each rank's part of one.

They make a step orthogonal, give it a norm, or divide it by means along a dim. All are defined for a part, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.update.steps import Why, is_equal, is_near, is_stepped_once, other_weights, steps_of
from shardviz.check.step.words import number
from shardviz.explain.update import StepOfPart
from shardviz.relate.tolerance import FEW, LEAST_SINGULAR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump

MAX_MATRIX = 1 << 10
"""Rows and columns of a matrix whose singular values are looked at."""


def of_orthogonal_parts(dump: Dump, result: Compared) -> Why | None:
    """Return that each rank's step is an orthogonal matrix of its own, which only the whole step should be."""
    whole, steps = _whole_step(dump, result), _steps_of_parts(dump, result)
    if whole is None or not steps or not _is_orthogonal(whole):
        return None
    if not all(_is_orthogonal(got) for got, _ in steps):
        return None
    return Why("each rank's step of it is an orthogonal matrix, as the whole step should be", StepOfPart())


def by_own_statistics(dump: Dump, result: Compared) -> Why | None:
    """Return that a rank's step is scaled by numbers of its own, alike all along a split dim: means over its part."""
    steps = _steps_of_parts(dump, result)
    for dim, size in enumerate(result.wanted.shape if result.wanted.ndim > 1 else ()):
        if steps and all(1 < got.shape[dim] < size for got, _ in steps):
            first, *others = [_scales_across(got, due, dim) for got, due in steps]
            is_own = first is not None and any(scales is not None and not is_near(first, scales) for scales in others)
            if is_own and all(scales is not None for scales in others):
                times = f"each rank's step is the unsharded model's times numbers of its own, alike all along dim {dim}"
                return Why(f"{times}, as means over its own part of that dim make them", StepOfPart())
    return None


def _scales_across(got: NDArray[np.float64], due: NDArray[np.float64], dim: int) -> NDArray[np.float64] | None:
    """Return the numbers, alike all along a dim, by which one array is another; None if there are none."""
    products, squares = (np.sum(one * due, axis=dim, keepdims=True) for one in (got, due))
    scales: NDArray[np.float64] = products / np.where(squares, squares, 1.0)
    return scales if is_near(got, due * scales) else None


def of_this_part(dump: Dump, result: Compared) -> Why | None:
    """Return that a split matrix is stepped differently, if the settings and another matrix's step are right."""
    has_settings = any(record.other_settings for record in dump.files.ranks.values())
    is_trained = dump.find("reference", "grad", result.name) is not None
    if result.wanted.ndim < 2 or has_settings or not is_trained or not _steps_of_parts(dump, result):
        return None
    right = next((other.name for other in other_weights(dump, result) if is_stepped_once(dump, other)), None)
    if right is None:
        return None
    return Why(f"its step is no multiple of the unsharded model's, and the step of {right} is right", StepOfPart())


def of_normed_parts(dump: Dump, result: Compared) -> Why | None:
    """Return that each rank's step has the norm that the whole step should have."""
    whole, steps = _whole_step(dump, result), _steps_of_parts(dump, result)
    norm = float(np.linalg.norm(whole)) if whole is not None else 0.0
    norms = [(float(np.linalg.norm(got)), float(np.linalg.norm(due))) for got, due in steps]
    if not norm or not norms or not all(is_equal(held, norm) and not is_equal(due, norm) for held, due in norms):
        return None
    return Why(f"each rank's step has the norm {number(norm)}, which the whole one should have", StepOfPart())


def _whole_step(dump: Dump, result: Compared) -> NDArray[np.float64] | None:
    before, after = dump.find("reference", "param", result.name), dump.find("updated", "param", result.name)
    if before is None or after is None:
        return None
    return dump.values(after.first, result.name) - dump.values(before.first, result.name)


def _steps_of_parts(dump: Dump, result: Compared) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the step of each rank's part and the due one, of parts that are neither empty nor the whole."""
    return [pair for pair in steps_of(dump, result).values() if 0 < pair[0].size < result.wanted.size]


def _is_orthogonal(step: NDArray[np.float64]) -> bool:
    """Whether the singular values of a matrix are alike, as Muon makes them."""
    if step.ndim != 2 or min(step.shape) < FEW or max(step.shape) > MAX_MATRIX or not np.isfinite(step).all():
        return False
    square = step @ step.T if step.shape[0] <= step.shape[1] else step.T @ step
    if np.linalg.norm(square - np.diag(np.diag(square))) > np.linalg.norm(square) * (1 - LEAST_SINGULAR):
        return False  # far from orthogonal, at a fraction of the cost
    sizes = np.linalg.svd(step, compute_uv=False)
    return bool(sizes[-1] >= LEAST_SINGULAR * sizes[0] > 0)
