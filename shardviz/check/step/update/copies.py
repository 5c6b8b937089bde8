"""After the update of a probe's own optimizer: copies of a weight must still be equal, and what has a gradient moves.

`unreplicated` where copies that were equal before are not any more; `write-not-applied` where a weight is what it was,
though its gradient is not zero, and where an optimizer steps it on some ranks only or on none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.comparison import compared, laid_out
from shardviz.check.step.update.reasons import factors_of_steps, scaled
from shardviz.check.step.words import apart_text
from shardviz.check.values.copies import with_copies
from shardviz.explain.step.update import (
    AverageNotWritten,
    CopiesSteppedApart,
    LeftOutOfOptimizer,
    OptimizerOfOtherParameters,
    StepNotKept,
    StepNotSent,
    StepOverwritten,
    StepSkippedByRank,
)
from shardviz.relate.tolerance import EXPLAINED_UPDATE, SINGLE
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

MAX_LISTED = 8


def check_update(dump: Dump, step: Sequence[Finding]) -> Iterator[Finding | NotChecked]:
    """Yield findings of the updated weights if the weights before the step are right.

    Args:
        dump: The dump.
        step: What was found of the step: wrong gradients make other weights.
    """
    tensors = dump.by_name("step", "param")
    if not tensors or not dump.at("reference"):
        return
    if step:
        first = f" ({step[0].tensor})" if step[0].tensor else ""
        why = f"the weights after the optimizer's step: it began with what is wrong{first}"
        yield NotChecked("", why, "step")
        return
    comparisons, arrived = [], _arrived(dump)
    for comparison in compared(dump, ("param",)):
        idle = _not_stepped_by(dump, comparison)
        if comparison.incomparable:
            yield NotChecked(
                comparison.name, f"its value after the optimizer's step: {comparison.incomparable}", "step"
            )
        elif idle and _is_meant_to_move(dump, comparison, idle):
            is_trained = bool(_with_gradient(dump, comparison))
            yield _left_out(comparison, idle, arrived) if is_trained else _not_written(comparison, idle)
        elif comparison.copies_differ_along:
            yield with_copies(_differing(dump, comparison), dump, tensors[comparison.name])
        elif len(idle) < len(comparison.values):  # else it is left alone on purpose
            comparisons.append(comparison)
    yield from _check_moved(dump, comparisons)


def _not_stepped_by(dump: Dump, comparison: Compared) -> tuple[int, ...]:
    """Return the ranks whose optimizer lacks a weight and on which it did not change."""
    return tuple(
        rank
        for rank, values in comparison.values.items()
        if comparison.name in dump.files.ranks[rank].not_stepped and np.array_equal(values, comparison.wanted_of(rank))
    )


def _arrived(dump: Dump) -> Mapping[int, str]:
    """Return by rank a weight that its optimizer does not step, and that changed: another rank sent it."""
    arrived: dict[int, str] = {}
    for comparison in compared(dump, ("param",)):
        for rank, values in comparison.values.items() if not comparison.incomparable else ():
            if comparison.name in dump.files.ranks[rank].not_stepped and not np.array_equal(
                values, comparison.wanted_of(rank)
            ):
                arrived.setdefault(rank, comparison.name)
    return arrived


def _is_meant_to_move(dump: Dump, comparison: Compared, idle: Sequence[int]) -> bool:
    """Whether the unsharded model's optimizer moves it; if that did not run, whether other ranks' do."""
    moved = _moved(dump, comparison)
    if moved is None:
        return any(comparison.name not in dump.files.ranks[rank].not_stepped for rank in comparison.values) and any(
            comparison.values[rank].size for rank in idle
        )
    return any(np.any(comparison.part(moved, rank)) for rank in idle)


def _moved(dump: Dump, comparison: Compared) -> NDArray[np.bool_] | None:
    """Return which elements the unsharded model's optimizer changes; None if it did not run."""
    after = dump.find("updated", "param", comparison.name)
    values = dump.values(after.first, comparison.name) if after is not None else None
    if values is None or values.size != comparison.wanted.size:
        return None
    moved: NDArray[np.bool_] = values.ravel() != comparison.wanted.ravel()
    return moved


def _left_out(comparison: Compared, idle: tuple[int, ...], arrived: Mapping[int, str]) -> Finding:
    """Return the finding of a weight that some ranks do not step, or none."""
    everywhere = len(idle) == len(comparison.values)
    whose = (
        "no rank's optimizer steps it" if everywhere else f"the optimizer does not step it{_where(comparison, idle)}"
    )
    others = "the unsharded model's steps it" if everywhere else "the others step it"
    sentence = f"{whose}: it is not one of the tensors in param_groups there, or has a learning rate of 0, and {others}"
    if not everywhere and all(rank in arrived for rank in idle):
        where = named_ranks(idle, MAX_LISTED)
        steps = tuple(sorted(comparison.values.keys() - set(idle)))
        if all(np.array_equal(comparison.values[rank], comparison.wanted_of(rank)) for rank in steps):
            sentence = (
                f"after the optimizer's step it is what it was before on all ranks; {named_ranks(steps, MAX_LISTED)} "
                f"{'has' if len(steps) == 1 else 'have'} it in param_groups, the others don't"
            )
            return comparison.finding(StepOverwritten(steps), sentence, tuple(sorted(comparison.values)))
        sentence = f"{where} did not get it after the optimizer's step, and the others, which step it, changed it"
        return comparison.finding(StepNotSent(arrived[idle[0]]), sentence, idle)
    return comparison.finding(LeftOutOfOptimizer(), sentence, idle)


