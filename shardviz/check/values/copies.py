"""`unreplicated`: copies of the model's values that must be equal but differ at the start.

Ranks that held the same ids when the tensor was stamped hold copies, at the same place of any pending sum. Where it was
not stamped, or has no ids left, what the placements claim decides; of a plain tensor, all ranks have copies. They are
compared by digests, a whole fold of layers at a time, and shown in numbers if the dump has values. Shards without
elements, plain tensors whose shapes differ between ranks, and tensors of different element types (a finding of their
own) are not compared.

`identical-shards`: a tensor's parts have bitwise equal values: one seed on every rank.

Only values that were drawn can tell: a tensor of one number (a bias of zeros, a norm of ones), of NaN alone, of one
element a shard, or of an integer dtype is passed over, and so is one whose parts repeated each other before sharding.
Along an axis, every line of shards of one shape must repeat itself.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.check.order.case import claimed_dims
from shardviz.check.order.infer.layout import axes_of_change
from shardviz.check.report import NotChecked
from shardviz.dump.arrays import hash_of_nan
from shardviz.dump.validate import leaves
from shardviz.explain.checkpoints.states import SameOptimizerFile
from shardviz.explain.placement.values import (
    FirstRankAlone,
    OddRanksAlone,
    PlainAmongShards,
    RankDependentSeed,
    RepeatedDraw,
    RoundedCopies,
    ShardedOnSomeRanks,
    UnsynchronizedBuffer,
)
from shardviz.groups import in_groups
from shardviz.layout.notation import write
from shardviz.layout.region import index_of
from shardviz.relate.relations import RankPair
from shardviz.relate.tolerance import STEP
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh


Groups = list[list["Shard"]]
About = tuple["Cause", str, str]
"""The most likely cause, what is wrong in numbers, and which ranks have other values."""


@dataclass(frozen=True)
class Copies(RankPair):
    """Replicas of one tensor that differ; the value that most of them hold is expected.

    Attributes:
        index: Its number in its fold.
        groups: For each part that has different copies, all of its copies.
    """

    dump: Dump
    name: str
    index: int
    groups: Groups

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold copies, rising."""
        return _ranks(self.groups)

    def wanted_of(self, rank: int) -> NDArray[np.float64]:
        """Return what most copies of a rank's part hold."""
        alike = next(alike for alike in self.alike if any(shard.rank == rank for group in alike for shard in group))
        return self.dump.values(alike[0][0], self.name)

    def held_of(self, rank: int) -> NDArray[np.float64]:
        """Return what a rank holds."""
        shard = next(shard for group in self.groups for shard in group if shard.rank == rank)
        return self.dump.values(shard, self.name)

    @cached_property
    def alike(self) -> list[Groups]:
        """The copies of each part, equal ones together: those of most ranks first, then the others."""
        return [_groups_by_digest(group, self.index) for group in self.groups]


def _groups_by_digest(group: list[Shard], index: int) -> Groups:
    by_digest = in_groups((shard.digest(index), shard) for shard in group)
    usual = max(map(len, by_digest.values()))
    return sorted(by_digest.values(), key=lambda shards: len(shards) < usual)


NEW_BUFFER = "the unsharded model has no buffer of this name, so ranks may have made each its own"


