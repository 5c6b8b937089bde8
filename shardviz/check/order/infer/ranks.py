"""Every rank holds a shard that is claimed somewhere, only not its own: which rank's, by a rule of its coordinate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.advice import CATALOGUE
from shardviz.check.order.infer.explanation import Disorder, Explanation
from shardviz.check.order.infer.orders import as_text
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.region import Region

MAX_LISTED = 8

FEW = 3
"""So many ranks out of order are named, with what they hold; of more, the order of all is."""


def explain_ranks(claimed: Layout, held: Mapping[Coord, Region]) -> Iterator[Explanation]:
    """Yield the rules by which ranks hold each other's shards, axis by axis first, then by rank."""
    sources = _sources(claimed, held)
    if sources is None:
        return
    by_axis = _by_axis(claimed, sources)
    if by_axis is not None:
        yield _explain_axes(claimed, by_axis)
        return
    yield from _by_global_rank(claimed, sources)
    odd = {coord: source for coord, source in sources.items() if coord != source}
    if len(odd) <= FEW and 2 * len(odd) < len(sources):
        yield _explain_few(claimed, odd)
    elif len(claimed.mesh.ranks) == len(sources):
        permutation = _by_rank(claimed, sources)
        if len(set(permutation)) == len(permutation):
            yield _explain_permutation(claimed, permutation)


def _sources(claimed: Layout, held: Mapping[Coord, Region]) -> dict[Coord, Coord] | None:
    """Return for every coordinate the one that claims what it holds, with its own position along equal copies."""
    columns = [claimed.mesh.axis_index(axis) for axis in claimed.split_axes]
    owners: dict[Region, Coord] = {}
    for coord in claimed.mesh.coords():
        owners.setdefault(claimed.region(coord), tuple(coord[column] for column in columns))
    sources: dict[Coord, Coord] = {}
    for coord, region in held.items():
        if not region.size and not claimed.region(coord).size:
            sources[coord] = coord
            continue
        if region not in owners:
            return None
        source = list(coord)
        for column, position in zip(columns, owners[region], strict=True):
            source[column] = position
        sources[coord] = tuple(source)
    return sources


Maps = dict[str, dict[int, int]]


def _by_axis(claimed: Layout, sources: Mapping[Coord, Coord]) -> Maps | None:
    """Return, for each axis, its map of positions; None where a position depends on another axis too."""
    maps: Maps = {}
    for column, axis in enumerate(claimed.mesh.axes):
        seen: dict[int, int] = {}
        for coord, source in sources.items():
            if seen.setdefault(coord[column], source[column]) != source[column]:
                return None
        if any(position != source for position, source in seen.items()):
            maps[axis] = seen
    return maps or None


def _explain_axes(claimed: Layout, maps: Maps) -> Explanation:
    named = {axis: _rule(claimed.mesh, axis, seen) for axis, seen in maps.items()}
    name = next(iter(named.values()))[0]
    axis = next(axis for axis, (disorder, _) in named.items() if disorder == name)
    words = " and ".join(words for _, words in named.values())
    fix = CATALOGUE[name].fix.format(axis=axis)
    are_few = {disorder for disorder, _ in named.values()} <= {"shared-shards", "exchanged-ranks"}
    if not are_few:
        return Explanation(name, f"each rank holds another rank's shard: {words}", fix, words)
    words += "; all other positions hold their own"
    return Explanation(name, words, fix, words)


def _rule(mesh: Mesh, axis: str, seen: Mapping[int, int]) -> tuple[Disorder, str]:
    """Name the map of one axis's positions, with the words for it."""
    sources, size = set(seen.values()), mesh.axis_size(axis)
    if len(sources) == 1 and len(seen) > 1:
        return "same-shard", f"every rank along {axis} holds the shard of {axis}={next(iter(sources))}"
    if all(source == size - 1 - position for position, source in seen.items()):
        falling = listed(sorted(mesh.ranks, reverse=True), MAX_LISTED)
        backwards = f", as on a mesh given as [{falling}]" if mesh.ndim == 1 else ""
        return "reversed", f"{axis}=i holds the shard of {axis}={size - 1}-i{backwards}"
    steps = {(source - position) % size for position, source in seen.items()}
    if len(steps) == 1:
        return "rotated", f"{axis}=i holds the shard of {axis}=(i+{steps.pop()})%{size}"
    order = listed((seen.get(position, "?") for position in range(size)), MAX_LISTED)
    odd = {position: source for position, source in seen.items() if position != source}
    few = len(odd) <= FEW and 2 * len(odd) < len(seen)
    if few:
        return "exchanged-ranks" if set(odd) == set(odd.values()) else "shared-shards", _holders(axis, odd)
    if len(sources) < len(seen):
        repeated = _repeated(axis, size, seen)
        return "repeated-shards", f"along {axis} the ranks hold the shards [{order}], some of them twice{repeated}"
    if len(seen) == size and as_text(np.array([seen[position] for position in range(size)])) == 1:
        return "as-text", f"along {axis} the shards are in the order of their numbers as text: [{order}]"
    return "permuted-ranks", f"along {axis} the shards stand in the order [{order}]"


