"""One permutation of the ranks that explains every misplaced tensor of a dump, whatever layout each has.

A loader that counts ranks in another order than the mesh harms each layout in its own way: rows that are split twice
look as if they were cut in another order, others as if they were split over another axis or dim. Where these have
several explanations, and one permutation fits all tensors, those in order too, that is what happened.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.hiding import is_of_places
from shardviz.check.order.infer.layout import same_region
from shardviz.check.order.infer.ranks import few_of, holders, permutation_in_words
from shardviz.errors import ShardvizError
from shardviz.explain.finding import Finding
from shardviz.explain.splits import PermutedRanks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.order.case import Case
    from shardviz.check.order.laid_out import LaidOut
    from shardviz.check.report import NotChecked
    from shardviz.layout.mesh import Coord

Order = dict[int, int]
"""For each rank the one that claims what it holds."""


def with_one_order(results: Sequence[Finding | NotChecked], laid_out: LaidOut) -> list[Finding | NotChecked]:
    """Return results in which tensors that one permutation of the ranks explains have it for their cause."""
    places = [one for one in results if isinstance(one, Finding) and is_of_places(one)]
    if len({type(one.explanation) for one in places}) < 2:
        return list(results)
    wrong = {one.tensor for one in places}
    cases = _cases(laid_out)
    order = _common_order([case for name, case in cases if name in wrong])
    if order is None or not all(_fits(case, order) for _, case in cases) or wrong - {name for name, _ in cases}:
        return list(results)
    return [_explained(one, order) if one in places else one for one in results]


def _cases(laid_out: LaidOut) -> list[tuple[str, Case]]:
    """Return every tensor with a claim, on each of its meshes."""
    named_cases: list[tuple[str, Case]] = []
    for tensor in laid_out.dump.at("stamped"):
        for name in tensor.names if tensor.claimed is not None else ():
            try:
                named_cases += [(name, case) for case in laid_out.cases(tensor, name) if case.claimed is not None]
            except ShardvizError:  # not laid out: it is not checked for that reason already
                continue
    return named_cases


def _common_order(wrong: Sequence[Case]) -> Order | None:
    """Return the one permutation that all tensors show whose parts differ from rank to rank; None for several."""
    orders = [order for case in wrong if (order := _order_of(case)) is not None]
    return orders[0] if orders and all(order == orders[0] for order in orders) else None


def _order_of(case: Case) -> Order | None:
    """Return whose part each rank holds; None if parts are not all there, or not of one rank each."""
    claimed = case.claimed
    if claimed is None or case.ids or case.absent:
        return None
    regions = {coord: claimed.region(coord) for coord in case.shards}
    owners: dict[int, int] = {}
    for coord, held in case.regions.items():
        same = [other for other, region in regions.items() if same_region(held, region)]
        if len(same) != 1:
            return None
        owners[case.rank(coord)] = case.rank(same[0])
    return owners if sorted(owners) == sorted(owners.values()) else None


def _fits(case: Case, order: Mapping[int, int]) -> bool:
    """Whether each rank holds what the rank claims whose part it has."""
    claimed = case.claimed
    if claimed is None or case.ids or case.absent:
        return False
    coords: dict[int, Coord] = {case.rank(coord): coord for coord in case.shards}
    return coords.keys() == order.keys() and all(
        same_region(case.regions[coord], claimed.region(coords[order[rank]])) for rank, coord in coords.items()
    )


def _explained(finding: Finding, order: Mapping[int, int]) -> Finding:
    few, ranks = few_of(order), sorted(order)
    held = holders(order, "rank ") if few else permutation_in_words(ranks, [order[rank] for rank in ranks])
    return replace(
        finding.because(few or PermutedRanks()),
        kind="misordered",
        sentence=f"{finding.sentence.partition(':')[0]}: each has another rank's shard, by one rule for all tensors",
        details=(),
        held=held,
        also=(),
    )