def check_copies(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield parameters and buffers of the model before stamping whose copies differ."""
    unchecked = {name for record in dump.files.ranks.values() for name, _ in record.not_checked}
    made = {name for record in dump.files.ranks.values() for name, _ in record.made_of}
    for tensor in dump.at("initial"):
        if made.issuperset(tensor.names):
            continue  # its ids say of what it has which elements: ranks may have different ones
        if tensor.claimed is None and _is_new_buffer(dump, tensor):
            yield from (NotChecked(name, NEW_BUFFER, "values") for name in tensor.names if name not in unchecked)
            continue
        for ids, numbers in _stamped_tensors(tensor, dump.stamped):
            groups = copies_of(tensor, ids)
            if ids is None and dump.stamped:  # nothing says what it is along these: code may have cut and wrapped it
                apart = (in_groups((_position(shard, pending=False), shard) for shard in group) for group in groups)
                groups = [part for by_position in apart for part in by_position.values()]
            if any(len({shard.digests for shard in group}) > 1 for group in groups):
                for number in numbers:
                    if differing := _differing_groups(groups, number):
                        yield _finding(dump, tensor, number, differing)
            elif any(not shard.digests for group in groups if len(group) > 1 for shard in group):
                why = "its copies have no digests to compare"
                names = [tensor.names[number] for number in numbers]
                yield from (NotChecked(name, why, "values") for name in names if name not in unchecked)


def _position(shard: Shard, *, pending: bool) -> Coord:
    """Return a rank's place along the axes of a pending reduction, or along those that the shard's own mesh lacks."""
    layout = shard.layout
    if layout is None or shard.rank not in layout.mesh:
        return ()
    lacking = [axis for axis in layout.mesh.axes if layout.own_axes and axis not in layout.own_axes]
    axes = dict(layout.partial) if pending else lacking
    coord = zip(layout.mesh.axes, layout.mesh.coord_of(shard.rank), strict=True)
    return tuple(at for axis, at in coord if axis in axes)


def _is_new_buffer(dump: Dump, tensor: Tensor) -> bool:
    """Whether the unsharded model, of which there is a step, has no such buffers: sharding code made them."""
    is_known = any(name in dump.stamps or dump.find("reference", "buffer", name) for name in tensor.names)
    return tensor.role == "buffer" and bool(dump.at("reference")) and not is_known


def _stamped_tensors(tensor: Tensor, stamped: Mapping[str, Tensor]) -> Iterator[tuple[Tensor | None, list[int]]]:
    """Yield a fold's stamped tensors, each with the numbers of its names in the fold."""
    by_ids: dict[int, tuple[Tensor | None, list[int]]] = {}
    for number, name in enumerate(tensor.names):
        ids = stamped.get(name)
        by_ids.setdefault(id(ids), (ids, []))[1].append(number)
    yield from by_ids.values()


def copies_of(tensor: Tensor, ids: Tensor | None) -> Groups:
    """Return the groups of shards that must be equal.

    Args:
        ids: The same tensor when it was stamped, which shows the part that each rank holds.
    """
    groups: dict[Hashable, list[Shard]] = {}
    claimed = {layout.tensor_shape for layout in tensor.claims if layout is not None}
    for rank, shard in tensor.shards.items():
        if 0 not in shard.body.local_shape:
            claim = _part(shard, ids.shards.get(rank) if ids else None, claimed)
            groups.setdefault((claim, _position(shard, pending=True), shard.body.dtype), []).append(shard)
    return list(groups.values())


def _part(shard: Shard, ids: Shard | None, claimed: Collection[tuple[int, ...]]) -> Hashable:
    """Return a key that two shards share if they hold the same part of the tensor.

    Args:
        ids: The same shard when it was stamped.
        claimed: The global shapes that other ranks claim: a plain tensor of one of them is a copy of the whole.
    """
    if ids is not None and ids.body.held is not None:
        return ids.body.held
    if ids is not None and any(first > 0 for first, _, _ in ids.body.runs or ()):
        return ids.body.runs
    if shard.layout is not None and shard.rank in shard.layout.mesh:
        return claimed_dims(shard.layout)[shard.rank]
    local = shard.body.local_shape
    of_whole = shard.body.shape if ids is None else ids.body.shape
    if (ids is not None and ids.body.dense) or local != of_whole:  # an unknown part of it
        return shard.rank
    return tuple(((0, size),) for size in local) if local in claimed else local


def with_copies(finding: Finding, dump: Dump, tensor: Tensor) -> Finding:
    """Return a finding about a tensor with its copies that differ bit by bit, if there are any."""
    index = tensor.index(finding.tensor)
    groups = copies_of(tensor, dump.stamped.get(finding.tensor))
    differing = _differing_groups(groups, index)
    return finding.seen_in(Copies(dump, finding.tensor, index, differing)) if differing else finding


def _differing_groups(groups: Groups, index: int) -> Groups:
    return [group for group in groups if len({shard.digest(index) for shard in group}) > 1]


def _finding(dump: Dump, tensor: Tensor, index: int, differing: Groups) -> Finding:
    usual = [Counter(shard.digest(index) for shard in group).most_common(1)[0][0] for group in differing]
    odd_groups = [
        [shard for shard in group if shard.digest(index) != most] for group, most in zip(differing, usual, strict=True)
    ]
    pair = next(shard for shard in differing[0] if shard.digest(index) == usual[0]), odd_groups[0][0]
    claimed = pair[1].layout
    mesh = claimed.mesh if claimed else dump.files.mesh
    odd = _odd_ranks_text(mesh, differing, odd_groups)
    alone = all(len(odd) == 1 and odd[0] is group[0] for odd, group in zip(odd_groups, differing, strict=True))
    is_first = alone and min(mesh.ranks) in _ranks(odd_groups)
    cause, sentence, held = (
        _explain_odd(odd, odd_groups, pair, is_first) if odd else _about_axes(dump, tensor, mesh, differing, index)
    )
    first, name = first_difference(*pair), tensor.names[index]
    finding = (_in_part_sharded(tensor) or _rounded_copies(dump, name, differing) or cause).finding(
        name,
        _ranks(odd_groups),
        sentence,
        details=(first,) if first else (),
        claimed=write(claimed, equal=True) if claimed else "",
        held=held,
    )
    return finding.seen_in(Copies(dump, name, index, differing))


def _in_part_sharded(tensor: Tensor) -> Cause | None:
    """Return the cause if some ranks have a DTensor and others a plain tensor; None otherwise."""
    plain = tensor.claims.get(None, ())
    sharded = sorted(set(tensor.shards) - set(plain))
    return ShardedOnSomeRanks(tuple(sharded), tuple(plain)) if plain and sharded else None


def _rounded_copies(dump: Dump, name: str, differing: Groups) -> Cause | None:
    """Return the cause if all copies are equal once rounded to a narrower dtype."""
    records = ((rank, rounding) for rank, record in dump.files.ranks.items() for rounding in record.rounded)
    of_ranks = {rank: (dtype, digest) for rank, (known, dtype, digest) in records if known == name}
    roundings = [{of_ranks.get(shard.rank) for shard in group} for group in differing]
    alike = [rounding for of_group in roundings if len(of_group) == 1 for rounding in of_group if rounding]
    return RoundedCopies(alike[0][0]) if len(alike) == len(differing) else None


def _ranks(groups: Groups) -> tuple[int, ...]:
    return tuple(sorted(shard.rank for group in groups for shard in group))


def _explain_odd(odd: str, odd_groups: Groups, pair: tuple[Shard, Shard], is_first: bool) -> About:
    """Say what is wrong if most copies agree."""
    count = len(_ranks(odd_groups))
    apart = _difference_text(*pair) if count == 1 else ""
    verb = "has" if count == 1 else "have"
    sentence = f"copies differ from the start: {odd} {verb} different values than the other copies{apart}"
    cause = FirstRankAlone(odd) if is_first else OddRanksAlone(odd)
    return (cause, sentence, f"other values on {odd}")


def _about_axes(dump: Dump, tensor: Tensor, mesh: Mesh, differing: Groups, index: int) -> About:
    """Say what is wrong if copies differ from one position of an axis to the next."""
    of_groups = [
        axes_of_change(mesh, {mesh.coord_of(shard.rank): shard.digest(index) for shard in group if shard.rank in mesh})
        for group in differing
    ]
    axes = [axis for axis in mesh.axes if any(axis in axes for axes in of_groups)]
    sentence = f"copies differ along {' and '.join(axes) or 'the ranks'} from the start: {_count(differing, index)}"
    held = f"different values along {' and '.join(axes)}" if axes else "different values"
    if tensor.role == "buffer":
        return (UnsynchronizedBuffer(tuple(axes)), sentence, held)
    is_plain = tensor.claimed is None and any(initial.claimed is not None for initial in dump.at("initial"))
    return ((PlainAmongShards if is_plain else RankDependentSeed)(tuple(axes)), sentence, held)


def _count(differing: Groups, index: int) -> str:
    """Count the different copies: `each of 2 parts has up to 2 different copies on 2 ranks`."""
    copies = [len({shard.digest(index) for shard in group}) for group in differing]
    where = f"{max(copies):,} different copies on {max(map(len, differing)):,} ranks"
    if len(differing) == 1:
        return where
    return f"each of {len(differing):,} parts has {'up to ' * (len(set(copies)) > 1)}{where}"


def _odd_ranks_text(mesh: Mesh, differing: Groups, odd_groups: Groups) -> str:
    """Name the ranks whose replicas differ from the majority's; empty without a majority."""
    if any(2 * len(odd) >= len(group) for odd, group in zip(odd_groups, differing, strict=True)):
        return ""
    ranks = sorted(shard.rank for shards in odd_groups for shard in shards)
    coords = [mesh.coord_of(rank) for rank in ranks if rank in mesh]
    if len(ranks) == 1:
        at = mesh.label(ranks[0]) if coords and mesh.ndim > 1 else ""
        return f"rank {ranks[0]}" + (f" ({at})" if at else "")
    for column, axis in enumerate(mesh.axes):
        positions = {coord[column] for coord in coords}
        if len(positions) == 1 and len(coords) * mesh.axis_size(axis) == mesh.size:
            return f"{axis}={positions.pop()} ({named_ranks(ranks)})"
    return named_ranks(ranks)


def _difference_text(right: Shard, wrong: Shard) -> str:
    """Say by how much all elements of an odd copy differ, if it is by one number or factor."""
    by, factor = same_step(right, wrong)
    if by:
        return f": every element differs by {by:+.6g}"
    return f": every element is {factor:.6g} times theirs" if factor else ""


LEAST_ALIKE = 3


def flat_values(shard: Shard) -> list[float | str] | None:
    """Return a shard's values, row-major; None if the dump has only their digest."""
    return leaves(shard.body.values) if shard.body.values is not None else None


def is_constant(shard: Shard) -> bool:
    """Whether all elements of a shard are one number, so it doesn't show where it is from."""
    if shard.body.constant or math.prod(shard.body.local_shape) < 2:
        return True
    values = flat_values(shard)
    return values is not None and len(set(values)) == 1


def first_difference(shard: Shard, second: Shard) -> str:
    """Say where two replicas differ first, with both values; empty if the dump has no values."""
    first_values, second_values = flat_values(shard), flat_values(second)
    if first_values is None or second_values is None:
        return ""
    if len(first_values) != len(second_values) or shard.body.dtype != second.body.dtype:
        first = f"{shard.body.dtype}{list(shard.body.local_shape)}"
        return f"rank {shard.rank} has {first}, rank {second.rank} {second.body.dtype}{list(second.body.local_shape)}"
    differs = (one != other for one, other in zip(first_values, second_values, strict=True))
    at = next((index for index, is_other in enumerate(differs) if is_other), None)
    if at is None:
        return ""
    pair = (2,) if shard.body.dtype.startswith("complex") else ()  # written as real and imaginary part
    shape = (*shard.body.local_shape, *pair)
    index = index_of(at, shape)
    texts = _value_text(first_values[at]), _value_text(second_values[at])
    return f"at {index} of the shard rank {shard.rank} has {texts[0]}, rank {second.rank} {texts[1]}"


def same_step(copy: Shard, counterpart: Shard) -> tuple[float, float]:
    """Return the constant difference between two replicas, and their factor; 0 without one.

    Copies of fewer than three elements show no rule.
    """
    pairs = list(zip(flat_values(copy) or (), flat_values(counterpart) or (), strict=False))
    if len(pairs) < LEAST_ALIKE or not all(isinstance(value, float | int) for pair in pairs for value in pair):
        return 0, 0
    numbers = [(float(first), float(second)) for first, second in pairs]
    step = _common_number([second - first for first, second in numbers])
    return step, 0 if step or not all(first for first, _ in numbers) else _common_number([b / a for a, b in numbers])


def _common_number(numbers: list[float]) -> float:
    """Return what all numbers are, rounding apart; 0 if they are not one finite number."""
    first = numbers[0]
    is_one = math.isfinite(first) and all(math.isclose(number, first, rel_tol=STEP) for number in numbers)
    return first if is_one else 0


def _value_text(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


Lines = list[list["Shard"]]


def check_identical_shards(dump: Dump) -> Iterator[Finding]:
    """Yield tensors of the model before stamping whose shards repeat each other."""
    for tensor in dump.at("initial"):
        if "float" not in tensor.dtype and "complex" not in tensor.dtype:
            continue
        for layout in tensor.claims:
            if layout is not None and layout.split_axes:
                findings = _check(tensor, layout)
                yield from (finding for finding in findings if not _are_as_built(dump, tensor, finding.tensor))


def _are_as_built(dump: Dump, tensor: Tensor, name: str) -> bool:
    """Whether every rank has its part of unsharded values that themselves repeat."""
    return all(rank in dump.files.ranks and name in dump.files.ranks[rank].as_built for rank in tensor.shards)


def _check(tensor: Tensor, layout: Layout) -> Iterator[Finding]:
    repeated: dict[int, list[str]] = {}
    for axis in layout.split_axes:
        if _first_line_differs(tensor, layout, axis):
            continue
        lines = _lines(tensor, layout, axis)
        if lines and not any(is_constant(shard) for shard in lines[0]):
            for index in _equal_names(lines, len(tensor.names)):
                repeated.setdefault(index, []).append(axis)
    for index, axes in repeated.items():
        along = " and ".join(axes)
        cause = (
            SameOptimizerFile()
            if tensor.role == "optim"
            else RepeatedDraw(along, tensor.first.body.device.startswith("cpu"))
        )
        yield cause.finding(
            tensor.names[index],
            tuple(tensor.shards),
            f"different shards along {along} hold bitwise the same {list(tensor.first.body.local_shape)} values: "
            "the whole tensor repeats one shard",
            claimed=write(layout),
            held=f"the same values along {along}",
        )


def _first_line_differs(tensor: Tensor, layout: Layout, axis: str) -> bool:
    """Whether an axis's first two shards have one shape but no digest in common."""
    shards = [tensor.shards[rank] for rank in layout.mesh.groups(axis)[0][:2] if rank in tensor.shards]
    if len(shards) < 2 or shards[0].body.local_shape != shards[1].body.local_shape or not shards[0].digests:
        return False
    return all(shards[0].digest(index) != shards[1].digest(index) for index in range(len(tensor.names)))


def _lines(tensor: Tensor, layout: Layout, axis: str) -> Lines:
    """Return the distinct shards along an axis, all else equal, of the first one's shape."""
    mesh, column = layout.mesh, layout.mesh.axis_index(axis)
    claimed = claimed_dims(layout)
    lines: dict[Coord, dict[object, Shard]] = {}
    for coord, rank in zip(mesh.coords(), mesh.ranks, strict=True):
        shard = tensor.shards.get(rank)
        if shard is None or not shard.digests or 0 in shard.body.local_shape:
            continue
        line = lines.setdefault((*coord[:column], *coord[column + 1 :]), {})
        first = next(iter(line.values()), shard)
        if shard.body.local_shape == first.body.local_shape:
            line.setdefault(claimed[rank], shard)
    return [list(line.values()) for line in lines.values() if len(line) > 1]


def _equal_names(lines: Lines, num_names: int) -> Iterator[int]:
    """Yield the indices of a fold's names whose shards are equal along every line."""
    first, second = lines[0][:2]
    for index in range(num_names):
        digest = first.digest(index)
        if digest != second.digest(index) or digest == hash_of_nan(first.body.dtype, first.body.local_shape):
            continue
        if all(len({shard.digest(index) for shard in line}) == 1 for line in lines):
            yield index
