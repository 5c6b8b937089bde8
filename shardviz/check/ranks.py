"""`incomplete` and `rank-order`: ranks that are missing, or numbered unlike their mesh.

A tensor that only some ranks have may be a pipeline's stage; a DTensor, though, has a shard on every rank of its mesh,
and a stamped tensor is somewhere, under its own name, that of a tensor it is tied to, or as ids in another. In a
comparison, what ranks with missing or damaged files hold is not known.

Collectives put results in the order of the group, placements in that of the mesh. Where the two differ, every gather
along the axis comes back permuted, whatever the shards are: a tensor that is split over the axis is not in order, even
if each shard is where it is claimed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.verdicts import is_of_model
from shardviz.dump.read import DumpFiles, mesh_of
from shardviz.explain.placement.whole_run import (
    DamagedFile,
    DamagedNumbers,
    GroupAgainstMesh,
    MeshNotRising,
    ModuleAbsentOnRanks,
    RankWithoutFile,
    RefusedFile,
    SameModules,
    TensorAbsentEverywhere,
)
from shardviz.groups import the_only
from shardviz.text import counted, join_numbers, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records.tensors import MeshRecord
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh


MAX_LISTED = 8

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""A module's number in a name."""


def check_completeness(dump: Dump) -> Iterator[Finding]:
    """Yield what a dump lacks."""
    files = dump.files
    for rank, why in sorted(files.damaged.items()):
        problem = why.replace(f"{files.path}/", "")
        lost = ("nothing of what this rank holds was checked",)
        cause: Cause = DamagedNumbers() if rank in files.changed else DamagedFile()
        cause = RefusedFile() if rank in files.refused else cause
        yield cause.finding("", (rank,), problem, severity="warning", details=lost)
    missing = tuple(rank for rank in files.missing_ranks if rank not in files.damaged)
    if missing:
        yield RankWithoutFile().finding(
            "",
            missing,
            f"{len(missing):,} of {files.run.num_ranks:,} ranks wrote no file: {listed(missing, MAX_LISTED)}",
            severity="warning",
        )
    explained = {name for record in files.ranks.values() for name, _ in record.not_checked}
    for tensor in dump.tensors:
        yield from _absent_shards(files, tensor, explained)
    if not files.missing_ranks:
        yield from _absent_tensors(dump)


def check_missing_ranks(dump: Dump, explained: Collection[str]) -> Iterator[NotChecked]:
    """Yield unexplained tensors of which some shards are unknown: ranks left no file."""
    missing = dump.files.missing_ranks
    for tensor in dump.tensors if missing else ():
        mesh = tensor.claimed.mesh if tensor.claimed else dump.files.mesh
        ranks = [rank for rank in missing if rank in mesh]
        for name in tensor.names if ranks and is_of_model(tensor) else ():
            if name not in explained:
                yield NotChecked(name, no_file_of(ranks), "order")


def no_file_of(ranks: Collection[int]) -> str:
    """Say which ranks left no readable file."""
    return f"no readable file of rank{'s' * (len(ranks) > 1)} {listed(ranks, MAX_LISTED)}"


def _absent_shards(files: DumpFiles, tensor: Tensor, explained: Collection[str]) -> Iterator[Finding]:
    """Yield ranks with a file but without a shard of a DTensor on their mesh, unexplained."""
    if tensor.moment not in ("initial", "stamped") or len(tensor.shards) == files.run.num_ranks:
        return
    expected = {rank for layout in tensor.claims if layout is not None for rank in layout.mesh.ranks}
    absent = tuple(sorted(rank for rank in expected - set(tensor.shards) if rank in files.ranks))
    for name in [name for name in tensor.names if name not in explained] if absent else ():
        ranks = listed(absent, MAX_LISTED)
        what = f"{len(absent):,} of {len(expected):,} ranks of its mesh have no {tensor.moment} shard of it: {ranks}"
        yield ModuleAbsentOnRanks().finding(name, absent, what, severity="warning")


