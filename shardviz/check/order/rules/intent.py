"""`wrong-segment`, and other differences between held, or planned, and intended layouts.

The run names layouts by patterns over names (`expect` in a probe). A tensor that is labeled and held alike can still be
split across the segments that the model reads: a fused q,k,v wants `[24/3/tp, 8]`, and `[24/tp, 8]` gives a rank the
rows of q and half of k. A difference in segments is `wrong-segment`; any other is `wrong-placement`, because the label
is not the one that was meant. A pattern that fits no weight is about an optimizer's states: `*.exp_avg`.

A plan has layouts, and no elements. Those that are not the intended ones are findings, and so are shapes that the
placements of a rank that was asked do not give. Where elements really go no plan shows, so that no tensor of one is
called in order.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shardviz.check.order.case import Case, Fit
from shardviz.check.order.infer.explain import explain
from shardviz.check.order.infer.layout import same_region
from shardviz.check.report import NotChecked
from shardviz.dump.dump import matches_pattern
from shardviz.errors import ShardvizError
from shardviz.explain.checkpoints.states import StateOfAnotherLayout
from shardviz.explain.placement.labels import (
    AnotherPlan,
    FusedWeightSplit,
    OmittedByPlan,
    SplitAgainstIntent,
    UnevenPlan,
)
from shardviz.layout.notation import DimOrder, Pattern, order_between, parse_intended, split_order, write
from shardviz.layout.placements import spell
from shardviz.layout.splits import JOIN, axes_in, numbers_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding, Kind
    from shardviz.layout.layout import Layout


def intended_text(intended: Mapping[str, str], name: str) -> str:
    """Return the layout expected for a name, in the notation; empty if there is none."""
    return next((text for pattern, text in intended.items() if matches_pattern(name, pattern)), "")


def unmatched(dump: Dump, of_states: Mapping[str, str]) -> Iterator[NotChecked]:
    """Yield the expected patterns that match no tensor's name; optimizer states' are exempt."""
    for pattern in dump.files.run.intended if dump.stamped else ():
        if pattern not in of_states and not any(matches_pattern(name, pattern) for name in dump.stamped):
            yield NotChecked("", f"the layout expected for {pattern!r}: no tensor has that name", "run")


def order_of(dump: Dump, name: str) -> DimOrder | None:
    """Return a dim's expected order; None if it is the usual one or does not fit."""
    text = intended_text(dump.files.run.intended, name) if dump.files.run.intended else ""
    stamp, stamped = dump.stamps.get(name), dump.stamped.get(name)
    order = split_order(text if stamped is None else with_order(stamped, text))[1]
    return order if order is not None and stamp is not None and order.fits(stamp.shape) else None


def with_order(tensor: Tensor, text: str) -> str:
    """Return an intention as an order of what is claimed, if it is what ranks hold and placements claim otherwise."""
    if not text or tensor.claimed is None or split_order(text)[1] is not None:
        return text
    pattern = parse_intended(text)
    if pattern.flat or not pattern.fits_shape(tensor.claimed.tensor_shape) or pattern.matches(tensor.claimed):
        return text
    intended = pattern.layout(tensor.claimed.mesh, tensor.claimed.tensor_shape)
    held = {rank: shard.held for rank, shard in tensor.shards.items()}
    is_held = all(
        region is not None and same_region(intended.region_of_rank(rank), region) for rank, region in held.items()
    )
    return (order_between(tensor.claimed, intended) if is_held else "") or text


def is_intended(tensor: Tensor, text: str) -> bool:
    """Whether a tensor that holds what it claims claims the intended layout, if there is one."""
    if not text:
        return True
    try:
        layout, order = split_order(text)
        return order is None and tensor.claimed is not None and parse_intended(layout).matches(tensor.claimed)
    except ShardvizError:
        return False


