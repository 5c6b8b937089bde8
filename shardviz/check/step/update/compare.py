"""Weights, optimizer state and buffers after the step, compared with the unsharded model's.

`wrong-value` if they are not the same: a state taken from another rank's shard, moments in another order, another
learning rate, weight decay of another group. `unreplicated` if each rank keeps a buffer of its own.

Adam divides a gradient by its own size, so that a gradient of nearly zero moves a weight by as much as any other, in
either direction: elements whose gradient is lost in rounding are left out. Buffers (running statistics) are compared
if no axis splits the batch; if one does, each rank rightly has the statistics of its own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.report import NotChecked, Place
from shardviz.check.step.comparison import (
    Compared,
    Reason,
    compared,
    in_order,
    laid_out,
    rounding_of,
    weight_of,
    whole_of,
)
from shardviz.check.step.evidence import Evidence
from shardviz.check.step.rules.all_gradients import multiplied
from shardviz.check.step.rules.factors import size_in_words
from shardviz.check.step.update.reasons import factor_to, unexplained_weight, why_weight
from shardviz.check.step.update.states import of_others, other_average, share_added, unexplained_state, why_state
from shardviz.explain.finding import Finding
from shardviz.explain.step.buffers import (
    BufferCutApart,
    BufferOfParts,
    BufferReducedWrongly,
    FunctionBeforeReduction,
    OwnBufferRead,
    RepeatedCount,
    UnexplainedBuffer,
    UnreducedStatistics,
)
from shardviz.explain.step.scales import NotFiniteAfterStep
from shardviz.explain.step.update import AnotherGroup
from shardviz.explain.templates import number
from shardviz.relate.measures import owner_of, ratio_of
from shardviz.relate.tolerance import (
    BEYOND,
    EPSILON,
    FEW,
    MANY,
    ROUNDINGS_OF_ONE,
    ROUNDINGS_OF_STEP,
    SINGLE,
    STEP,
    TELLING,
)
from shardviz.relate.values import error_of, magnitude

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause

ADDED = "sum of what ranks add"
"""How buffers reduce to the unsharded model's that keep a share of their old value."""

OF_WEIGHTS = ("lr", "initial_lr")
"""Options of an optimizer that no state of it depends on."""

WHAT = {"optim": "the optimizer's state", "param": "the weight", "buffer": "the buffer"}
"""What is compared, causes before what comes of them."""


def check_unsharded_update(
    dump: Dump, judged: frozenset[str], told_right: dict[Place, bool]
) -> Iterator[Finding | NotChecked]:
    """Yield what differs from the unsharded model after the optimizer's step.

    Args:
        judged: Names that already have a finding or a note; the empty one stands for all.
        told_right: Gets what was compared, and whether it is right (`Report.compared`).
    """
    if "" in judged:
        return
    evidence = Evidence(dump, tuple(compared(dump)))
    all_alike = multiplied(evidence)
    if all_alike is not None and all_alike.clipped_to:
        why = "the weights after the optimizer's step: they were stepped by gradients that the step had clipped"
        yield NotChecked("", why, "step")
        return
    rounding = rounding_of(dump)
    splitting = tuple(axis for axis, is_batch in (evidence.batch or {}).items() if is_batch)
    settled, are_weights_right = set(judged), True
    for role in WHAT:
        for name, tensor in dump.by_name("step", role).items():
            reference = dump.find("updated", role, name)
            weight, is_complex = weight_of(role, name), tensor.dtype.startswith("complex")  # a dump has pairs of it
            if reference is not None and weight not in settled and not is_complex:
                expected = dump.values(reference.first, name)
                comparison = laid_out(dump, tensor, name, expected, rounding)
                findings = list(_check(evidence, comparison, splitting, are_weights_right=are_weights_right))
                yield from (one.seen_in(comparison) if isinstance(one, Finding) else one for one in findings)
                if not any(isinstance(finding, NotChecked) for finding in findings):
                    told_right[Place("step", tensor.role, name)] = not findings
                settled |= {weight} if findings and not comparison.incomparable else set()
                are_weights_right &= role == "buffer" or not any(isinstance(one, Finding) for one in findings)
    yield from _not_kept(dump, settled)


def _not_kept(dump: Dump, settled: Collection[str]) -> Iterator[NotChecked]:
    """Yield states that the unsharded model's optimizer keeps of a weight, and no rank of the sharded one."""
    weights, states = dump.by_name("step", "param").keys() - set(settled), dump.by_name("step", "optim")
    for name in dump.by_name("updated", "optim"):
        if weight_of("optim", name) in weights and name not in states:
            yield NotChecked(name, "the optimizer's state after the step: no rank has it", "step")


