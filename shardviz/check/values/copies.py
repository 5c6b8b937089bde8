"""`unreplicated`: copies of the model's own values that differ where they must be equal, from the very start.

Ranks that held the same ids when the tensor was stamped hold copies, at the same place of any pending sum. Where it was
not stamped, or has no ids left, what the placements claim decides; of a plain tensor, all ranks have copies. They are
compared by digests, a whole fold of layers at a time, and shown in numbers where the dump has values. Shards without
elements, plain tensors whose shapes differ between ranks, and tensors of different element types (a finding of their
own) are not compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.check.order.as_claimed import claimed_dims
from shardviz.check.report import NotChecked
from shardviz.check.values.numbers import first_difference, same_step
from shardviz.explain.values import (
    FirstRankAlone,
    OddRanksAlone,
    PlainAmongShards,
    RankDependentSeed,
    ShardedOnSomeRanks,
    UnsynchronizedBuffer,
)
from shardviz.layout.notation import write
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.relate.pair import Related

Groups = list[list["Shard"]]


@dataclass(frozen=True)
class Copies:
    """Copies of one tensor that must be equal and are not: what most of them hold is wanted of all.

    Attributes:
        dump: The dump.
        name: The tensor's name.
        index: Its number in its fold.
        groups: For each part that has different copies, all of its copies.
        related: None, as no relation is looked for.
    """

    dump: Dump
    name: str
    index: int
    groups: Groups

    related: Related | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold copies, rising."""
        return _ranks(self.groups)

    def wanted_of(self, rank: int) -> NDArray[np.float64]:
        """Return what most copies of a rank's part hold."""
        alike = next(alike for alike in self.alike if any(shard.rank == rank for own in alike for shard in own))
        return self.dump.values(alike[0][0], self.name)

    def held_of(self, rank: int) -> NDArray[np.float64]:
        """Return what a rank holds."""
        shard = next(shard for group in self.groups for shard in group if shard.rank == rank)
        return self.dump.values(shard, self.name)

    @cached_property
    def alike(self) -> list[Groups]:
        """The copies of each part, equal ones together: those of most ranks first, then the others."""
        return [_alike(group, self.index) for group in self.groups]


def _alike(group: list[Shard], index: int) -> Groups:
    by_digest: dict[str, list[Shard]] = {}
    for shard in group:
        by_digest.setdefault(shard.digest(index), []).append(shard)
    usual = max(map(len, by_digest.values()))
    return sorted(by_digest.values(), key=lambda shards: len(shards) < usual)


@dataclass(frozen=True, slots=True)
class _About:
    """What is wrong with copies.

    Attributes:
        cause: The most likely cause.
        sentence: What is wrong, in numbers.
        held: Which ranks have other values, in words.
    """

    cause: Cause
    sentence: str
    held: str


