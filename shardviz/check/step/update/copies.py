"""After the update of a probe's own optimizer: copies of a weight must still be equal, and what has a gradient moves.

`unreplicated` where copies that were equal before are not any more; `write-not-applied` where a weight is what it was,
though its gradient is not zero, and where an optimizer steps it on some ranks only or on none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.compared import compared, laid_out
from shardviz.check.step.update.reasons import factors_of_steps, scaled
from shardviz.check.step.words import apart_text, kind_of
from shardviz.check.values.copies import with_copies
from shardviz.explain.update import (
    AverageNotWritten,
    CopiesSteppedApart,
    LeftOutOfOptimizer,
    OptimizerOfOtherParameters,
    StepNotKept,
    StepNotSent,
)
from shardviz.relate.tolerance import EXPLAINED_UPDATE, SINGLE
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

MAX_LISTED = 8


def check_update(dump: Dump, step: Sequence[Finding]) -> Iterator[Finding | NotChecked]:
    """Yield what the weights show after the optimizer's step if those that it started from are right.

    Args:
        dump: The dump.
        step: What was found of the step: wrong gradients make other weights.
    """
    tensors = dump.by_name("step", "param")
    if not tensors or not dump.at("reference"):
        return
    if step:
        why = f"the weights after the optimizer's step: it began with what is wrong ({kind_of(step[0])})"
        yield NotChecked("", why, "step")
        return
    seen, arrived = [], _arrived(dump)
    for result in compared(dump, ("param",)):
        idle = _not_stepped_by(dump, result)
        if result.incomparable:
            yield NotChecked(result.name, f"its value after the optimizer's step: {result.incomparable}", "step")
        elif idle and _is_meant_to_move(dump, result, idle):
            is_trained = bool(_with_gradient(dump, result))
            yield _left_out(result, idle, arrived) if is_trained else _not_written(result, idle)
        elif result.copies_differ_along:
            yield with_copies(_differing(dump, result), dump, tensors[result.name])
        elif len(idle) < len(result.values):  # else it is left alone on purpose
            seen.append(result)
    yield from _check_moved(dump, seen)


def _not_stepped_by(dump: Dump, result: Compared) -> tuple[int, ...]:
    """Return the ranks whose optimizer has no group with a weight and on which it is what it was."""
    return tuple(
        rank
        for rank, values in result.values.items()
        if result.name in dump.files.ranks[rank].not_stepped and np.array_equal(values, result.wanted_of(rank))
    )


def _arrived(dump: Dump) -> Mapping[int, str]:
    """Return by rank a weight that its optimizer does not step, and that changed: another rank sent it."""
    arrived: dict[int, str] = {}
    for result in compared(dump, ("param",)):
        for rank, values in result.values.items() if not result.incomparable else ():
            if result.name in dump.files.ranks[rank].not_stepped and not np.array_equal(values, result.wanted_of(rank)):
                arrived.setdefault(rank, result.name)
    return arrived


def _is_meant_to_move(dump: Dump, result: Compared, idle: Sequence[int]) -> bool:
    """Whether the unsharded model's optimizer moves it; if that did not run, whether other ranks' do."""
    after = dump.find("updated", "param", result.name)
    if after is None:
        return any(result.name not in dump.files.ranks[rank].not_stepped for rank in result.values) and any(
            result.values[rank].size for rank in idle
        )
    moved = dump.values(after.first, result.name).ravel() != result.wanted.ravel()
    return any(np.any(result.part(moved, rank)) for rank in idle)


def _left_out(result: Compared, idle: tuple[int, ...], arrived: Mapping[int, str]) -> Finding:
    """Return the finding of a weight that some ranks do not step, or none."""
    everywhere = len(idle) == len(result.values)
    whose = "no rank's optimizer steps it" if everywhere else f"the optimizer does not step it{_where(result, idle)}"
    others = "the unsharded model's steps it" if everywhere else "the others step it"
    sentence = f"{whose}: it is not one of the tensors in param_groups there, or has a learning rate of 0, and {others}"
    if not everywhere and all(rank in arrived for rank in idle):
        where = named_ranks(idle, MAX_LISTED)
        sentence = f"{where} did not get it after the optimizer's step, and the others, which step it, have the result"
        return result.finding(StepNotSent(arrived[idle[0]]), sentence, idle)
    return result.finding(LeftOutOfOptimizer(), sentence, idle)


def _not_written(result: Compared, idle: tuple[int, ...]) -> Finding:
    """Return the finding of a weight without a gradient, which something else than the optimizer's groups writes."""
    return result.finding(
        AverageNotWritten(on_some=len(idle) < len(result.values)),
        f"it is as it was before the step{_where(result, idle)}, and the unsharded model's is not; "
        "it has no gradient and is in none of the optimizer's param_groups",
        idle,
    )


