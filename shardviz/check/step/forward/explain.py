"""The rules for outputs, in order: proofs by numbers before hints from order.

A row-parallel layer adds its bias after the sum over ranks. So a sum left out, an average in its place or a sum taken
twice is not a ratio of the output, but one of the output less the bias.

Of a plain output nothing claims how ranks share it, so its layout is read off its values, or off its shape. A model may
return its own columns of the logits, its own tokens or a part that overlaps its neighbor's, and a loss that reads them
so is right. The layout that an output of the batch's rows should have is then no claim that is broken. A loss that is
wrong but equal on all ranks that have different parts, or that is computed with collectives over their axis, was put
together from these: it is wrong for another reason. Columns that pad each part to one size are cut off.

The output of a step in micro-batches is joined in the order in which they ran. A step may give each micro-batch any of
the batch's rows, as `x[i::4]` does: the rows are put in the batch's order if each micro-batch keeps that order within
itself. If the loss is wrong then, the rows of the targets are in question.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.comparison import Compared, Reason
from shardviz.check.step.forward.parts import (
    check_experts,
    check_fused,
    check_parts,
    check_repeated,
    check_started_again,
    check_ungathered,
)
from shardviz.check.step.forward.stages import check_stages
from shardviz.check.step.rules.factors import own_part, size_in_words
from shardviz.explain.step.forward import WrongOutputLabel
from shardviz.explain.step.joins import ConcatenatedTerms
from shardviz.explain.step.modules import AveragedForward, RepeatedForwardSum
from shardviz.explain.step.sums import UnreducedBesideVector
from shardviz.explain.templates import times_text
from shardviz.layout.layout import Layout, padded_shapes, shared_placements
from shardviz.layout.notation import write
from shardviz.layout.placements import Replicate, Shard
from shardviz.relate.measures import axis_sets, is_nearer
from shardviz.relate.orders import matches
from shardviz.relate.values import part_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
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
            with np.errstate(invalid="ignore"):  # infinities
                due = {rank: expected[rank] * float(ratio) + added[rank] for rank in expected}
            if all(is_nearer(comparison, rank, due[rank], float(ratio)) for rank in due):
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
    sizes = {comparison.mesh.size_over(axes) for axes in axis_sets(comparison.mesh.long_axes)}
    return [ratio for size in sorted(sizes) for ratio in (Fraction(1, size), Fraction(size))]


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
    is_lone_loss = comparison is evidence.loss and not evidence.outputs
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


FEWEST_RUNS = 2
"""Calls of the model in one step that are micro-batches."""

UNPLACED = (
    "no placements of {whole}, {whose}, give every rank what it holds (rank {rank}: {held}); the loss and the "
    "gradients are right"
)


def laid_out_by_value(results: Sequence[Compared], dump: Dump) -> tuple[Compared, ...]:
    """Return results with the plain outputs laid out as their values are, if the loss was computed from them so."""
    loss = next((result for result in results if (result.role, result.name) == ("scalar", "loss")), None)
    if loss is None or loss.incomparable:
        return tuple(results)
    runs = {rank: record.runs for rank, record in dump.files.ranks.items()}
    results = [_in_order_of_batch(result, runs) if result.is_assumed else result for result in results]
    collectives = (call for record in dump.files.ranks.values() for call in record.collectives)
    by_loss = (call for call in collectives if not (call.module or call.backward))
    apart = set(loss.copies_differ_along) - {axis for call in by_loss for axis in call.axes}
    return tuple(_by_value(result, loss, apart) if result.is_assumed else result for result in results)


def _in_order_of_batch(comparison: Compared, runs: Mapping[int, int]) -> Compared:
    """Return an output with the rows of its micro-batches in the batch's order, if that makes it right."""
    claimed = comparison.claimed
    if claimed is None or claimed.partial or comparison.incomparable or not comparison.wrong:
        return comparison
    order_by_rank = {rank: _order_of_rows(comparison, rank, runs.get(rank, 0)) for rank in comparison.values}
    orders = {rank: order for rank, order in order_by_rank.items() if order is not None}
    if len(orders) < len(order_by_rank):
        return comparison
    values = {rank: held[np.argsort(orders[rank])] for rank, held in comparison.values.items()}
    first = comparison.wrong[0]
    micro_batches = np.reshape(orders[first], (runs[first], -1))[:2]
    return replace(comparison, values=values, rows=tuple(map(tuple, micro_batches.tolist())))


def _order_of_rows(comparison: Compared, rank: int, runs: int) -> NDArray[np.int64] | None:
    """Return which of its rows a rank has at each place; None unless each micro-batch has some of them in order."""
    held, wanted = comparison.values[rank], comparison.wanted_of(rank)
    if runs < FEWEST_RUNS or not held.ndim or len(held) % runs or held.shape != wanted.shape:
        return None
    close = matches(slices_of(held, 0), slices_of(wanted, 0), comparison.tolerance)
    if close is None or np.any(close.sum(0) != 1) or np.any(close.sum(1) != 1):
        return None
    order = close.argmax(1)
    is_in_order = np.all(np.diff(order.reshape(runs, -1), axis=1) > 0)
    return order if is_in_order else None