def _not_written(comparison: Compared, idle: tuple[int, ...]) -> Finding:
    """Return the finding of a weight without a gradient, which something else than the optimizer's groups writes."""
    return comparison.finding(
        AverageNotWritten(on_some=len(idle) < len(comparison.values)),
        f"it is as it was before the step{_where(comparison, idle)}, and the unsharded model's is not; "
        "it has no gradient and is in none of the optimizer's param_groups",
        idle,
    )


def _differing(dump: Dump, comparison: Compared) -> Finding:
    axes = " and ".join(comparison.copies_differ_along)
    factors = factors_of_steps(dump, comparison)
    if factors and max(factors.values()) - min(factors.values()) > EXPLAINED_UPDATE * max(map(abs, factors.values())):
        why = scaled(factors)
        return _apart(comparison, why.cause, f": {why.sentence}")
    states = listed(_differing_states(dump, comparison), MAX_LISTED)
    is_moved = all(np.any(values != comparison.wanted_of(rank)) for rank, values in comparison.values.items())
    return _apart(comparison, CopiesSteppedApart(axes, states, "every copy" if is_moved and not states else ""))


def _differing_states(dump: Dump, comparison: Compared) -> list[str]:
    """Return the kinds of state of a weight whose copies differ along the axes along which the weight's do."""
    kinds = []
    for name, tensor in dump.by_name("step", "optim").items():
        weight, _, kind = name.rpartition(".")
        updated = dump.find("updated", "optim", name) if weight == comparison.name else None
        if updated is not None:
            state = laid_out(dump, tensor, name, dump.values(updated.first, name), comparison.rounding)
            if not state.incomparable and set(state.copies_differ_along) & set(comparison.copies_differ_along):
                kinds.append(kind)
    return kinds


def _apart(comparison: Compared, cause: Cause, clause: str = "") -> Finding:
    axes = " and ".join(comparison.copies_differ_along)
    pairs = comparison.pairs_of_copies
    low, high, worst = max(pairs, key=lambda pair: pair[2])
    return comparison.finding(
        cause,
        f"copies differ along {axes} after the optimizer's step: {apart_text(low, high, worst)}, "
        f"although their weights and gradients are equal{clause}",
        tuple(sorted({rank for pair in pairs if not pair[2] <= comparison.tolerance / 2 for rank in pair[:2]})),
        kind="unreplicated",
        held=f"different values along {axes}",
    )


def _check_moved(dump: Dump, weights: Sequence[Compared]) -> Iterator[Finding]:
    """Yield weights that did not change on ranks whose part of the gradient is not zero; one finding if all are."""
    is_sent = any(call.op == "broadcast" for record in dump.files.ranks.values() for call in record.collectives)
    unmoved_weights = [(result, still) for result in weights if (still := _still(dump, result, is_sent=is_sent))]
    judged = [result for result in weights if _with_gradient(dump, result)]
    whole = all(set(still) == set(_with_gradient(dump, result)) for result, still in unmoved_weights)
    if unmoved_weights and whole and len(unmoved_weights) == len(judged) > 1:
        text = f"the optimizer's step changed none of the {len(unmoved_weights)} weights, whose gradients are not zero"
        ranks = tuple(sorted({rank for _, still in unmoved_weights for rank in still}))
        yield OptimizerOfOtherParameters().finding("", ranks, text)
        return
    skipping = _skipping(dump, judged, {comparison.name: still for comparison, still in unmoved_weights})
    if skipping:
        text = f"the optimizer's step changed no weight on {named_ranks(skipping, MAX_LISTED)}, and all on the others"
        for result, still in unmoved_weights:
            yield result.finding(StepSkippedByRank(on_some=True), text, still, kind="write-not-applied")
        return
    for comparison, still in unmoved_weights:
        text = f"the optimizer's step did not change it{_where(comparison, still)}, though its gradient is not zero"
        yield comparison.finding(StepNotKept(is_sent), text, still)


def _skipping(dump: Dump, weights: Sequence[Compared], unmoved: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks on which no weight changed, if all did on the others, which have parts of the same weights."""
    holders = [set(_with_gradient(dump, result)) for result in weights]
    still = [set(unmoved.get(result.name, ())) for result in weights]
    stepping = set().union(*(held - idle for held, idle in zip(holders, still, strict=True)))
    skipping = set().union(*holders) - stepping
    is_shared = any(held & skipping and held - skipping for held in holders)
    return tuple(sorted(skipping)) if is_shared and all(idle <= skipping for idle in still) else ()


def _still(dump: Dump, comparison: Compared, *, is_sent: bool) -> tuple[int, ...]:
    """Return the ranks with a gradient on which a weight is what it was, unless the unsharded model's is, too.

    Where ranks send weights to each other, the unsharded model's are overwritten by the same mistake.
    """
    moved = None if is_sent else _moved(dump, comparison)
    return tuple(
        rank
        for rank in _with_gradient(dump, comparison)
        if np.array_equal(comparison.values[rank], comparison.wanted_of(rank))
        and (moved is None or np.any(comparison.part(moved, rank)))
    )


def _with_gradient(dump: Dump, comparison: Compared) -> tuple[int, ...]:
    gradient = dump.find("reference", "grad", comparison.name)
    if gradient is None:
        return ()
    sizes = np.abs(dump.values(gradient.first, comparison.name))
    least = SINGLE * comparison.rounding.size
    return tuple(rank for rank in comparison.values if np.max(comparison.part(sizes, rank), initial=0.0) > least)


def _where(result: Compared, ranks: Sequence[int]) -> str:
    return "" if len(ranks) == len(result.values) else f" on {named_ranks(ranks, MAX_LISTED)}"
