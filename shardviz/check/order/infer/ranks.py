"""Ranks that hold shards of different ranks, by a rule of their coordinates.

A loader that counts ranks in another order than the mesh harms each layout in its own way: rows that are split twice
look as if they were cut in another order, others as if they were split over another axis or dim. If these have several
explanations, and one permutation fits all tensors, those in order too, that is what happened.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import Case, Fit, LaidOut
from shardviz.check.order.infer.layout import same_region
from shardviz.check.order.infer.orders import as_text
from shardviz.check.report import NotChecked, is_of_places
from shardviz.errors import ShardvizError
from shardviz.explain.finding import Finding
from shardviz.explain.placement.order import AsText, Disorder
from shardviz.explain.placement.splits import (
    ExchangedRanks,
    GlobalRank,
    PermutedRanks,
    RepeatedShards,
    Reversed,
    Rotated,
    SameShard,
    Segments,
    SharedShards,
)
from shardviz.text import listed, starred

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.region import Region

    Numbers = NDArray[np.int64]

MAX_LISTED = 8

FEW = 3
"""So many ranks out of order are named, with what they hold; of more, the order of all is."""

FEWEST_KINDS = 3
"""Weights of so many names, but for layers' numbers, are not all fused."""

REPEATING: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "{count}*(i//{count}): {count} neighbors have the first shard of theirs": lambda i, count: i // count * count,
    "i//{count}: {count} neighbors have the same": lambda i, count: i // count,
    "i%{count}: the first {count} come again": lambda i, count: i % count,
}
"""How ranks come to share a shard: whose a number i has."""

OF_FEW = (ExchangedRanks, SharedShards)

BY_COORDINATE = RepeatedShards("mesh.get_coordinate()")
"""The cause if ranks share shards, and not by a position along one axis."""


def explain_ranks(claimed: Layout, held: Mapping[Coord, Region]) -> Iterator[Fit]:
    """Yield the rules by which ranks hold each other's shards, axis by axis first, then by rank."""
    sources = _sources(claimed, held)
    if sources is None:
        return
    by_axis = _maps_by_axis(claimed, sources)
    if by_axis is not None:
        yield _explain_axes(claimed, sources, by_axis)
        return
    yield from _explain_by_global_rank(claimed, sources)
    yield from _explain_by_rank(claimed, sources)


def _sources(claimed: Layout, held: Mapping[Coord, Region]) -> dict[Coord, Coord] | None:
    """Return each coordinate's source: who claims what it holds, at its own replica position."""
    columns = [claimed.mesh.axis_index(axis) for axis in claimed.split_axes]
    owners = {region: claimed.mesh.coord_of(ranks[0]) for region, ranks in claimed.holders().items()}
    sources: dict[Coord, Coord] = {}
    for coord, region in held.items():
        if not region.size and not claimed.region(coord).size:
            sources[coord] = coord
        elif region in owners:
            owner = owners[region]
            sources[coord] = tuple(owner[at] if at in columns else position for at, position in enumerate(coord))
        else:
            return None
    return sources


Maps = dict[str, dict[int, int]]


def _maps_by_axis(claimed: Layout, sources: Mapping[Coord, Coord]) -> Maps | None:
    """Return each axis's map of positions; None if a position depends on a second axis."""
    maps: Maps = {}
    for column, axis in enumerate(claimed.mesh.axes):
        source_of: dict[int, int] = {}
        for coord, source in sources.items():
            if source_of.setdefault(coord[column], source[column]) != source[column]:
                return None
        if any(position != source for position, source in source_of.items()):
            maps[axis] = source_of
    return maps or None


def _explain_axes(claimed: Layout, sources: Mapping[Coord, Coord], maps: Maps) -> Fit:
    named = [_rule(claimed.mesh, axis, seen) for axis, seen in maps.items()]
    cause = named[0][0]
    words = " and ".join(words for _, words in named)
    if all(isinstance(disorder, OF_FEW) for disorder, _ in named):
        words += _rest_text("positions", claimed.mesh, sources)
        return Fit(cause, words, words)
    are_all = len(sources) == claimed.mesh.size and all(coord != source for coord, source in sources.items())
    return Fit(cause, f"each rank holds another rank's shard: {words}" if are_all else words, words)