def _differing(dump: Dump, result: Compared) -> Finding:
    axes = " and ".join(result.copies_differ_along)
    factors = factors_of_steps(dump, result)
    if factors and max(factors.values()) - min(factors.values()) > EXPLAINED_UPDATE * max(map(abs, factors.values())):
        why = scaled(factors)
        return _apart(result, why.cause, f": {why.sentence}")
    return _apart(result, CopiesSteppedApart(axes, listed(_differing_states(dump, result), MAX_LISTED)))


def _differing_states(dump: Dump, result: Compared) -> list[str]:
    """Return the kinds of state of a weight whose copies differ along the axes along which the weight's do."""
    kinds = []
    for name, tensor in dump.by_name("step", "optim").items():
        weight, _, kind = name.rpartition(".")
        updated = dump.find("updated", "optim", name) if weight == result.name else None
        if updated is not None:
            state = laid_out(dump, tensor, name, dump.values(updated.first, name), result.rounding)
            if not state.incomparable and set(state.copies_differ_along) & set(result.copies_differ_along):
                kinds.append(kind)
    return kinds


def _apart(result: Compared, cause: Cause, clause: str = "") -> Finding:
    axes = " and ".join(result.copies_differ_along)
    pairs = result.pairs_of_copies
    low, high, worst = max(pairs, key=lambda pair: pair[2])
    return result.finding(
        cause,
        f"copies differ along {axes} after the optimizer's step: {apart_text(low, high, worst)}, "
        f"although their weights and gradients are equal{clause}",
        tuple(sorted({rank for pair in pairs if not pair[2] <= result.tolerance / 2 for rank in pair[:2]})),
        kind="unreplicated",
        held=f"different values along {axes}",
    )


def _check_moved(dump: Dump, weights: Sequence[Compared]) -> Iterator[Finding]:
    """Yield weights that did not change on ranks whose part of the gradient is not zero; one finding if all are."""
    unmoved_weights = [(result, still) for result in weights if (still := _still(dump, result))]
    judged = [result for result in weights if _with_gradient(dump, result)]
    whole = all(set(still) == set(_with_gradient(dump, result)) for result, still in unmoved_weights)
    if unmoved_weights and whole and len(unmoved_weights) == len(judged) > 1:
        text = f"the optimizer's step changed none of the {len(unmoved_weights)} weights, whose gradients are not zero"
        ranks = tuple(sorted({rank for _, still in unmoved_weights for rank in still}))
        yield OptimizerOfOtherParameters().finding("", ranks, text)
        return
    is_sent = any(call.op == "broadcast" for record in dump.files.ranks.values() for call in record.collectives)
    for result, still in unmoved_weights:
        text = f"the optimizer's step did not change it{_where(result, still)}, though its gradient is not zero"
        yield result.finding(StepNotKept(is_sent), text, still)


def _still(dump: Dump, result: Compared) -> tuple[int, ...]:
    """Return the ranks with a gradient on which a weight is what it was."""
    return tuple(
        rank for rank in _with_gradient(dump, result) if np.array_equal(result.values[rank], result.wanted_of(rank))
    )


def _with_gradient(dump: Dump, result: Compared) -> tuple[int, ...]:
    gradient = dump.find("reference", "grad", result.name)
    if gradient is None:
        return ()
    sizes = np.abs(dump.values(gradient.first, result.name))
    least = SINGLE * result.rounding.size
    return tuple(rank for rank in result.values if np.max(result.part(sizes, rank), initial=0.0) > least)


def _where(result: Compared, ranks: Sequence[int]) -> str:
    return "" if len(ranks) == len(result.values) else f" on {named_ranks(ranks, MAX_LISTED)}"