def _by_value(comparison: Compared, loss: Compared, apart: set[str]) -> Compared:
    if comparison.claimed is None or not (comparison.incomparable or comparison.wrong):
        return comparison
    layout = layout_of_values(comparison)
    if layout is not None:
        return _laid_out(comparison, layout) if _is_read_so(comparison, layout, loss, apart) else comparison
    shapes = {values.shape for values in comparison.values.values()}
    if not comparison.incomparable and shapes == {comparison.wanted.shape}:
        return comparison
    layouts = (layout for layout in _by_shape(comparison) if _is_read_so(comparison, layout, loss, apart))
    parts = [_laid_out(comparison, layout) for layout in layouts]
    right = [part for part in parts if not part.wrong]
    if not right and not loss.wrong:
        return comparison
    return next(iter(right), parts[0] if len(parts) == 1 else comparison)


def _is_read_so(comparison: Compared, layout: Layout, loss: Compared, apart: set[str]) -> bool:
    """Whether the loss was computed from the parts of a layout: it is right, or put together over its axes."""
    split_axes = set(comparison.claimed.split_axes) if comparison.claimed is not None else set()
    return not loss.wrong or not (set(layout.split_axes) - split_axes) & apart


def _by_shape(comparison: Compared) -> Iterator[Layout]:
    """Yield the layouts with one dim more split over one axis, of which ranks have a part each, padded to one size."""
    placements = comparison.claimed.placements() if comparison.claimed is not None else None
    if not placements or any(len(values.shape) != comparison.wanted.ndim for values in comparison.values.values()):
        return
    for at, axis in enumerate(comparison.mesh.axes):
        for dim in range(comparison.wanted.ndim) if isinstance(placements[at], Replicate) else ():
            split = (*placements[:at], Shard(dim), *placements[at + 1 :])
            layout = Layout.from_placements(comparison.mesh, comparison.wanted.shape, split)
            is_split = comparison.mesh.axis_size(axis) > 1
            if is_split and all(_holds_part(comparison, layout, dim, rank) for rank in comparison.values):
                yield layout
            elif is_split and (longer := _padded_to_multiple(comparison, layout, dim, axis)) is not None:
                yield longer


def _padded_to_multiple(comparison: Compared, layout: Layout, dim: int, axis: str) -> Layout | None:
    """Return the layout of a dim that was padded to a multiple before it was split evenly; None if it was not."""
    held = {values.shape for values in comparison.values.values()}
    own, size = next(iter(held)), comparison.mesh.axis_size(axis)
    longer = replace(layout, shape=(*layout.shape[:dim], own[dim] * size, *layout.shape[dim + 1 :]))
    is_even = len(held) == 1 and longer.shape in padded_shapes(layout.shape, own, (size,))
    fits = is_even and all(longer.region_of_rank(rank).shape in held for rank in comparison.values)
    return longer if fits else None


def _holds_part(comparison: Compared, layout: Layout, dim: int, rank: int) -> bool:
    held, expected = comparison.values[rank].shape, layout.region_of_rank(rank).shape
    size = max(layout.region_of_rank(other).shape[dim] for other in comparison.values)
    return held in (expected, (*expected[:dim], size, *expected[dim + 1 :]))


def _laid_out(comparison: Compared, layout: Layout) -> Compared:
    whole = comparison.wanted.shape
    regions = {rank: layout.region_of_rank(rank).clipped(whole) for rank in comparison.values}
    layout = replace(layout, shape=whole)
    values = {rank: held[tuple(map(slice, regions[rank].shape))] for rank, held in comparison.values.items()}
    sides = [zip(comparison.values[rank].shape, values[rank].shape, strict=True) for rank in values]
    cut = next(((dim, held) for shapes in sides for dim, (held, own) in enumerate(shapes) if held > own), None)
    return replace(comparison, mesh=layout.mesh, claimed=layout, regions=regions, values=values, padded=cut)


def why_unplaced(evidence: Evidence, comparison: Compared) -> str:
    """Return why a plain part of an output is not judged; empty if it is, or if something behind it is wrong."""
    gradients = evidence.gradients.values()
    is_right = evidence.loss_is_right and bool(gradients) and not any(gradient.wrong for gradient in gradients)
    odd = [rank for rank, values in comparison.values.items() if values.shape != comparison.wanted.shape]
    if not (comparison.is_assumed and comparison.incomparable and is_right and odd) or evidence.without_gradient:
        return ""
    whole = comparison.wanted.shape
    for shape in (values.shape for values in comparison.values.values()):
        if len(shape) != len(whole) or any(own > size for own, size in zip(shape, whole, strict=True)):
            return ""  # larger than the whole, as copies side by side are
    rank = min(odd)
    held = list(comparison.values[rank].shape)
    return UNPLACED.format(rank=rank, held=held, whole=list(whole), whose=comparison.whose)
