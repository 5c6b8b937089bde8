"""Weights of a first wrong module of which ranks hold parts that don't meet: rows of one, and columns of the next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.check.step.trace.calls import is_within
from shardviz.explain.step.modules import PartsThatDoNotMeet
from shardviz.groups import in_groups
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.dump.dump import Tensor
    from shardviz.dump.records.base import Span
    from shardviz.explain.finding import Finding

    Spans = tuple[Span, ...]


@dataclass(frozen=True)
class Cut:
    """A dim of a weight of which each rank has a part.

    Attributes:
        spans: The slices that each rank has, as half-open ranges.
    """

    name: str
    dim: int
    size: int
    spans: Mapping[int, Spans]

    @property
    def key(self) -> tuple[object, ...]:
        """What cuts have in common whose slices may meet: the dim's size, and how many slices each rank has."""
        counts = ((rank, sum(end - begin for begin, end in spans)) for rank, spans in self.spans.items())
        return (self.size, *sorted(counts))

    @property
    def slices(self) -> tuple[tuple[int, Spans], ...]:
        """The slices, to be compared."""
        return tuple(sorted(self.spans.items()))


def check_parts_of_weights(evidence: Evidence, first: Divergence) -> Finding | None:
    """Return the finding if a rank has other slices of a weight than of those whose slices it is multiplied with.

    Dims of one size that are cut alike in several weights of a module are one dim of its hidden tensor if some weight
    makes it and another one reads it, so that it is dim 0 of one and dim 1 of the other.
    """
    if (first.direction, first.way) != ("forward", "within") or not first.module:
        return None
    for cuts in in_groups((cut.key, cut) for cut in _cuts(evidence, first.module)).values():
        common, count = Counter(cut.slices for cut in cuts).most_common(1)[0]
        if count < len(cuts) == 2:
            common = min(cuts, key=lambda cut: cut.dim).slices
        odd = [cut for cut in cuts if cut.slices != common]
        usual = [cut for cut in cuts if cut.slices == common and all(cut.dim != other.dim for other in odd)]
        if len(odd) == 1 and usual:
            return _finding(odd[0], usual)
    return None


def _finding(odd: Cut, usual: list[Cut]) -> Finding:
    other = usual[0]
    ranks = tuple(rank for rank, spans in odd.slices if spans != other.spans[rank])
    slices, usual_slices = _text(odd.spans[ranks[0]]), _text(other.spans[ranks[0]])
    sentence = (
        f"rank {ranks[0]} has slices {slices} of dim {odd.dim} of {odd.name}, and slices {usual_slices} of dim "
        f"{other.dim} of {listed(sorted({cut.name for cut in usual}))}"
    )
    return PartsThatDoNotMeet(odd.name, odd.dim, other.name, other.dim).finding(odd.name, ranks, sentence)


def _text(spans: Spans) -> str:
    return listed((f"{begin} to {end - 1}" for begin, end in spans), 4)


def _cuts(evidence: Evidence, module: str) -> Iterator[Cut]:
    """Yield the dims of a module's weights that are cut, and of which every rank has different slices than others."""
    for name, tensor in evidence.dump.by_name("stamped", "param").items():
        owner = name.rpartition(".")[0]
        if owner == module or is_within(owner, module):
            yield from _of(name, tensor)


def _of(name: str, tensor: Tensor) -> Iterator[Cut]:
    bodies = {rank: shard.body for rank, shard in tensor.shards.items()}
    held = {rank: body.held for rank, body in bodies.items() if body.held is not None}
    shape = next(iter(bodies.values())).shape
    for dim, size in enumerate(shape if len(held) == len(bodies) else ()):
        spans = {rank: dims[dim] for rank, dims in held.items()}
        if len(set(spans.values())) > 1:
            yield Cut(name, dim, size, spans)
