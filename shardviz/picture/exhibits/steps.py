"""Step results next to expected ones: the worst elements, their ratio, and errors by place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared
from shardviz.check.step.rules.factors import Unreduced
from shardviz.explain.step.sums import RepeatedTerm, TermLeftOut
from shardviz.layout.region import index_of
from shardviz.picture.exhibits.exhibit import MOST_CELLS, MOST_ROWS, Cell, Exhibit, Row, exhibit, plain, title_of
from shardviz.picture.model.step import equal_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding
    from shardviz.relate.measures import Reduction

WHAT = {
    "grad": "gradient",
    "output": "output",
    "scalar": "logged value",
    "optim": "optimizer's state after the step",
    "param": "weight after the step",
    "buffer": "buffer after the step",
}
"""Results, as captions call them."""

NEAR = 1e-4
"""A ratio this near to a fraction, relative to it, is written as one."""

FEW = 4
"""So many ranks are shown in their own order, however small the terminal is."""

STRIP = 12
"""Cells of the strip that shows where along a shard its values are off."""

LEVELS = "·▁▂▃▄▅▆▇█"
"""Right, and then by how much, to the farthest."""

REDUCTION_WORDS: dict[Reduction, str] = {"mean": "mean", "sum": "sum", "norm": "root of squares"}

HEADS = ("", "element", "has", "unsharded model", "ratio", "where it is off")


def added_too_often(dump: Dump, finding: Finding) -> Exhibit | None:
    """Show an error next to the vector that explains it: a term added too often or left out."""
    vector = dump.find("reference", "param", finding.tensor)
    results = _results(finding)
    if vector is None or not results or not isinstance(finding.explanation, RepeatedTerm | TermLeftOut):
        return None
    return _beside_vector(results[0], finding.tensor, dump.values(vector.first, finding.tensor))


def _beside_vector(result: Compared, name: str, vector: NDArray[np.float64]) -> Exhibit | None:
    """Show elements of a result next to a vector, and how many times it was added (1 is right)."""
    rank = result.wrong[0]
    got, due = result.reduced[rank].ravel(), result.wanted_of(rank).ravel()
    ids = result.regions[rank].flat_ids(result.wanted.shape).ravel()
    rows = []
    for at, term in enumerate(vector.ravel()[:MOST_CELLS].tolist()):
        over = got[at] - due[at]
        has = Cell(f"{got[at]:.6g}", is_wrong=True)
        times = Cell(f"{1 + over / term:.4g}" if term else "", is_wrong=True)
        rows.append(
            Row(
                str(index_of(int(ids[at]), result.wanted.shape)),
                (has, *plain(f"{value:.6g}" for value in (due[at], term)), times, Cell("1")),
            )
        )
    caption = f"how many times the {WHAT[result.role]} on {title_of(result.wrong, result.mesh)} has {name}"
    heads = ("element", "has", "unsharded model", name, f"times {name}", "wanted")
    return exhibit(caption, heads, rows, vector.size - len(rows), noun="element")


def lacking_reduction(finding: Finding) -> Exhibit | None:
    """Show one element of a result on each rank of a group, and its value after the reduction."""
    for pair in finding.pairs:
        if isinstance(pair, Unreduced):
            result, whole = pair.comparison, pair.whole
            apart = _farthest_apart(result)
            first = next((rank for rank in (*apart, *result.wrong) if rank in whole and whole[rank].size), None)
            if first is not None:
                group = _group(result, pair.axes, first)
                return _parts_and_whole(result, pair.kind, pair.axes, group, whole[first], apart)
    return None


def _parts_and_whole(
    result: Compared,
    kind: Reduction,
    axes: tuple[str, ...],
    ranks: list[int],
    whole: NDArray[np.float64],
    apart: tuple[int, ...],
) -> Exhibit | None:
    """List a group's parts above their sum or mean, for the element that differs most."""
    due = result.wanted_of(ranks[0]).ravel()
    pair = [rank for rank in apart if rank in ranks]
    at = _worst_element(result, ranks, pair)
    # The finding's sentence names these, so they stay where there is room for few.
    order = pair if len(ranks) > FEW and result.wanted.ndim else []
    shown = [*order, *(rank for rank in ranks if rank not in order)][: MOST_ROWS - 1]
    rows = [_row_at(result, [rank], "", at) for rank in shown]
    what, words = WHAT[result.role], REDUCTION_WORDS[kind]
    rows.append(_whole_row(words, whole.ravel()[at], due[at], result))
    caption = f"one element of {result.name}'s {what}" if result.wanted.ndim else f"the {what}"
    caption += f" on {title_of(ranks, result.mesh)}, and their {words} over {' and '.join(axes)}"
    return exhibit(caption, HEADS, rows, len(ranks) - len(shown), sums_up=True, noun="rank")


def _farthest_apart(result: Compared) -> tuple[int, ...]:
    """Return the two neighboring ranks whose copies differ most."""
    groups = result.mesh.groups(result.copies_differ_along[0]) if result.copies_differ_along else []
    return max(result.neighbors_apart(groups), key=lambda pair: pair[2], default=())[:2]