def _absent_tensors(dump: Dump) -> Iterator[Finding]:
    """Yield stamped tensors that no rank has under any name."""
    stamped = dump.stamped
    unseen = {stamp.name: stamp for stamp in dump.files.run.stamps if stamp.name not in stamped}
    if not stamped or not unseen:
        return
    unchecked = {name for record in dump.files.ranks.values() for name, _ in record.not_checked}
    present = {dump.stamps[name].first for name in stamped if name in dump.stamps}
    starts = {run[0] for rank in dump.files.ranks.values() for body in rank.bodies for run in body.runs or ()}
    elsewhere = {stamp.name for stamp in unseen.values() if stamp.first in starts}
    numbered = _numbered(dump)
    for name, stamp in unseen.items():
        if name not in unchecked and name not in elsewhere and stamp.first not in present and 0 not in stamp.shape:
            what = f"no rank has it; the unsharded model has {list(stamp.shape)}"
            cause = _same_modules(dump, numbered, name) or TensorAbsentEverywhere()
            yield cause.finding(name, (), what, severity="warning")


def _numbered(dump: Dump) -> Mapping[tuple[str, str], Mapping[int, str]]:
    """Return stamped names by what stands before and behind a number in them, by the number."""
    numbered: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for stamp in dump.files.run.stamps:
        for number in NUMBER.finditer(stamp.name):
            numbered[stamp.name[: number.start()], stamp.name[number.end() :]][int(number[0])] = stamp.name
    return numbered


def _same_modules(dump: Dump, numbered: Mapping[tuple[str, str], Mapping[int, str]], absent: str) -> SameModules | None:
    """Return the cause if every rank keeps the same share of numbered modules, and no rank keeps the rest."""
    mesh, stamped = dump.files.mesh, dump.stamped
    for number in NUMBER.finditer(absent):
        names = numbered[absent[: number.start()], absent[number.end() :]]
        numbers = sorted(names)
        kept = [at for at in numbers if names[at] in stamped]
        axis = the_only([axis for axis in mesh.long_axes if mesh.axis_size(axis) * len(kept) == len(numbers)])
        if not kept or axis is None or any(len(stamped[names[at]].shards) < mesh.size for at in kept):
            continue
        count = mesh.axis_size(axis)
        shares = [[numbers[at::count], numbers[at * len(kept) : (at + 1) * len(kept)]] for at in range(count)]
        if any(kept in share for share in shares):
            modules = absent[: number.start() - 1].rpartition(".")[2]
            return SameModules(modules, join_numbers(kept), axis)
    return None


def unread_ranks(dump: Dump) -> tuple[int, ...]:
    """Return the ranks whose files were not read; a plan has none."""
    return () if dump.files.planned is not None else dump.files.missing_ranks


def unread_parts(dump: Dump, which: str) -> Iterator[NotChecked]:
    """Yield what ranks hold that were not read, and why, file by file."""
    files, ranks = dump.files, unread_ranks(dump)
    for rank in (rank for rank in ranks if rank in files.damaged):
        why = files.damaged[rank].replace(f"{files.path}/", "")
        yield NotChecked("", f"what rank {rank} held: in the {which} dump, {why}", "run")
    if absent := [rank for rank in ranks if rank not in files.damaged]:
        yield NotChecked(
            "",
            f"what {named_ranks(absent)} held: the {which} dump has no file of {'it' if len(absent) == 1 else 'them'}",
            "run",
        )


def without_trace(dump: Dump, which: str) -> str:
    """Say that a dump has no trace of a step, or that it may be in what was not read of it."""
    ranks = unread_ranks(dump)
    if not ranks:
        return f"{which} dump has no trace of one"
    return f"a trace of it may be in what was not read of {which} dump ({named_ranks(ranks)})"


def may_have(dump: Dump, second_dump: Dump, tensor: Tensor) -> bool:
    """Whether a dump may have a tensor of another one on ranks that were not read.

    Ranks of jobs of one size are the same ones; of other jobs, any may have it.
    """
    unread = set(unread_ranks(dump))
    return bool(unread) and (
        dump.files.run.num_ranks != second_dump.files.run.num_ranks or unread.issuperset(tensor.shards)
    )