def _rest_text(what: str, mesh: Mesh, sources: Mapping[Coord, Coord]) -> str:
    """Say that all but the few that are named are right: of ranks without a file nobody knows."""
    if all(coord != source for coord, source in sources.items()):
        return ""
    return f"; all other {what}{' that were read' * (len(sources) < mesh.size)} hold their own"


def _rule(mesh: Mesh, axis: str, source_of: Mapping[int, int]) -> tuple[Disorder, str]:
    """Return why one axis's positions are mapped so, with the words for it."""
    sources, size = set(source_of.values()), mesh.axis_size(axis)
    if len(source_of) == 1:
        return ExchangedRanks(is_unread=True), holders(source_of, f"{axis}=")
    if len(sources) == 1:
        read = " that was read" * (len(source_of) < size)
        return SameShard((axis,)), f"every rank along {axis}{read} holds the shard of {axis}={next(iter(sources))}"
    if all(source == size - 1 - position for position, source in source_of.items()):
        falling = listed(sorted(mesh.ranks, reverse=True), MAX_LISTED)
        backwards = f", as on a mesh given as [{falling}]" if mesh.ndim == 1 else ""
        return Reversed(axis), f"{axis}=i holds the shard of {axis}={size - 1}-i{backwards}"
    steps = {(source - position) % size for position, source in source_of.items()}
    if len(steps) == 1:
        return Rotated(axis), f"{axis}=i holds the shard of {axis}=(i+{steps.pop()})%{size}"
    order = listed((source_of.get(position, "?") for position in range(size)), MAX_LISTED)
    repeated = _sharing_rule(np.arange(size), source_of)
    if not repeated and (few := few_of(source_of)):
        return few, holders(source_of, f"{axis}=")
    if repeated or len(sources) < len(source_of):
        again = ", some of them more than once" * (len(sources) < len(source_of))
        rule = f": {axis}=i holds the shard of {axis}={repeated}" if repeated else ""
        cause = RepeatedShards(f"mesh.get_local_rank({axis!r})")
        return cause, f"along {axis} the ranks hold the shards [{order}]{again}{rule}"
    if len(source_of) == size and as_text(np.array([source_of[position] for position in range(size)])) == 1:
        return AsText(), f"along {axis} the shards are in the order of their numbers as text: [{order}]"
    return PermutedRanks(), f"along {axis} the shards stand in the order [{order}]"


