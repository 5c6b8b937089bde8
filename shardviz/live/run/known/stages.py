"""Layers that the stages of a pipeline number for themselves: a checkpoint's layer of that number may be another.

Stages that share a name with a number in it count from the same number, so that all but one of them have layers that a
whole model numbers otherwise. Which ones those are is not known: they are told apart, and compared with nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import distributed

from shardviz.live.capture.agreement import of_all_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardviz.live.capture.pipeline_parts import PipelinePart
    from shardviz.reference.files import Reference

NUMBERED = (
    "stages number their layers for themselves, and a checkpoint's layer of this number may be another stage's; give "
    "each layer the number that it has in the whole model, and it is compared"
)


def told_apart(part: PipelinePart, group: Any, names: Iterable[str]) -> PipelinePart:
    """Return a stage with its coordinate in front of its names, if stages share numbered ones. Every rank calls this.

    Args:
        part: The stage, along one axis.
        group: The process group of the ranks that have the other stages.
        names: The names of its tensors.
    """
    mine = {name for name in names if any(word.isdigit() for word in name.split("."))}
    ranks = tuple(distributed.get_process_group_ranks(group))
    uses = Counter((of, name) for of, numbered in of_all_ranks((ranks, mine)) for name in numbered)
    if max(uses.values(), default=1) == 1:
        return part
    return replace(part, prefix=f"{part.axes[0]}={distributed.get_rank(group)}.")


def without_layers(reference: Reference, part: PipelinePart, names: Iterable[str]) -> Reference:
    """Return a reference for stages that number their layers for themselves: none is known. Every rank calls it."""
    of_all = of_all_ranks([part.prefix + name for name in names])
    return replace(reference, entries={}, why={name: NUMBERED for of_rank in of_all for name in of_rank})
