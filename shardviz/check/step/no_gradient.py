"""Parameters whose gradient is None after the sharded step, and those whose gradient is zero in every element.

Three rules for `.grad` that is None if the unsharded model has a gradient: on some ranks only; on every rank,
because nothing flows back to it; on every rank, because FSDP keeps it for a later backward, which is right until an
optimizer steps without it. A gradient of zeros may as well be None, and a step that leaves no gradient at all has
cleared them.

In gradients that are zero in the unsharded model's step, too, a reduction that is missing does not show. So is that of
one LoRA matrix as long as the other is zero, and that of all behind a scale that starts at zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.explain.gradients import CutGraph, GradientOnSomeRanks, ReductionSwitchedOff
from shardviz.text import folded_names, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding

MAX_LISTED = 8
MOST_ZERO = 4
"""Parameters that are named whose gradient is zero throughout."""

NONE_ANYWHERE = "its gradient: .grad is None on every rank after the step"


def check_no_gradient(evidence: Evidence) -> Iterator[Finding | NotChecked]:
    """Yield what is known of parameters without a gradient, on some ranks or on all."""
    dump = evidence.dump
    for finding in check_absent_gradients(dump):
        one = evidence.gradients.get(finding.tensor)
        yield finding.seen_in(one) if one is not None else finding
    absent = list(evidence.without_gradient)
    kept = {name for record in dump.files.ranks.values() for name in record.held_back}
    held_back = [name for name in absent if name in kept]
    yield from _held_back(dump, held_back)
    rest = [name for name in absent if name not in kept]
    cut = [name for name in rest if _is_due(dump, name) and _holders(dump, name)]
    is_judged = bool(evidence.gradients) and not any(
        one.wrong for one in evidence.results if one.role == "output" or one.name == "loss" if not one.incomparable
    )
    if cut and is_judged:
        yield _cut(dump, cut)
        rest = [name for name in rest if name not in cut]
    yield from (NotChecked(name, NONE_ANYWHERE, "step") for name in rest)


def check_absent_gradients(dump: Dump) -> Iterator[Finding]:
    """Yield parameters that have a gradient on some ranks and none on others that hold a part of them."""
    gradients = [tensor for tensor in dump.at("step") if tensor.role == "grad"]
    pairs = [(tensor, name) for tensor in gradients for name in tensor.names]
    for tensor, name in pairs:
        absent = _without(dump, tensor, name)
        if absent and _is_due(dump, name):
            yield _absent(name, absent, len(tensor.shards))


def _absent(name: str, absent: tuple[int, ...], num_present: int) -> Finding:
    return GradientOnSomeRanks().finding(
        name,
        absent,
        f"{len(absent):,} of {len(absent) + num_present:,} ranks that hold it have no gradient after the step (.grad "
        f"is None): {named_ranks(absent, MAX_LISTED)}",
    )


def _without(dump: Dump, gradient: Tensor, name: str) -> tuple[int, ...]:
    """Return the ranks that hold elements of a weight and have no gradient of it."""
    return tuple(rank for rank in _holders(dump, name) if rank not in gradient.shards and rank in dump.files.ranks)


def _holders(dump: Dump, name: str) -> tuple[int, ...]:
    """Return the ranks that hold elements of a weight."""
    weight = dump.find("initial", "param", name) or dump.find("stamped", "param", name)
    if weight is None:
        return ()
    return tuple(rank for rank, shard in weight.shards.items() if math.prod(shard.body.local_shape))


def _is_due(dump: Dump, name: str) -> bool:
    """Whether the unsharded model has a gradient that is not zero everywhere; or none is known."""
    gradient = dump.find("reference", "grad", name)
    return gradient is None or bool(np.any(dump.values(gradient.first, name)))


def _held_back(dump: Dump, names: Sequence[str]) -> Iterator[Finding | NotChecked]:
    if not names:
        return
    if not any(tensor.role == "param" for tensor in dump.at("step")):
        why = "its gradient: FSDP keeps it for a later backward (set_requires_gradient_sync or set_requires_all_reduce)"
        yield from (NotChecked(name, why, "step") for name in names)
        return
    yield ReductionSwitchedOff().finding(
        names[0],
        _holders(dump, names[0]),
        f"the optimizer steps while .grad is None on every rank{_others(names)}: FSDP holds the gradient back",
    )


def _others(names: Sequence[str]) -> str:
    others = names[1:]
    if not others:
        return ""
    return f", as it is for {len(others)} other{'s' * (len(others) > 1)} ({listed(others, MAX_LISTED)})"


def _cut(dump: Dump, names: Sequence[str]) -> Finding:
    return CutGraph().finding(
        names[0],
        _holders(dump, names[0]),
        f"no rank has a gradient of it after the step (.grad is None){_others(names)}, and the unsharded model has",
    )


def check_zero_gradients(dump: Dump, earlier: Sequence[Finding]) -> Iterator[NotChecked]:
    """Report once the parameters whose gradient shows nothing on several ranks, without those of earlier findings."""
    earlier_names = {finding.tensor for finding in earlier}
    gradients = [tensor for tensor in dump.at("reference") if tensor.role == "grad"]
    names = [
        name
        for tensor in gradients
        for name in tensor.names
        if name not in earlier_names and _on_several(dump, name) and not np.any(dump.values(tensor.first, name))
    ]
    if names:
        whose = folded_names(names, MOST_ZERO)
        text = "'s gradient: it is" if len(names) == 1 else f": their {len(names)} gradients are"
        why = f"{whose}{text} zero in every element, so a missing or repeated reduction would not show"
        yield NotChecked("", why, "step")


def _on_several(dump: Dump, name: str) -> bool:
    """Whether several ranks have a gradient of this name after the step."""
    gradient = dump.find("step", "grad", name)
    return gradient is not None and len(gradient.shards) > 1