def _holders(axis: str, odd: Mapping[int, int]) -> str:
    """Say which positions along an axis hold which shard: `fsdp=127 holds the shard of fsdp=126`."""
    return " and ".join(
        f"{axis}={position} holds the shard of {axis}={source}" for position, source in sorted(odd.items())
    )


def _repeated(axis: str, size: int, seen: Mapping[int, int]) -> str:
    """Say by which rule positions share shards, where it is one; empty otherwise."""
    positions, sources = np.array(list(seen)), list(seen.values())
    for count in range(2, size):
        rules = {
            f"{count}*(i//{count}): {count} neighbours have the first shard of theirs": positions // count * count,
            f"i//{count}: {count} neighbours have the same": positions // count,
            f"i%{count}: the first {count} come again": positions % count,
        }
        for text, images in rules.items():
            if images.tolist() == sources:
                return f": {axis}=i holds the shard of {axis}={text}"
    return ""


def _by_global_rank(claimed: Layout, sources: Mapping[Coord, Coord]) -> Iterator[Explanation]:
    """Yield the rule by which one axis's position follows from the global rank, if all other positions are right."""
    mesh = claimed.mesh
    for column, axis in enumerate(mesh.axes):
        size = mesh.axis_size(axis)
        for text, rule in _of_rank(size, mesh.size // size):
            if all(
                (*coord[:column], rule(mesh.rank_at(coord)), *coord[column + 1 :]) == source
                for coord, source in sources.items()
            ):
                words = f"each rank holds the shard of {axis} = {text} of its global rank"
                yield Explanation("global-rank", words, CATALOGUE["global-rank"].fix.format(axis=axis), words)


def _of_rank(size: int, others: int) -> Iterator[tuple[str, Callable[[int], int]]]:
    yield f"rank % {size}", lambda rank: rank % size
    yield f"rank // {others}", lambda rank: rank // others


def _by_rank(claimed: Layout, sources: Mapping[Coord, Coord]) -> list[int]:
    """Return, for the ranks rising, the rank that claims what each holds."""
    mesh = claimed.mesh
    pairs = sorted((mesh.rank_at(coord), mesh.rank_at(source)) for coord, source in sources.items())
    return [source for _, source in pairs]


def _explain_few(claimed: Layout, odd: Mapping[Coord, Coord]) -> Explanation:
    rank_at = claimed.mesh.rank_at
    pairs = sorted((rank_at(coord), rank_at(source)) for coord, source in odd.items())
    words = " and ".join(f"rank {rank} holds the shard of rank {source}" for rank, source in pairs)
    name: Disorder = (
        "exchanged-ranks" if {at for at, _ in pairs} == {source for _, source in pairs} else "shared-shards"
    )
    return Explanation(name, f"{words}; all other ranks hold their own", CATALOGUE[name].fix.format(axis=""), words)


def _explain_permutation(claimed: Layout, permutation: list[int]) -> Explanation:
    words = permutation_in_words(sorted(claimed.mesh.ranks), permutation)
    sentence = f"the ranks are permuted: {words}"
    return Explanation("permuted-ranks", sentence, CATALOGUE["permuted-ranks"].fix, words)


def permutation_in_words(ranks: list[int], permutation: list[int]) -> str:
    """Say which rank's shard each rank holds, by a rule where there is one, else as a list."""
    order = {rank: index for index, rank in enumerate(ranks)}
    images = [order[source] for source in permutation]
    size, shown = len(images), listed(permutation, MAX_LISTED)
    if images == list(range(size))[::-1]:
        return f"rank i holds the shard of rank {size - 1}-i, as on a mesh given as [{shown}]"
    for text, rule in _rules(images):
        if all(rule(index) == image for index, image in enumerate(images)):
            return f"rank i holds the shard of rank {text}"
    return f"ranks {ranks[0]}, {ranks[1]}, ... hold the shards of ranks [{shown}]"


def _rules(images: list[int]) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Yield rules that the first images suggest: a rotation, flipped bits, rows and columns of the mesh exchanged."""
    size, first = len(images), images[0]
    yield f"(i+{first})%{size}", lambda index: (index + first) % size
    yield f"i xor {first}", lambda index: index ^ first
    columns = images[1]
    if columns > 1 and size % columns == 0:
        rows = size // columns
        text = f"{columns}*(i%{rows}) + i//{rows}: rows and columns of a {columns}x{rows} mesh are exchanged"
        yield text, lambda index: columns * (index % rows) + index // rows