def _check(
    evidence: Evidence, comparison: Compared, splitting: tuple[str, ...], *, are_weights_right: bool
) -> Iterator[Finding | NotChecked]:
    dump, what = evidence.dump, WHAT[comparison.role]
    if comparison.incomparable:
        yield NotChecked(comparison.name, f"{what} after the step: {comparison.incomparable}", "step")
        return
    if comparison.role == "param" and _before(dump, comparison) is None:
        yield NotChecked(comparison.name, f"{what} after the step: its value before the step was not captured", "step")
        return
    wrong = {rank: far for rank in comparison.reduced if (far := _distance(evidence, comparison, rank)) is not None}
    if not wrong:
        if _is_lost(evidence, comparison) and (of_group := _of_another_group(dump, comparison)) is not None:
            sentence = f"{what} is not the unsharded model's after the step"
            yield comparison.finding(of_group, sentence, tuple(sorted(comparison.reduced)))
        elif _is_lost(evidence, comparison):
            why = "it differs, and its gradient is so small compared with others that it may be rounding alone"
            yield NotChecked(comparison.name, f"{what} after the step: {why}", "step")
        return
    of_weight = other_average(dump, comparison, sorted(wrong)) if comparison.role == "buffer" else None
    if comparison.role == "buffer" and splitting and of_weight is None and not _times_counted(comparison):
        if odd_axes := [axis for axis in comparison.copies_differ_along if axis not in splitting]:
            along = " and ".join(odd_axes)
            sentence = f"copies of the buffer differ along {along} after the step, and all ranks see the same rows"
            yield _of_copies(comparison, BufferOfParts(along), sentence, along)
            return
        along = " and ".join(axis for axis in comparison.copies_differ_along if axis in splitting)
        if along and is_read_by_forward(dump, comparison.name):
            sentence = f"each rank along {along} has its own value after the step, and the model's output depends on it"
            yield _of_copies(comparison, OwnBufferRead(along), sentence, along)
            return
        if not comparison.copies_differ_along and is_read_by_forward(dump, comparison.name) and len(wrong) > 1:
            if not are_weights_right:
                why = "it may be made of weights that are not the unsharded model's after the step"
                yield NotChecked(comparison.name, f"{what} after the step: {why}", "step")
                return
            sentence = "all ranks have the same values after the step, which are not the unsharded model's"
            cause = _scaled(dump, comparison) or FunctionBeforeReduction(" and ".join(splitting))
            yield comparison.finding(cause, sentence, tuple(sorted(wrong)))
            return
        is_saved = not any(comparison.name in record.not_saved for record in dump.files.ranks.values())
        reduction = _reduction(comparison, splitting) or _sum_of_added(dump, comparison, splitting)
        if is_saved and reduction:
            yield _not_reduced(comparison, *reduction)
            return
        parts = f"each rank's is of its own part of the batch, which {', '.join(splitting)} splits"
        why = parts if is_saved else f"{parts}, and no checkpoint has it"
        yield NotChecked(comparison.name, f"{what} after the step: {why}", "step")
        return
    yield finding_of(evidence, comparison, wrong)


def _scaled(dump: Dump, comparison: Compared) -> BufferReducedWrongly | None:
    """Return the cause if what the step adds to a buffer is the unsharded model's times a size of the mesh."""
    mesh = comparison.mesh
    old, held = whole_of(dump, "buffer", comparison.name), next(iter(comparison.reduced.values()))
    added = share_added(held, comparison.wanted, old, mesh, STEP)
    if added is None or error_of(added[1].ravel(), held.ravel()) > STEP:
        return None
    return BufferReducedWrongly(size_in_words(mesh, added[0]), is_too_large=added[0] > 1)


def _of_copies(comparison: Compared, cause: Cause, sentence: str, along: str, **others: Any) -> Finding:
    """Return the finding of a buffer of which ranks along some axes have copies that differ."""
    held = f"different values along {along}"
    return comparison.finding(cause, sentence, tuple(sorted(comparison.reduced)), held=held, **others)