def check_intent(case: Case, text: str) -> Iterator[Finding]:
    """Yield the difference between what a case holds and the expected layout in `text`.

    Raises:
        ShardvizError: The text is not a layout, or does not fit the tensor or its mesh.
    """
    pattern = parse_intended(text)
    if case.claimed is not None and pattern.matches(case.claimed):
        return
    intended = _layout(case, pattern)
    wrong = [
        shard.rank
        for coord, shard in case.shards.items()
        if coord not in case.regions or not same_region(intended.region(coord), case.regions[coord])
    ]
    if not wrong and (case.claimed is None or set(case.claimed.partial) == set(intended.partial)):
        return
    held = write(case.held) if case.held is not None else "no layout of the notation"
    numbers = [numbers_in(chain) for chain in intended.chains]
    held_numbers = [numbers_in(chain) for chain in case.held.chains] if case.held is not None else []
    kind: Kind = "wrong-segment" if any(numbers) and numbers != held_numbers else "wrong-placement"
    fit = _fit(case, intended, kind, held)
    finding = case.finding(
        fit.cause,
        wrong,
        f"{len(wrong):,} of {len(case.shards):,} ranks do not hold the intended elements{fit.clause}",
        kind=kind,
        details=fit.details,
        held=held,
        intended=text,
    )
    yield finding if isinstance(fit.cause, FusedWeightSplit) else replace(finding, refs=())


def wanted_layout(case: Case, text: str) -> Layout | None:
    """Return the layout that a text gives a case; None if it has an order or does not fit."""
    try:
        layout, order = split_order(text)
        return _layout(case, parse_intended(layout)) if order is None else None
    except ShardvizError:
        return None


def _fit(case: Case, intended: Layout, kind: Kind, held: str) -> Fit:
    """Return why a case is not held as wanted, and how the sentence ends."""
    if kind == "wrong-segment":
        return Fit(_segments_advice(intended), "", held)
    if case.held is None:
        return explain(replace(case, claimed=intended))[0]
    wanted_placements = intended.placements()
    placements = "" if wanted_placements is None else spell(wanted_placements)
    unsplit = [axis for axis in intended.split_axes if axis not in case.held.split_axes]
    if unsplit and not case.held.split_axes:
        text = f"every rank has all of it, nothing splits it over {' or '.join(unsplit)}"
        return Fit(OmittedByPlan(held, placements), text, held)
    if not intended.split_axes:
        return Fit(SplitAgainstIntent(held, placements), "", held)
    return Fit(AnotherPlan(held, placements), "", held)


def _segments_advice(intended: Layout) -> FusedWeightSplit:
    """Say how to split a fused dim's segments: FSDP2 and ColwiseParallel cannot."""
    dim, chain = next((dim, chain) for dim, chain in enumerate(intended.chains) if numbers_in(chain))
    count, axes = numbers_in(chain)[0], axes_in(chain)
    placements = intended.placements()
    if len(axes) == 1 and placements is not None:
        return FusedWeightSplit(count, spell(placements))
    chains = list(intended.chains)
    chains[dim] = (count, *axes[:-1], JOIN, axes[-1])
    return FusedWeightSplit(count, under_fsdp=write(replace(intended, chains=tuple(chains))))


def _layout(case: Case, pattern: Pattern) -> Layout:
    shape = case.tensor.shape if case.claimed is not None else case.shape
    if pattern.flat is None and not pattern.fits_shape(shape):
        raise ShardvizError(f"intended {pattern} does not fit the tensor's shape {list(shape)}")
    layout = pattern.layout(case.mesh, None if pattern.flat else shape)
    if layout.index_shape != case.shape:
        raise ShardvizError(
            f"intended {pattern} is not how the tensor is held: {case.claimed_text or list(case.shape)}"
        )
    return layout


def check_states(dump: Dump) -> Iterator[Finding]:
    """Yield the states whose layout is not the intended one."""
    patterns = of_states(dump)
    for name, tensor in dump.by_name("step", "optim").items() if patterns else ():
        text = next((text for pattern, text in patterns.items() if fnmatchcase(name, pattern)), "")
        if text and (finding := _compare(tensor, name, text)) is not None:
            yield finding