def _misplaced(seen: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the positions or ranks that hold another's shard, rising, each with whose it is."""
    return sorted((at, source) for at, source in seen.items() if at != source)


def holders(seen: Mapping[int, int], what: str) -> str:
    """Say who holds whose shard, if not its own: `fsdp=127 holds the shard of fsdp=126`."""
    return " and ".join(f"{what}{at} holds the shard of {what}{source}" for at, source in _misplaced(seen))


def few_of(source_of: Mapping[int, int]) -> Disorder | None:
    """Return what happened if only a few hold another's shard; None if more do."""
    odd = _misplaced(source_of)
    if len(odd) > FEW or 2 * len(odd) >= len(source_of):
        return None
    sources = {source for _, source in odd}
    if {at for at, _ in odd} == sources:
        return ExchangedRanks()
    return SharedShards() if sources <= source_of.keys() else ExchangedRanks(is_unread=True)


def _sharing_rule(first_claimants: Numbers, source_of: Mapping[int, int]) -> str:
    """Name the rule of index i by which ranks share shards; empty if none fits.

    Args:
        first_claimants: For each number, the first that claims the same part.
        source_of: The first that claims what each holds.
    """
    positions, sources = np.array(list(source_of)), np.array(list(source_of.values()))
    if np.count_nonzero(first_claimants[positions] != sources) < 2:
        return ""
    counts = {text: _least_count(first_claimants, positions, sources, rule) for text, rule in REPEATING.items()}
    fitting = [(count, text) for text, count in counts.items() if count]
    count, text = min(fitting, key=lambda pair: pair[0], default=(0, ""))
    return text.format(count=count)


def _least_count(
    first_claimants: Numbers, positions: Numbers, sources: Numbers, rule: Callable[[Numbers, Numbers], Numbers]
) -> int:
    """Return the least count with which a rule gives every position its source; 0 if none does.

    Some of the positions that one count is wrong about rule nearly all other counts out, so that few are tried.
    """
    counts, least = np.arange(2, len(first_claimants)), 0
    while len(counts):
        count = counts[len(counts) // 2]
        wrong = np.flatnonzero(first_claimants[rule(positions, count)] != sources)
        if not len(wrong):
            counts, least = counts[counts < count], int(count)
        for at in wrong[:: max(len(wrong) // MAX_LISTED, 1)]:
            counts = counts[first_claimants[rule(positions[at], counts)] == sources[at]]
    return least


def _explain_by_global_rank(claimed: Layout, sources: Mapping[Coord, Coord]) -> Iterator[Fit]:
    """Yield the rule by which one axis's position follows from the global rank."""
    mesh = claimed.mesh
    for column, axis in enumerate(mesh.axes):
        size = mesh.axis_size(axis)
        for text, rule in _rules_of_rank(size, mesh.size // size):
            if all(
                (*coord[:column], rule(mesh.rank_at(coord)), *coord[column + 1 :]) == source
                for coord, source in sources.items()
            ):
                words = f"each rank holds the shard of {axis} = {text} of its global rank"
                yield Fit(GlobalRank(axis), words, words)


def _rules_of_rank(size: int, num_groups: int) -> Iterator[tuple[str, Callable[[int], int]]]:
    yield f"rank % {size}", lambda rank: rank % size
    yield f"rank // {num_groups}", lambda rank: rank // num_groups


def _explain_by_rank(claimed: Layout, sources: Mapping[Coord, Coord]) -> Iterator[Fit]:
    """Yield whose shard each rank holds, if a position along one axis does not tell."""
    mesh = claimed.mesh
    source_of = dict(sorted((mesh.rank_at(coord), mesh.rank_at(source)) for coord, source in sources.items()))
    ranks = sorted(mesh.ranks)
    if repeated := _sharing_rule_by_rank(claimed, source_of):
        words = f"rank i holds the shard of rank {repeated}"
        yield Fit(BY_COORDINATE, words, words)
    elif few := few_of(source_of):
        words = holders(source_of, "rank ")
        yield Fit(few, words + _rest_text("ranks", mesh, sources), words)
    elif len(source_of) == len(set(source_of.values())) == mesh.size:
        words = permutation_in_words(ranks, list(source_of.values()))
        yield Fit(PermutedRanks(), f"the ranks are permuted: {words}", words)
    elif len(set(source_of.values())) < len(source_of) and not claimed.replicate_axes:
        odd = _misplaced(source_of)
        words = f"{len(odd)} ranks hold others' shards: {holders(dict(odd[:FEW]), 'rank ')}{', ...' * (len(odd) > FEW)}"
        yield Fit(BY_COORDINATE, words, words)


def _sharing_rule_by_rank(claimed: Layout, source_of: Mapping[int, int]) -> str:
    """Name the rule by which ranks share shards, replicas counted once; empty if none fits."""
    mesh = claimed.mesh
    if sorted(mesh.ranks) != list(range(mesh.size)):
        return ""
    first: dict[Region, int] = {}
    first_holders = [first.setdefault(claimed.region_of_rank(rank), rank) for rank in range(mesh.size)]
    return _sharing_rule(np.array(first_holders), {rank: first_holders[source] for rank, source in source_of.items()})


def permutation_in_words(ranks: list[int], permutation: list[int]) -> str:
    """Say which rank's shard each rank holds, by a rule if there is one, else as a list."""
    order = {rank: index for index, rank in enumerate(ranks)}
    images = [order[source] for source in permutation]
    for text, rule in _rules(images):
        if all(rule(index) == image for index, image in enumerate(images)):
            return f"rank i holds the shard of rank {text}"
    return f"ranks {ranks[0]}, {ranks[1]}, ... hold the shards of ranks [{listed(permutation, MAX_LISTED)}]"


def _rules(images: list[int]) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Yield rules that the first images suggest: reversal, rotation, XOR, transposed mesh."""
    size, first = len(images), images[0]
    yield f"{size - 1}-i", lambda index: size - 1 - index
    yield f"(i+{first})%{size}", lambda index: (index + first) % size
    yield f"i xor {first}", lambda index: index ^ first
    columns = images[1]
    if columns > 1 and size % columns == 0:
        rows = size // columns
        text = f"{columns}*(i%{rows}) + i//{rows}: rows and columns of a {columns}x{rows} mesh are exchanged"
        yield text, lambda index: columns * (index % rows) + index // rows


Order = dict[int, int]
"""For each rank the one that claims what it holds."""


def with_one_order(results: Sequence[Finding | NotChecked], laid_out: LaidOut) -> list[Finding | NotChecked]:
    """Return results, with one permutation of the ranks, or of parts, as the cause of all that it explains."""
    places = [finding for finding in results if isinstance(finding, Finding) and is_of_places(finding)]
    if _are_dealt_in_turn(places, laid_out):
        return [_dealt_in_turn(result) if result in places else result for result in results]
    if len({type(finding.explanation) for finding in places}) < 2:
        return list(results)
    wrong = {finding.tensor for finding in places}
    cases = _cases(laid_out)
    orders = [order for name, case in cases if name in wrong and (order := _order_of(case)) is not None]
    order = orders[0] if orders and all(other == orders[0] for other in orders) else None
    if order is None or not all(_fits(case, order) for _, case in cases) or wrong - {name for name, _ in cases}:
        return list(results)
    return [_with_permutation(result, order) if result in places else result for result in results]


def _are_dealt_in_turn(places: Sequence[Finding], laid_out: LaidOut) -> bool:
    """Whether all split weights have the order of a fused weight that was split: not all of several kinds are fused."""
    wrong = {finding.tensor for finding in places if isinstance(finding.explanation, Segments)}
    if len(wrong) < len(places) or len({starred(name) for name in wrong}) < FEWEST_KINDS:
        return False
    return all(name in wrong for name, case in _cases(laid_out) if case.claimed is not None and case.claimed.split_axes)


def _dealt_in_turn(finding: Finding | NotChecked) -> Finding | NotChecked:
    if isinstance(finding, Finding) and isinstance(finding.explanation, Segments):
        return finding.because(Segments(finding.explanation.placements, of_all=True))
    return finding


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


def _order_of(case: Case) -> Order | None:
    """Return whose shard each rank holds; None if shards are missing or have several owners."""
    claimed = case.claimed
    if claimed is None or case.ids or case.absent:
        return None
    claimants = claimed.holders()
    owners = {case.rank(coord): claimants.get(held, ()) for coord, held in case.regions.items()}
    if any(len(ranks) != 1 for ranks in owners.values()):
        return None
    order = {rank: ranks[0] for rank, ranks in owners.items()}
    return order if sorted(order) == sorted(order.values()) else None


def _fits(case: Case, order: Mapping[int, int]) -> bool:
    """Whether each rank holds what the rank claims whose part it has."""
    claimed = case.claimed
    if claimed is None or case.ids or case.absent:
        return False
    coords: dict[int, Coord] = {case.rank(coord): coord for coord in case.shards}
    return coords.keys() == order.keys() and all(
        same_region(case.regions[coord], claimed.region(coords[order[rank]])) for rank, coord in coords.items()
    )


def _with_permutation(finding: Finding, order: Mapping[int, int]) -> Finding:
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