def check_copies(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield parameters and buffers of the model before stamping whose copies differ."""
    said = {name for record in dump.files.ranks.values() for name, _ in record.not_checked}
    for tensor in dump.at("initial"):
        for ids, numbers in _by_stamped(tensor, dump.stamped):
            groups = copies_of(tensor, ids)
            if any(len({shard.digests for shard in group}) > 1 for group in groups):
                yield from _compare(dump, tensor, numbers, groups)
            elif any(not shard.digests for group in groups if len(group) > 1 for shard in group):
                why = "its copies have no digests to compare"
                names = [tensor.names[number] for number in numbers]
                yield from (NotChecked(name, why, "values") for name in names if name not in said)


def _by_stamped(tensor: Tensor, stamped: Mapping[str, Tensor]) -> Iterator[tuple[Tensor | None, list[int]]]:
    """Yield the stamped tensors that a fold's names belong to, with the numbers of those names in the fold."""
    found: dict[int, tuple[Tensor | None, list[int]]] = {}
    for number, name in enumerate(tensor.names):
        ids = stamped.get(name)
        found.setdefault(id(ids), (ids, []))[1].append(number)
    yield from found.values()


def copies_of(tensor: Tensor, ids: Tensor | None) -> Groups:
    """Return the groups of shards that must be equal.

    Args:
        tensor: The values.
        ids: The same tensor when it was stamped, which shows the part that each rank holds.
    """
    groups: dict[Hashable, list[Shard]] = {}
    claimed = {layout.tensor_shape for layout in tensor.claims if layout is not None}
    for rank, shard in tensor.shards.items():
        if 0 not in shard.body.local_shape:
            part = _part(shard, ids.shards.get(rank) if ids else None, claimed)
            groups.setdefault((part, _pending(shard), shard.body.dtype), []).append(shard)
    return list(groups.values())


def _part(shard: Shard, ids: Shard | None, claimed: Collection[tuple[int, ...]]) -> Hashable:
    """Return a key that two shards share if they hold the same part of the tensor.

    Args:
        shard: The shard.
        ids: The same shard when it was stamped.
        claimed: The global shapes that other ranks claim: a plain tensor of one of them is a copy of the whole.
    """
    if ids is not None and ids.body.held is not None:
        return ids.body.held
    if ids is not None and any(first > 0 for first, _, _ in ids.body.runs or ()):
        return ids.body.runs
    if shard.layout is not None and shard.rank in shard.layout.mesh:
        return claimed_dims(shard.layout)[shard.rank]
    if ids is not None and ids.body.dense:
        return shard.rank
    local = shard.body.local_shape
    return tuple(((0, size),) for size in local) if local in claimed else local


def _pending(shard: Shard) -> tuple[int, ...]:
    layout = shard.layout
    if layout is None or not layout.partial or shard.rank not in layout.mesh:
        return ()
    coord = layout.mesh.coord_of(shard.rank)
    return tuple(coord[layout.mesh.axis_index(axis)] for axis, _ in layout.partial)


def with_copies(finding: Finding, dump: Dump, tensor: Tensor) -> Finding:
    """Return a finding about a tensor with its copies that differ bit by bit, if there are any."""
    index = tensor.index(finding.tensor)
    groups = copies_of(tensor, dump.stamped.get(finding.tensor))
    differing = [group for group in groups if len({shard.digest(index) for shard in group}) > 1]
    return finding.seen_in(Copies(dump, finding.tensor, index, differing)) if differing else finding


def _compare(dump: Dump, tensor: Tensor, numbers: list[int], groups: Groups) -> Iterator[Finding]:
    for index in numbers:
        differing = [group for group in groups if len({shard.digest(index) for shard in group}) > 1]
        if differing:
            yield _finding(dump, tensor, index, differing)


def _finding(dump: Dump, tensor: Tensor, index: int, differing: Groups) -> Finding:
    usual = [Counter(shard.digest(index) for shard in group).most_common(1)[0][0] for group in differing]
    others = [
        [shard for shard in group if shard.digest(index) != most] for group, most in zip(differing, usual, strict=True)
    ]
    pair = next(shard for shard in differing[0] if shard.digest(index) == usual[0]), others[0][0]
    claimed = pair[1].layout
    mesh = claimed.mesh if claimed else dump.files.mesh
    odd = _odd(mesh, differing, others)
    is_first = _are_first(mesh, differing, others)
    about = _about_odd(odd, others, pair, is_first) if odd else _about_axes(dump, tensor, mesh, differing, index)
    first = first_difference(*pair)
    return (
        (_in_part_sharded(tensor) or about.cause)
        .finding(
            tensor.names[index],
            _ranks(others),
            about.sentence,
            details=(first,) if first else (),
            claimed=write(claimed, equal=True) if claimed else "",
            held=about.held,
        )
        .seen_in(Copies(dump, tensor.names[index], index, differing))
    )


def _in_part_sharded(tensor: Tensor) -> Cause | None:
    """Return the cause if some ranks have a DTensor and others a plain tensor; None otherwise."""
    plain = tensor.claims.get(None, ())
    others = sorted(set(tensor.shards) - set(plain))
    return ShardedOnSomeRanks(tuple(others), tuple(plain)) if plain and others else None


def _ranks(groups: Groups) -> tuple[int, ...]:
    return tuple(sorted(shard.rank for group in groups for shard in group))


def _are_first(mesh: Mesh, differing: Groups, others: Groups) -> bool:
    """Whether of every part that has other copies it is the first rank's alone, and the mesh's first is one of them."""
    alone = all(len(odd) == 1 and odd[0] is group[0] for odd, group in zip(others, differing, strict=True))
    return alone and min(mesh.ranks) in _ranks(others)


def _about_odd(odd: str, others: Groups, pair: tuple[Shard, Shard], is_first: bool) -> _About:
    """Say what is wrong where most copies agree."""
    count = len(_ranks(others))
    apart = _apart(*pair) if count == 1 else ""
    verb = "has" if count == 1 else "have"
    sentence = f"copies differ from the start: {odd} {verb} other values than the other copies{apart}"
    cause = FirstRankAlone(odd) if is_first else OddRanksAlone(odd)
    return _About(cause, sentence, f"other values on {odd}")


def _about_axes(dump: Dump, tensor: Tensor, mesh: Mesh, differing: Groups, index: int) -> _About:
    """Say what is wrong where copies differ from one position of an axis to the next."""
    axes = _axes(mesh, differing, index)
    sentence = f"copies differ along {' and '.join(axes) or 'the ranks'} from the start: {_count(differing, index)}"
    held = f"different values along {' and '.join(axes)}" if axes else "different values"
    if tensor.role == "buffer":
        return _About(UnsynchronizedBuffer(tuple(axes)), sentence, held)
    is_plain = _is_beside_shards(dump, tensor)
    return _About((PlainAmongShards if is_plain else RankDependentSeed)(tuple(axes)), sentence, held)


def _is_beside_shards(dump: Dump, tensor: Tensor) -> bool:
    return tensor.claimed is None and any(one.claimed is not None for one in dump.at("initial"))


def _count(differing: Groups, index: int) -> str:
    """Say how many different copies there are: `each of 2 parts has up to 2 different copies on 2 ranks`."""
    copies = [len({shard.digest(index) for shard in group}) for group in differing]
    where = f"{max(copies):,} different copies on {max(map(len, differing)):,} ranks"
    if len(differing) == 1:
        return where
    return f"each of {len(differing):,} parts has {'up to ' * (len(set(copies)) > 1)}{where}"


def _odd(mesh: Mesh, differing: Groups, others: Groups) -> str:
    """Name the ranks whose copies are others than those of most, which agree; empty where there is no such most."""
    if any(2 * len(odd) >= len(group) for odd, group in zip(others, differing, strict=True)):
        return ""
    ranks = sorted(shard.rank for shards in others for shard in shards)
    coords = [mesh.coord_of(rank) for rank in ranks if rank in mesh]
    if len(ranks) == 1:
        pairs = zip(mesh.axes, coords[0], strict=True) if coords and mesh.ndim > 1 else ()
        at = ", ".join(f"{axis}={position}" for axis, position in pairs)
        return f"rank {ranks[0]}" + (f" ({at})" if at else "")
    for column, axis in enumerate(mesh.axes):
        positions = {coord[column] for coord in coords}
        if len(positions) == 1 and len(coords) * mesh.axis_size(axis) == mesh.size:
            return f"{axis}={positions.pop()} ({named_ranks(ranks)})"
    return named_ranks(ranks)


def _apart(right: Shard, wrong: Shard) -> str:
    """Say by how much all elements of an odd copy differ, where it is by one number or factor."""
    by, factor = same_step(right, wrong)
    if by:
        return f": every element differs by {by:+.6g}"
    return f": every element is {factor:.6g} times theirs" if factor else ""


def _axes(mesh: Mesh, differing: Groups, index: int) -> list[str]:
    """Return the axes along which copies differ: two coordinates that are equal on all other axes have other values."""
    found = []
    for column, axis in enumerate(mesh.axes):
        for group in differing:
            seen: dict[Hashable, str] = {}
            coords = ((mesh.coord_of(shard.rank), shard) for shard in group if shard.rank in mesh)
            lines = (((*at[:column], *at[column + 1 :]), shard.digest(index)) for at, shard in coords)
            if any(seen.setdefault(line, digest) != digest for line, digest in lines):
                found.append(axis)
                break
    return found
