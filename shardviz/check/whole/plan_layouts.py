"""A plan compared with its author's intentions: it has layouts, and no elements.

Layouts that are not the intended ones are findings, and so are shapes that the placements of a rank that was asked do
not give. Where elements really go no plan shows, so that no tensor of one is called in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardviz.check.order.rules.intent import intended_text, is_intended
from shardviz.check.report import NotChecked
from shardviz.explain.placement.labels import AnotherPlan, UnevenPlan
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding

NO_VALUES = "a plan has no values, so it does not show where elements go"
AS_INTENDED = f"its layout is the intended one; {NO_VALUES}"


def check_planned(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield what a plan's layouts show."""
    for tensor in dump.at("initial"):
        shards: Any = tensor.shards
        wrong = [rank for rank in shards.asked if not _fits(tensor, rank)]
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


def _fits(tensor: Tensor, rank: int) -> bool:
    shard = tensor.shards[rank]
    return shard.layout is None or shard.layout.region(shard.layout.mesh.coord_of(rank)).shape == shard.body.local_shape


def _shape_finding(tensor: Tensor, name: str, wrong: list[int]) -> Finding:
    shard = tensor.shards[wrong[0]]
    assert shard.layout is not None
    claimed = shard.layout.region(shard.layout.mesh.coord_of(shard.rank)).shape
    actual, expected = list(shard.body.local_shape), list(claimed)
    what = f"rank {shard.rank} would hold {actual}, but its placements give {expected}"
    return UnevenPlan().finding(name, tuple(wrong), what, claimed=write(shard.layout))


def _layout_finding(tensor: Tensor, name: str, text: str) -> Finding:
    layout = write(tensor.claimed) if tensor.claimed else "no layout: every rank has a plain tensor"
    what = f"its planned layout is {layout}, not the intended {text}"
    return AnotherPlan(layout, is_planned=True).finding(name, tuple(tensor.shards), what, claimed=layout, intended=text)
