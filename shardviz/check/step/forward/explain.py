"""The rules for outputs, in order: proofs by numbers before hints from order; and sums, joined parts and labels.

A row-parallel layer adds its bias after the sum over ranks. So a sum left out, an average in its place or a sum taken
twice is not a ratio of the output, but one of the output less the bias.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.comparison import Reason
from shardviz.check.step.forward.parts import (
    check_experts,
    check_fused,
    check_parts,
    check_repeated,
    check_started_again,
    check_ungathered,
)
from shardviz.check.step.forward.stages import check_stages
from shardviz.check.step.rules.factors import size_in_words
from shardviz.check.step.rules.reductions import own_part
from shardviz.explain.step.forward import WrongOutputLabel
from shardviz.explain.step.modules import AveragedForward, RepeatedForwardSum
from shardviz.explain.step.sums import ConcatenatedTerms, UnreducedBesideVector
from shardviz.explain.templates import times_text
from shardviz.layout.candidates import shared_placements
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding
    from shardviz.layout.region import Region


def check_sum_beside_a_vector(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if the output less a vector of the model lacks a sum, or is some times too large or small."""
    for name, vector in _vectors(evidence, comparison.wanted.shape[-1:]):
        whole = np.broadcast_to(vector, comparison.wanted.shape)
        added = {rank: comparison.part(whole, rank) for rank in comparison.reduced}
        terms = {rank: comparison.reduced[rank] - added[rank] for rank in comparison.reduced}
        expected = {rank: comparison.wanted_of(rank) - added[rank] for rank in comparison.reduced}
        for axis in comparison.copies_differ_along:
            for op in ("sum", "avg"):
                total = comparison.over((axis,), op, terms)
                is_known = total.keys() == expected.keys()
                if is_known and all(comparison.near(total[rank], expected[rank]) for rank in expected):
                    what: Literal["sum", "mean"] = "sum" if op == "sum" else "mean"
                    sentence = f"without {name}, the {what} of the ranks' outputs over {axis} is the unsharded model's"
                    return Reason(UnreducedBesideVector(name, axis, op), sentence, held=own_part(what, (axis,)))
        for ratio in _ratios(comparison):
            if all(comparison.near(terms[rank], expected[rank] * float(ratio), float(ratio)) for rank in expected):
                cause = AveragedForward if ratio < 1 else RepeatedForwardSum
                sentence = f"without {name}, it is {times_text(ratio)} the unsharded model's without {name}"
                return Reason(cause("", size_in_words(comparison.mesh, ratio), name), sentence)
    return None


def check_joined(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if an output is larger than the unsharded model's, and its parts along a dim add up to that."""
    whole = next(iter(comparison.values.values()))
    is_output = comparison.role == "output" and whole.ndim == comparison.wanted.ndim
    if not is_output or not np.all(np.isfinite(comparison.wanted)):
        return None
    for dim, (length, expected) in enumerate(zip(whole.shape, comparison.wanted.shape, strict=True)):
        for axis in comparison.mesh.axes:
            size = comparison.mesh.axis_size(axis)
            if size > 1 and length == expected * size:
                for name, vector in [("", np.zeros(())), *_vectors(evidence, comparison.wanted.shape[-1:])]:
                    if all(_adds_up(comparison, values, dim, size, vector) for values in comparison.values.values()):
                        less = f" without {name}" if name else ""
                        return Reason(
                            ConcatenatedTerms(axis, dim, name),
                            f"the sum of its {size} parts along dim {dim} is the unsharded model's output{less}",
                        )
    return None


def _adds_up(
    comparison: Compared, values: NDArray[np.float64], dim: int, size: int, vector: NDArray[np.float64]
) -> bool:
    if values.shape[dim] != comparison.wanted.shape[dim] * size:
        return False
    total = np.sum(np.split(values, size, dim), axis=0)
    return total.shape == comparison.wanted.shape and comparison.near(total + vector, comparison.wanted)


def _vectors(evidence: Evidence, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    names, vectors = evidence.dump.vectors(shape)
    return ((name, vector) for name, vector in zip(names, vectors, strict=True) if np.any(vector))


def _ratios(comparison: Compared) -> list[Fraction]:
    """Return ratios of an average instead of a sum, or of a repeated sum: sizes of sets of axes."""
    sizes = {1}
    for axis in comparison.mesh.axes:
        sizes |= {size * comparison.mesh.axis_size(axis) for size in sizes}
    return [ratio for size in sorted(sizes - {1}) for ratio in (Fraction(1, size), Fraction(size))]


RULES = (
    check_sum_beside_a_vector,
    check_repeated,
    check_stages,
    check_started_again,
    check_experts,
    check_parts,
    check_fused,
    check_ungathered,
)


def with_reason(evidence: Evidence, comparison: Compared, finding: Finding) -> Finding:
    """Add to an unexplained output's finding the first reason that the step supports."""
    is_output = comparison.role == "output"
    is_lone_loss = comparison is evidence.loss and not any(result.role == "output" for result in evidence.results)
    if not finding.generic or not (is_output or is_lone_loss):
        return finding
    rules = RULES if is_output else (check_stages,)
    reason = next((reason for rule in rules if (reason := rule(evidence, comparison)) is not None), None)
    return reason.of(finding if finding.pairs else finding.seen_in(comparison)) if reason is not None else finding


def with_parts_joined(evidence: Evidence, comparison: Compared, finding: Finding) -> Finding:
    """Return the finding of an output of another shape, with what its parts are or add up to."""
    reason = check_label_of_output(comparison) or check_joined(evidence, comparison)
    return replace(reason.of(finding), claimed=finding.claimed) if reason is not None else finding


def check_label_of_output(comparison: Compared) -> Reason | None:
    """Return the reason if the values that ranks hold are the unsharded model's under other placements."""
    layout = layout_of_values(comparison)
    if comparison.claimed is None or layout is None:
        return None
    labeled, right = (", ".join(map(str, one.placements() or ())) for one in (comparison.claimed, layout))
    sentence = f"what ranks hold is the unsharded model's output under ({right}): {write(layout)}"
    return Reason(WrongOutputLabel(labeled, right), sentence, held=write(layout))


def layout_of_values(comparison: Compared) -> Layout | None:
    """Return the layout that makes an output right on every rank; None without one."""
    if comparison.claimed is None or comparison.claimed.flat or comparison.role != "output":
        return None
    shapes = {rank: values.shape for rank, values in comparison.values.items()}

    def fits(rank: int, region: Region) -> bool:
        return comparison.near(comparison.values[rank], part_of(comparison.wanted, region))

    placements = shared_placements(comparison.wanted.shape, shapes, comparison.mesh, fits)
    return None if placements is None else Layout.from_placements(comparison.mesh, comparison.wanted.shape, placements)