def _reduction(comparison: Compared, splitting: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the reduction over axes of the batch that makes all buffers right; unnamed if that may be chance."""
    axes = tuple(axis for axis in splitting if axis in comparison.copies_differ_along)
    first, *others = comparison.reduced.values()
    num_apart = max((np.count_nonzero(other != first) for other in others if other.shape == first.shape), default=0)
    for op in ("max", "min", "avg", "sum") if axes else ():
        values = comparison.over(axes, op)
        if values and all(comparison.is_right(rank, value) for rank, value in values.items()):
            is_chance = op in ("max", "min") and num_apart <= FEW and comparison.wanted.size > 1
            return "" if is_chance else op, axes
    return None


def _sum_of_added(dump: Dump, comparison: Compared, splitting: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return that the buffer is a share of its old value and what rows add, of which each rank adds only its own.

    The sum over ranks counts the old value once for each of them: what is left of it is a multiple of the old value.
    """
    old = whole_of(dump, "buffer", comparison.name)
    axes = tuple(axis for axis in splitting if axis in comparison.copies_differ_along)
    held = list(comparison.reduced.values())
    if old is None or not axes or {old.shape} != {comparison.wanted.shape, *(values.shape for values in held)}:
        return None
    num_apart = max(np.count_nonzero(values != held[0]) for values in held)
    if num_apart < FEW or np.count_nonzero(old) < FEW:
        return None
    total = comparison.over(axes, "sum")
    factors = [factor_to(values - comparison.wanted, old) for values in total.values()]
    return (ADDED, axes) if factors and all(factors) else None


def _not_reduced(comparison: Compared, op: str, axes: Sequence[str]) -> Finding:
    along = " and ".join(axes)
    sentence = f"each rank along {along} has its own value after the step"
    if op == ADDED:
        op, sentence = "sum", f"{sentence}; with the sum over {along} of what ranks add, it is the unsharded model's"
    elif op:
        sentence += f"; the {op} over {along} is the unsharded model's"
    return _of_copies(comparison, UnreducedStatistics(along, op), sentence, along, severity="warning")


def is_read_by_forward(dump: Dump, buffer: str) -> bool:
    """Whether the forward reads a buffer in training, and nothing makes the copies equal before the next forward."""
    records = dump.files.ranks.values()
    wrappers = [wrapper for record in records for wrapper in record.wrappers or ()]
    is_sent_again = any(one.kind not in ("fsdp", "zero", "bypassed") and not one.keeps_buffers for one in wrappers)
    return not is_sent_again and any(buffer in record.read_buffers for record in records)


def _distance(evidence: Evidence, comparison: Compared, rank: int) -> tuple[float, float] | None:
    """Return the element of a rank that is farthest off, and what it should be; None if all are right."""
    values, expected, off = comparison.reduced[rank], comparison.wanted_of(rank), _beyond(evidence, comparison, rank)
    if comparison.role != "buffer":
        off = np.where(_telling(evidence, comparison, rank), off, -1.0)
    if comparison.role == "optim":  # as a weight's step: what gradients are clipped by has a small constant in it
        off = np.where(off > STEP * magnitude(comparison.wanted), off, -1.0)
    if not (off > 0).any():
        return None
    at = np.unravel_index(np.argmax(off), off.shape)
    return float(values[at]), float(expected[at])


def _beyond(evidence: Evidence, comparison: Compared, rank: int) -> NDArray[np.float64]:
    """Return how far each element of a rank is off; -1 for those within what rounding allows, infinity for NaN."""
    expected = comparison.wanted_of(rank)
    allowed = comparison.rounding.tolerance(comparison.wanted, gradient=comparison.role == "optim")
    before = _before(evidence.dump, comparison)
    if comparison.role == "buffer":
        allowed = max(allowed, _noise_of_buffer(evidence.dump, comparison))
    if before is not None:
        moved = magnitude(expected - comparison.part(before, rank))
        rounded = ROUNDINGS_OF_STEP * comparison.rounding.epsilon
        allowed += max(max(STEP, rounded) * moved, rounded * evidence.largest_step)
    off = np.abs(comparison.reduced[rank] - expected)
    return np.where(off <= allowed, -1.0, np.nan_to_num(off, nan=np.inf))


def _noise_of_buffer(dump: Dump, comparison: Compared) -> float:
    """Return what sums leave that cancel to a buffer, as a mean of what is normalized; 0 if it is larger than that.

    The buffers of a module are of the same activations, so the largest of them says how large those are.
    """
    module = comparison.name.rpartition(".")[0]
    floats = [
        dump.values(tensor.first, name)
        for name, tensor in dump.by_name("updated", "buffer").items()
        if "float" in tensor.first.body.dtype and name.rpartition(".")[0] == module
    ]
    size = max(map(magnitude, floats), default=0.0)
    noise = ROUNDINGS_OF_ONE * min(comparison.rounding.epsilon, EPSILON["float32"]) * size
    return noise if magnitude(comparison.wanted) <= noise else 0.0


def _before(dump: Dump, comparison: Compared) -> NDArray[np.float64] | None:
    """Return what a weight was before the step; None for all else, and if it was not captured."""
    before = whole_of(dump, "param", comparison.name) if comparison.role == "param" else None
    return None if before is None else in_order(dump, "param", comparison.name, before)


def _is_lost(evidence: Evidence, comparison: Compared) -> bool:
    """Whether a rank has elements that are off, and all gradients of its part may be rounding alone."""
    return comparison.role != "buffer" and any(
        (_beyond(evidence, comparison, rank) > 0).any() and not _telling(evidence, comparison, rank).any()
        for rank in comparison.reduced
    )


def _telling(evidence: Evidence, comparison: Compared, rank: int) -> NDArray[np.bool_]:
    """Return which elements show an error: those whose gradient is not lost in rounding, or is zero in both models.

    An element that is not finite shows it whatever its gradient is, and so does one that is farther off than two
    steps take it apart, or farther by far than its gradient may be, each relative to its size.
    """
    dump, name = evidence.dump, weight_of(comparison.role, comparison.name)
    gradient = whole_of(dump, "grad", name)
    whole = in_order(dump, "grad", name, gradient) if gradient is not None else None
    if whole is None or whole.size != comparison.wanted.size:
        return np.ones(comparison.reduced[rank].shape, bool)
    sizes, is_zero = np.abs(comparison.part(whole, rank)), whole == 0
    held = evidence.gradients.get(name)
    if is_zero.any() and held is not None and held.wanted.size == whole.size:
        is_zero = is_zero & ~_is_touched(held).reshape(whole.shape)
    noise = comparison.rounding.tolerance(whole, gradient=True)
    after, wanted = comparison.reduced[rank], comparison.wanted_of(rank)
    is_large = (sizes > TELLING * noise) | (
        np.abs(after - wanted) * sizes > BEYOND * noise * _change(dump, comparison, rank)
    )
    is_far = ~np.isfinite(after) & np.isfinite(wanted)
    if comparison.role == "param":
        farthest = 2 * evidence.largest_step + comparison.rounding.tolerance(comparison.wanted, gradient=False)
        is_far |= np.abs(after - wanted) > farthest
    telling: NDArray[np.bool_] = is_large | comparison.part(is_zero, rank) | is_far
    return telling


def _change(dump: Dump, comparison: Compared, rank: int) -> float:
    """Return by how much the step changes a rank's weight at most; how large a state is; infinity if not known."""
    if comparison.role == "optim":
        return magnitude(comparison.wanted)
    before = _before(dump, comparison)
    expected = comparison.wanted_of(rank)
    return float("inf") if before is None else magnitude(expected - comparison.part(before, rank))


def _is_touched(gradient: Compared) -> NDArray[np.bool_]:
    """Return which elements of a gradient are not exactly zero on some rank: terms that cancel leave their rounding."""
    touched = np.zeros(gradient.wanted.size, bool)
    for rank, held in gradient.reduced.items():
        touched[gradient.regions[rank].flat_ids(gradient.wanted.shape).ravel()] |= held.ravel() != 0
    return touched


def finding_of(evidence: Evidence, comparison: Compared, wrong: Mapping[int, tuple[float, float]]) -> Finding:
    """Return the finding that a weight, state or buffer differs after the step.

    Args:
        wrong: By rank, the element that is farthest off, and what it should be.
    """
    ranks = tuple(sorted(wrong))
    held, expected = wrong[ranks[0]]
    texts = (number(held), number(expected)) if number(held) != number(expected) else (f"{held:.9g}", f"{expected:.9g}")
    off = f"rank {ranks[0]} has {texts[0]} instead of {texts[1]}"
    if not np.isfinite(held) and np.isfinite(expected) and comparison.role != "buffer":
        spoiled = sum(np.count_nonzero(~np.isfinite(comparison.reduced[rank])) for rank in ranks)
        sentence = (
            f"{spoiled:,} {'element is' if spoiled == 1 else 'elements are'} nan or infinite after the step; {off}"
        )
        return comparison.finding(NotFiniteAfterStep(), sentence, ranks, kind="wrong-value")
    if why := _why(evidence, comparison, ranks):
        return comparison.finding(why.explanation, f"{why.clause}; {off}", ranks, kind="wrong-value")
    is_state = comparison.role == "optim"
    general = unexplained_state(evidence, comparison) if is_state else unexplained_weight(evidence, comparison, ranks)
    where = f"on {len(ranks):,} of {len(comparison.reduced):,} ranks"
    text = f"{WHAT[comparison.role]} is not the unsharded model's after the step {where}"
    return comparison.finding(general, f"{text}: {off}", ranks, kind="wrong-value", generic=True)


def _why(evidence: Evidence, comparison: Compared, ranks: tuple[int, ...]) -> Reason | None:
    """Return the most likely cause, by what ranks hold instead; None if nothing fits."""
    if comparison.role == "buffer":
        times = _times_counted(comparison)
        if times:
            return Reason(RepeatedCount(times), f"the buffer is {times} times the unsharded model's after the step")
        of_weight = _cut_apart(evidence.dump, comparison) or other_average(evidence.dump, comparison, ranks)
        if of_weight is not None:
            return of_weight
        return Reason(UnexplainedBuffer(), "the buffer is not the unsharded model's after the step")
    others = {rank: owner_of(comparison, rank) for rank in ranks}
    if all(other is not None for other in others.values()):
        return of_others({rank: other for rank, other in others.items() if other is not None})
    if (of_group := _of_another_group(evidence.dump, comparison)) is not None:
        return Reason(of_group, f"{WHAT[comparison.role]} is not the unsharded model's after the step")
    if comparison.role != "optim":
        return why_weight(evidence, comparison)
    return why_state(evidence, comparison, ranks)


def _cut_apart(dump: Dump, comparison: Compared) -> Reason | None:
    """Return that a buffer averages a weight of whose whole the rank has other elements in the same places."""
    before = whole_of(dump, "buffer", comparison.name)
    if before is None:
        return None
    for weight, whole in dump.by_name("updated", "param").items():
        tensor = dump.find("step", "param", weight)
        if tensor is None or whole.shape != comparison.wanted.shape or before.shape != comparison.wanted.shape:
            continue
        other = laid_out(dump, tensor, weight, comparison.wanted, comparison.rounding)
        if other.regions == comparison.regions or other.values.keys() != comparison.values.keys():
            continue
        parts = {rank: (comparison.part(before, rank), held) for rank, held in other.values.items()}
        if all(_is_mean(comparison.values[rank], *sides) for rank, sides in parts.items()):
            what = f"after the step each element of the buffer is an average of its own and one of {weight}"
            return Reason(BufferCutApart(comparison.name, weight), f"{what} that stands elsewhere in the whole")
    return None


def _is_mean(values: NDArray[np.float64], *parts: NDArray[np.float64]) -> bool:
    """Whether values are some multiples of others, added up."""
    if values.size < MANY or any(part.shape != values.shape for part in parts):
        return False
    columns = np.stack([part.ravel() for part in parts], axis=1)
    shares, *_ = np.linalg.lstsq(columns, values.ravel(), rcond=None)
    return float(np.min(np.abs(shares))) > SINGLE and error_of((columns @ shares).reshape(values.shape), values) <= STEP


def _of_another_group(dump: Dump, comparison: Compared) -> AnotherGroup | None:
    """Return the cause if a weight is stepped with other options, and not all weights are with the same ones.

    The groups themselves have the unsharded optimizer's options then.
    """
    settings = {setting for record in dump.files.ranks.values() for setting in record.other_settings}
    by_name: dict[str, dict[tuple[str, str, str], None]] = {}
    for record in dump.files.ranks.values():
        for name, option, value, wanted in record.other_options:
            is_of_group = any(setting.startswith(f"{option} of group") for setting in settings)
            if not is_of_group and (comparison.role == "param" or option not in OF_WEIGHTS):
                by_name.setdefault(name, {})[option, value, wanted] = None
    options = by_name.get(weight_of(comparison.role, comparison.name), {})
    if not options or all(by_name.get(name) == options for name in dump.by_name("updated", "param")):
        return None
    return AnotherGroup(tuple(f"{option} {value} instead of {wanted}" for option, value, wanted in options))


def _times_counted(comparison: Compared) -> int:
    """Return the whole number by which every rank's buffer is a multiple; 0 if it isn't."""
    ratio = ratio_of(comparison) if comparison.wanted.size and np.ptp(comparison.wanted) else None
    return ratio.numerator if ratio is not None and ratio > 1 and ratio.denominator == 1 else 0
