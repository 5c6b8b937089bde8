"""After the update of a probe's own optimizer: copies of a weight must still be equal, and what has a gradient moves.

`unreplicated` if copies that were equal before now differ; `write-not-applied` if a weight didn't change although its
gradient is not zero, or if an optimizer steps it on some ranks only or on none.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.comparison import Compared, apart_text, compared, laid_out, whole_of
from shardviz.check.step.update.reasons import factors_of_steps, rows_of_part, scaled
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
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

MAX_LISTED = 8


def check_update(dump: Dump, step: Sequence[Finding]) -> Iterator[Finding | NotChecked]:
    """Yield findings of the updated weights if the weights before the step are right."""
    tensors = dump.by_name("step", "param")
    if not tensors or not dump.at("reference"):
        return
    if step:
        first = f" ({step[0].tensor})" if step[0].tensor else ""
        why = f"the weights after the optimizer's step: it began with what is wrong{first}"
        yield NotChecked("", why, "step")
        return
    comparisons, arrived = [], _arrived(dump)
    stills = {_still(comparison) for comparison in compared(dump, ("param",)) if not comparison.incomparable}
    for comparison in compared(dump, ("param",)):
        idle = tuple(rank for rank in _still(comparison) if comparison.name in dump.files.ranks[rank].not_stepped)
        if comparison.incomparable:
            why = f"its value after the optimizer's step: {comparison.incomparable}"
            yield NotChecked(comparison.name, why, "step")
        elif idle and _is_meant_to_move(dump, comparison, idle):
            is_trained = bool(_with_gradient(dump, comparison))
            yield _left_out(comparison, idle, arrived) if is_trained else _not_written(comparison, idle)
        elif comparison.copies_differ_along:
            yield with_copies(_differing(dump, comparison, stills), dump, tensors[comparison.name])
        elif len(idle) < len(comparison.values):  # else it is left alone on purpose
            comparisons.append(comparison)
    yield from _check_moved(dump, comparisons)


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
    after = whole_of(dump, "param", comparison.name, "updated")
    if after is None or after.size != comparison.wanted.size:
        is_stepped = any(comparison.name not in dump.files.ranks[rank].not_stepped for rank in comparison.values)
        return is_stepped and any(comparison.values[rank].size for rank in idle)
    moved = after.ravel() != comparison.wanted.ravel()
    return any(np.any(comparison.part(moved, rank)) for rank in idle)


def _left_out(comparison: Compared, idle: tuple[int, ...], arrived: Mapping[int, str]) -> Finding:
    """Return the finding of a weight that some ranks do not step, or none."""
    everywhere = len(idle) == len(comparison.values)
    whose, others = "no rank's optimizer steps it", "the unsharded model's steps it"
    if not everywhere:
        whose, others = f"the optimizer does not step it{_where(comparison, idle)}", "the others step it"
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


def _still(comparison: Compared) -> tuple[int, ...]:
    """Return the ranks on which a weight is what it was before the step."""
    by_rank = comparison.values.items()
    return tuple(rank for rank, values in by_rank if np.array_equal(values, comparison.wanted_of(rank)))


def _differing(dump: Dump, comparison: Compared, stills: Collection[tuple[int, ...]]) -> Finding:
    """Return the finding of a weight whose copies differ; `stills` are where weights stayed."""
    axes = " and ".join(comparison.copies_differ_along)
    if still := _still(comparison):
        take_turns = any(rank not in other for other in stills for rank in still)
        cause: Cause = StepNotSent() if take_turns else StepSkippedByRank(on_some=True)
        moved = named_ranks(tuple(sorted(comparison.values.keys() - set(still))), MAX_LISTED)
        return _apart(
            comparison, cause, f": it is as it was before on {named_ranks(still, MAX_LISTED)}, not on {moved}"
        )
    factors = factors_of_steps(dump, comparison)
    if factors and max(factors.values()) - min(factors.values()) > EXPLAINED_UPDATE * max(map(abs, factors.values())):
        why = scaled(factors)
        return _apart(comparison, why.explanation, f": {why.clause}")
    states = listed(_differing_states(dump, comparison), MAX_LISTED)
    is_moved = all(np.any(values != comparison.wanted_of(rank)) for rank, values in comparison.values.items())
    return _apart(comparison, CopiesSteppedApart(axes, states, "every copy" if is_moved and not states else ""))


def _differing_states(dump: Dump, comparison: Compared) -> list[str]:
    """Return the kinds of state of a weight whose copies differ along the axes along which the weight's do."""
    kinds = []
    for name, tensor in dump.by_name("step", "optim").items():
        weight, _, kind = name.rpartition(".")
        updated = whole_of(dump, "optim", name, "updated") if weight == comparison.name else None
        if updated is not None:
            state = laid_out(dump, tensor, name, updated, comparison.rounding)
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
    trained = [(result, ranks) for result in weights if (ranks := _with_gradient(dump, result))]
    stills = [tuple(rank for rank in _still(result) if rank in ranks) for result, ranks in trained]
    if len(trained) > 1 and all(still == ranks for (_, ranks), still in zip(trained, stills, strict=True)):
        text = f"the optimizer's step changed none of the {len(trained)} weights, whose gradients are not zero"
        yield OptimizerOfOtherParameters().finding("", tuple(sorted(set().union(*stills))), text)
        return
    unmoved = [(result, still) for (result, _), still in zip(trained, stills, strict=True) if still]
    if skipping := _skipping([ranks for _, ranks in trained], stills):
        text = f"the optimizer's step changed no weight on {named_ranks(skipping, MAX_LISTED)}, and all on the others"
        for result, still in unmoved:
            yield result.finding(StepSkippedByRank(on_some=True), text, still, kind="write-not-applied")
        return
    is_sent = any(call.op == "broadcast" for record in dump.files.ranks.values() for call in record.collectives)
    for comparison, still in unmoved:
        if (why := rows_of_part(dump, comparison)) is not None:
            yield comparison.finding(why.explanation, why.clause, still, kind="write-not-applied")
            continue
        text = f"the optimizer's step did not change it{_where(comparison, still)}, though its gradient is not zero"
        yield comparison.finding(StepNotKept(is_sent), text, still)


