"""`untied`: names that shared storage in the unsharded model and are two tensors now.

They start equal and drift apart, each with a part of the gradient. A name that is gone is not a finding (torch lists a
shared parameter once), and neither are empty shards, which have no storage to share. Stages of a pipeline cannot share
storage: if no rank has both names, the check says that it could not be made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.explain.values import BrokenTie

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.files import RankRecord
    from shardviz.dump.records.tensors import Stamp
    from shardviz.explain.finding import Finding


def check_ties(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield ties of the unsharded model that are broken on some rank."""
    stamps = [stamp for stamp in dump.files.run.stamps if stamp.tied_to]
    if not stamps:
        return
    names = {rank: _names_with_storage(record) for rank, record in dump.files.ranks.items()}
    for stamp in stamps:
        both = [rank for rank, own in names.items() if stamp.name in own and stamp.tied_to in own]
        untied = tuple(sorted(rank for rank in both if not _tied(dump.files.ranks[rank], stamp)))
        if untied:
            yield _finding(stamp, untied, len(both))
        elif not both and all(any(name in own for own in names.values()) for name in (stamp.name, stamp.tied_to)):
            why = f"it was tied to {stamp.tied_to}, and no rank has both now"
            yield NotChecked(stamp.name, why, "ties")


def _names_with_storage(record: RankRecord) -> set[str]:
    """Return the names of a rank's tensors that have storage, without the unsharded model's, which rank 0 runs too."""
    names = set()
    for tensor in record.tensors:
        body = record.bodies[tensor.body]
        if body.moment not in ("reference", "updated", "training") and 0 not in body.local_shape:
            if tensor.numbers:
                numbers = (number for start, stop in tensor.numbers for number in range(start, stop))
                names |= {f"{tensor.name}{number}{tensor.suffix}" for number in numbers}
            else:
                names.add(tensor.name)
    return names


def _tied(record: RankRecord, stamp: Stamp) -> bool:
    return any(stamp.name in group and stamp.tied_to in group for group in record.tied)


def _finding(stamp: Stamp, ranks: tuple[int, ...], num_both: int) -> Finding:
    """Return the finding, of which both names are members."""
    own, other = (_of_name(stamp, name, ranks, num_both) for name in (stamp.name, stamp.tied_to))
    return replace(own, members=(own, other))


def _of_name(stamp: Stamp, name: str, ranks: tuple[int, ...], num_both: int) -> Finding:
    other = stamp.tied_to if name == stamp.name else stamp.name
    return BrokenTie(stamp.name, stamp.tied_to).finding(
        name,
        ranks,
        f"{name} shared storage with {other} before sharding, and no longer does on "
        f"{'all' if len(ranks) == num_both else f'{len(ranks):,} of the'} {num_both:,} ranks that have both",
    )
