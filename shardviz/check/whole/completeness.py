"""`incomplete`: ranks, files or tensors that are missing in the dump; the rest is checked.

A tensor that only some ranks have may be a pipeline's stage; a DTensor, though, has a shard on every rank of its mesh,
and a stamped tensor is somewhere, under its own name, that of a tensor it is tied to, or as ids in another.

In a comparison, what ranks with missing or damaged files hold is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.check.verdicts import is_of_model
from shardviz.explain.placement.whole_run import (
    DamagedFile,
    ModuleAbsentOnRanks,
    RankWithoutFile,
    TensorAbsentEverywhere,
)
from shardviz.text import counted, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.read import DumpFiles
    from shardviz.explain.finding import Finding


MAX_LISTED = 8


def check_completeness(dump: Dump) -> Iterator[Finding]:
    """Yield what a dump lacks."""
    files = dump.files
    for rank, why in sorted(files.damaged.items()):
        problem = why.replace(f"{files.path}/", "")
        lost = ("nothing of what this rank holds was checked",)
        yield DamagedFile().finding("", (rank,), problem, severity="warning", details=lost)
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
    """Yield unexplained tensors on meshes with ranks that left no file: their shards are unknown."""
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
    for name, stamp in unseen.items():
        if name not in unchecked and name not in elsewhere and stamp.first not in present and 0 not in stamp.shape:
            what = f"no rank has it; the unsharded model has {list(stamp.shape)}"
            yield TensorAbsentEverywhere().finding(name, (), what, severity="warning")


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