def _worst_element(result: Compared, ranks: Sequence[int], apart: Sequence[int]) -> int:
    """Return the element in which two ranks differ most; without a pair, the one farthest off."""
    if len(apart) == 2:
        return int(np.argmax(_errors(result.reduced[apart[0]].ravel(), result.reduced[apart[1]].ravel())))
    due = result.wanted_of(ranks[0]).ravel()
    return int(np.argmax(np.max([_errors(result.reduced[rank].ravel(), due) for rank in ranks], axis=0)))


def _whole_row(title: str, got: float, due: float, result: Compared) -> Row:
    is_right = bool(abs(got - due) <= result.tolerance)
    texts = (f"{got:.6g}", _ratio_text(got / due if due else math.inf, result.mesh.size))
    has, times = (Cell(text, is_wrong=not is_right, is_right=is_right) for text in texts)
    return Row(title, (Cell(""), has, Cell(f"{due:.6g}"), times, Cell("")))


def _group(result: Compared, axes: tuple[str, ...], rank: int) -> list[int]:
    """Return the ranks that a rank would be reduced with, itself among them."""
    group = {rank}
    for axis in axes:
        group |= {other for ranks in result.mesh.groups(axis) if group & set(ranks) for other in ranks}
    return sorted(group)


def beside_reference(finding: Finding) -> Exhibit | None:
    """Show what ranks have of a result next to the unsharded model's; a row for each of several."""
    wrong = _results(finding)
    if not wrong:
        return None
    if not finding.tensor:
        rows = [replace(row, count=1) for one in wrong for row in _rows(one, one.name)[:1]]
        return exhibit("the element of each gradient that is farthest off", HEADS, rows, noun="gradient")
    name, kind = wrong[0].name, WHAT[wrong[0].role]
    what = f"the {kind}" if name == kind else f"{name}'s {kind}"
    caption = f"the element of {what} that is farthest off, rank by rank" if wrong[0].wanted.ndim else what
    return exhibit(caption, HEADS, _rows(wrong[0]), noun="rank")


def _results(finding: Finding) -> list[Compared]:
    """Return the wrong results that a finding was judged from."""
    pairs = (pair.comparison if isinstance(pair, Unreduced) else pair for pair in finding.pairs)
    return [pair for pair in pairs if isinstance(pair, Compared) and not pair.incomparable and pair.wrong]


def _rows(result: Compared, name: str = "") -> list[Row]:
    """Return a row for each set of ranks with equal values, wrong ones first."""
    order = sorted(equal_ranks(result), key=lambda ranks: ranks[0] not in result.wrong)
    return [_row(result, ranks, name) for ranks in order if result.reduced[ranks[0]].size]


def _row(result: Compared, ranks: list[int], name: str) -> Row:
    """Return the row of ranks that have the same values, for the element that is farthest off."""
    off = _errors(result.reduced[ranks[0]].ravel(), result.wanted_of(ranks[0]).ravel())
    return _row_at(result, ranks, name, int(np.argmax(off)))


def _row_at(result: Compared, ranks: list[int], name: str, at: int) -> Row:
    got, due = result.reduced[ranks[0]].ravel(), result.wanted_of(ranks[0]).ravel()
    ids = result.regions[ranks[0]].flat_ids(result.wanted.shape).ravel()
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = got[at] / due[at]
    is_wrong = ranks[0] in result.wrong
    is_flat = result.claimed is not None and result.claimed.flat is not None
    shape = result.claimed.tensor_shape if result.claimed is not None and is_flat else result.wanted.shape
    element = str(index_of(int(ids[at]), shape)) if shape else ""
    return Row(
        title_of(ranks, result.mesh),
        (
            Cell(" ".join(filter(None, (name, element)))),
            Cell(f"{got[at]:.6g}", is_wrong),
            Cell(f"{due[at]:.6g}"),
            Cell(_ratio_text(ratio, result.mesh.size), is_wrong),
            Cell(_strip(_errors(got, due), result.tolerance)),
        ),
        count=len(ranks),
    )


def _ratio_text(ratio: float, num_ranks: int) -> str:
    """Write a ratio, as a fraction if it is 1/n and n divides the number of ranks."""
    if not np.isfinite(ratio):
        return ""
    times = round(1 / ratio) if abs(ratio) * num_ranks > 1 / 2 else 0
    is_share = times > 1 and num_ranks % times == 0 and abs(ratio * times - 1) < NEAR
    return f"1/{times}" if is_share else f"{ratio:.4g}"


def _errors(got: NDArray[np.float64], due: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far values are off, infinitely far if they are nan or infinite."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(got), np.abs(got - due), np.inf)


def _strip(off: NDArray[np.float64], tolerance: float) -> str:
    """Draw how far values are off along a shard, one character a stretch, scaled to the worst."""
    if off.size < 2:
        return ""
    finite = off[np.isfinite(off)]
    most = float(finite.max(initial=0.0)) or 1.0
    stretches = np.array_split(off, min(STRIP, off.size))
    farthest = [float(np.max(part)) for part in stretches]
    top = len(LEVELS) - 1
    return "".join(
        LEVELS[0 if far <= tolerance else top if not np.isfinite(far) else max(round(top * far / most), 1)]
        for far in farthest
    )