def _skipping(trained: Sequence[tuple[int, ...]], stills: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks on which no weight changed, if all did on the others, which have parts of the same weights."""
    pairs = [(set(ranks), set(still)) for ranks, still in zip(trained, stills, strict=True)]
    skipping = {rank for rank in chain(*stills) if all(rank in still for ranks, still in pairs if rank in ranks)}
    is_shared = any(ranks & skipping and ranks - skipping for ranks, _ in pairs)
    return tuple(sorted(skipping)) if is_shared and all(still <= skipping for _, still in pairs) else ()


def _with_gradient(dump: Dump, comparison: Compared) -> tuple[int, ...]:
    """Return the ranks whose part has a gradient and is changed by the unsharded model's optimizer.

    That changes no part of a weight that it leaves on every rank: an optimizer that deals weights out may know which
    rank it is on. Of others it may leave rows, as those whose gradient the code sets to zero before the step.
    """
    gradient = whole_of(dump, "grad", comparison.name)
    if gradient is None or all(comparison.name in dump.files.ranks[rank].not_due for rank in comparison.values):
        return ()
    sizes, least = np.abs(gradient), SINGLE * comparison.rounding.size
    after = whole_of(dump, "param", comparison.name, "updated")
    is_moved = after != comparison.wanted if after is not None and after.shape == comparison.wanted.shape else None
    if is_moved is not None and np.any(is_moved):
        sizes = np.where(is_moved, sizes, 0.0)
    return tuple(rank for rank in comparison.values if np.max(comparison.part(sizes, rank), initial=0.0) > least)


def _where(result: Compared, ranks: Sequence[int]) -> str:
    return "" if len(ranks) == len(result.values) else f" on {named_ranks(ranks, MAX_LISTED)}"