def split_by_certainty(
    findings: tuple[Finding, ...], dump: Dump, which: str
) -> tuple[tuple[Finding, ...], tuple[NotChecked, ...]]:
    """Split a dump's absent findings into certain ones and those hidden by unread ranks."""
    ranks = unread_ranks(dump)
    certain = tuple(
        finding for finding in findings if not ranks or (finding.kind == "incomplete" and not finding.tensor)
    )
    if certain == findings:
        return findings, ()
    count = counted(len(findings) - len(certain), "finding")
    why = f"{count} of the other dump: the checks of the {which} lack {named_ranks(ranks)}"
    return certain, (NotChecked("", why, "run"),)


Places = dict[tuple["MeshRecord", int], dict[int, tuple[int, int]]]
"""For a mesh and one of its axes: the ranks that differ, with their coordinate and their number in the group."""


IN_QUESTION = "what collectives along {axis} return: the process group has its ranks in a different order than the mesh"


def check_rank_order(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield each mesh axis along which group ranks differ from coordinates, with its tensors."""
    groups: dict[str, set[tuple[int, ...]]] = {}
    for (record, axis), ranks in differing(dump).items():
        rank, (position, in_group) = next(iter(ranks.items()))
        name = record.axes[axis]
        cause = MeshNotRising() if _is_by_rank(record, axis, ranks) else GroupAgainstMesh(name)
        yield cause.finding(
            "",
            tuple(sorted(ranks)),
            f"{len(ranks):,} ranks have a number in the group along {name} that is not their coordinate on mesh "
            f"{mesh_of(record)}: rank {rank} is {name}={position} but number {in_group} of its group",
        )
        named_groups = _groups(mesh_of(record), name)
        groups.setdefault(name, set()).update(group for group in named_groups if not ranks.keys().isdisjoint(group))
    for name, odd in groups.items():
        yield from _unchecked_tensors(dump, name, odd)


def _unchecked_tensors(dump: Dump, axis: str, groups: set[tuple[int, ...]]) -> Iterator[NotChecked]:
    """Yield the tensors that are split or summed over an axis with one of some groups.

    A part of a mesh has its groups, so that the mesh that a tensor claims need not be the one that differs.
    """
    for tensor in filter(is_of_model, (*dump.at("stamped"), *dump.at("initial"))):
        claims = [claim for claim in tensor.claims if claim and axis in (*claim.split_axes, *dict(claim.partial))]
        if any(not groups.isdisjoint(_groups(claim.mesh, axis)) for claim in claims):
            yield from (NotChecked(name, IN_QUESTION.format(axis=axis), "gathering") for name in tensor.names)


@lru_cache(maxsize=64)
def _groups(mesh: Mesh, axis: str) -> frozenset[tuple[int, ...]]:
    return frozenset(mesh.groups(axis))


def _is_by_rank(record: MeshRecord, axis: int, ranks: dict[int, tuple[int, int]]) -> bool:
    """Whether an axis's groups number ranks rising, and it is the mesh that does not."""
    groups = np.moveaxis(np.array(record.ranks).reshape(record.shape), axis, -1).reshape(-1, record.shape[axis])
    numbers = {int(rank): int((group < rank).sum()) for group in groups for rank in group if int(rank) in ranks}
    return all(numbers[rank] == in_group for rank, (_, in_group) in ranks.items())


def differing(dump: Dump) -> Places:
    """Return the ranks whose number in a group is not their coordinate, by mesh and axis."""
    ranks: Places = {}
    for rank, record in dump.files.ranks.items():
        for position in record.positions:
            if position.coord == position.group_ranks:
                continue
            pairs = zip(position.coord, position.group_ranks, strict=False)
            for axis, (coordinate, in_group) in enumerate(pairs):
                if coordinate != in_group:
                    ranks.setdefault((record.meshes[position.mesh], axis), {})[rank] = (coordinate, in_group)
    return ranks