def of_states(dump: Dump) -> Mapping[str, str]:
    """Return the intentions that fit a state and no weight."""
    states = dump.by_name("step", "optim")
    return {
        pattern: text
        for pattern, text in dump.files.run.intended.items()
        if not any(fnmatchcase(name, pattern) for name in dump.stamped)
        and any(fnmatchcase(name, pattern) for name in states)
    }


def _compare(tensor: Tensor, name: str, text: str) -> Finding | None:
    intended = parse_intended(text)
    wrong = [shard for shard in tensor.shards.values() if not _fits(tensor, shard.rank, intended)]
    if not wrong:
        return None
    first = wrong[0]
    claimed = write(first.layout) if first.layout is not None else ""
    held = claimed or f"{list(first.body.local_shape)}, plain"
    return StateOfAnotherLayout().finding(
        name,
        tuple(sorted(shard.rank for shard in wrong)),
        f"the optimizer's state is {held} on {len(wrong):,} of {len(tensor.shards):,} ranks, not the intended {text}",
        claimed=claimed,
        held=held,
        intended=text,
    )


def _fits(tensor: Tensor, rank: int, intended: Pattern) -> bool:
    shard = tensor.shards[rank]
    if shard.layout is not None:
        return intended.matches(shard.layout)
    splits = any(intended.chains) or intended.partial or intended.flat
    return not splits and intended.fits_shape(shard.body.local_shape)


NO_VALUES = "a plan has no values, so it does not show where elements go"
AS_INTENDED = f"its layout is the intended one; {NO_VALUES}"


def check_planned(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield what a plan's layouts show."""
    for tensor in dump.at("initial"):
        shards: Any = tensor.shards
        wrong = [rank for rank in shards.asked if not _has_due_shape(tensor, rank)]
        for name in tensor.names:
            text = intended_text(dump.files.run.intended, name)
            if wrong:
                yield _shape_finding(tensor, name, wrong)
            if not is_intended(tensor, text):
                yield _layout_finding(tensor, name, text)
            elif not wrong:
                yield NotChecked(name, AS_INTENDED if text else NO_VALUES, "order")
    used = {name for tensor in dump.at("initial") for name in tensor.names}
    for pattern in dump.files.run.intended:
        if not any(intended_text({pattern: "x"}, name) for name in used):
            yield NotChecked("", f"the layout expected for {pattern!r}: no tensor has that name", "run")


def is_compared(dump: Dump) -> bool:
    """Whether a plan has a layout that somebody intended."""
    names = (name for tensor in dump.at("initial") for name in tensor.names)
    return any(intended_text(dump.files.run.intended, name) for name in names)


def _has_due_shape(tensor: Tensor, rank: int) -> bool:
    shard = tensor.shards[rank]
    return shard.layout is None or shard.layout.region_of_rank(rank).shape == shard.body.local_shape


def _shape_finding(tensor: Tensor, name: str, wrong: list[int]) -> Finding:
    shard = tensor.shards[wrong[0]]
    assert shard.layout is not None
    claimed = shard.layout.region_of_rank(shard.rank).shape
    actual, expected = list(shard.body.local_shape), list(claimed)
    what = f"rank {shard.rank} would hold {actual}, but its placements give {expected}"
    return UnevenPlan().finding(name, tuple(wrong), what, claimed=write(shard.layout))


def _layout_finding(tensor: Tensor, name: str, text: str) -> Finding:
    layout = write(tensor.claimed) if tensor.claimed else "no layout: every rank has a plain tensor"
    what = f"its planned layout is {layout}, not the intended {text}"
    return AnotherPlan(layout, is_planned=True).finding(name, tuple(tensor.shards), what, claimed=layout, intended=text)
