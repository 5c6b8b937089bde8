"""Ranks with missing or damaged files, in a comparison: what they hold is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.text import counted, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding


def unread_ranks(dump: Dump) -> tuple[int, ...]:
    """Return the ranks whose files were not read; a plan has none."""
    return () if dump.files.planned is not None else dump.files.missing_ranks


def unread_parts(dump: Dump, which: str) -> Iterator[NotChecked]:
    """Yield what ranks hold that were not read, and why, file by file.

    Args:
        dump: The dump.
        which: `first` or `second`.
    """
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
    """Say that a dump has no trace of a step, or that it may be in what was not read of it.

    Args:
        dump: The dump.
        which: `the first` or `the second`.
    """
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
    """Split a dump's absent findings into certain ones and those hidden by unread ranks.

    Args:
        findings: Those that only the other dump has.
        dump: The dump.
        which: `first` or `second`.
    """
    ranks = unread_ranks(dump)
    certain = tuple(
        finding for finding in findings if not ranks or (finding.kind == "incomplete" and not finding.tensor)
    )
    if certain == findings:
        return findings, ()
    count = counted(len(findings) - len(certain), "finding")
    why = f"{count} of the other dump: the checks of the {which} lack {named_ranks(ranks)}"
    return certain, (NotChecked("", why, "run"),)
