"""`untied` and `write-not-applied`: storage no longer shared, and writes that were lost.

Names that shared storage in the unsharded model and are two tensors now start equal and drift apart, each with a part
of the gradient. A name that is gone is not a finding (torch lists a shared parameter once), and neither are empty
shards, which have no storage to share. Stages of a pipeline cannot share storage: if no rank has both names, the check
says that it could not be made.

torch loses in-place writes through some views and subclasses, silently: a loader that copies into one leaves the tensor
as it was. Stamping reads every fill back, so the loss shows before anything is sharded. The steps of an optimizer that
was made before sharding are lost, too: the model has other parameters since.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.explain.placement.content import NeverInitialized
from shardviz.explain.placement.values import BrokenTie, LostWrite
from shardviz.explain.step.update import OptimizerOfOtherParameters
from shardviz.layout.mesh import ranks_by
from shardviz.layout.notation import write
from shardviz.text import Fold

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
        both_names = {stamp.name, stamp.tied_to}
        ranks_with_both = sorted(rank for rank, stored_names in names.items() if both_names <= stored_names)
        tied = {rank: any(both_names <= {*group} for group in dump.files.ranks[rank].tied) for rank in ranks_with_both}
        untied = tuple(rank for rank in ranks_with_both if not tied[rank])
        if untied:
            num_both = len(ranks_with_both)
            finding, partner = (_untied_finding(stamp, name, untied, num_both) for name in (stamp.name, stamp.tied_to))
            yield replace(finding, members=(finding, partner))
        elif not ranks_with_both and both_names <= set().union(*names.values()):
            why = f"it was tied to {stamp.tied_to}, and no rank has both now"
            yield NotChecked(stamp.name, why, "ties")


def check_replaced(dump: Dump) -> Iterator[Finding]:
    """Yield a finding for each parameter whose optimizer steps the tensor from before sharding."""
    ranks_of = ranks_by((rank, name) for rank, record in sorted(dump.files.ranks.items()) for name in record.replaced)
    for name in filter(dump.first_captured.__contains__, ranks_of):
        text = (
            "at the model's first call the optimizer has the tensor from before sharding, and not the model's parameter"
        )
        yield OptimizerOfOtherParameters("sharding").finding(name, tuple(ranks_of[name]), text)


def _names_with_storage(record: RankRecord) -> set[str]:
    """Return the names of a rank's own tensors with storage, the unsharded model's left out."""
    stored = [
        tensor
        for tensor, body in ((tensor, record.bodies[tensor.body]) for tensor in record.tensors)
        if body.moment not in ("reference", "updated", "training") and 0 not in body.local_shape
    ]
    return {name for tensor in stored for name in Fold(tensor.name, tensor.numbers, tensor.suffix).names()}


def _untied_finding(stamp: Stamp, name: str, ranks: tuple[int, ...], num_both: int) -> Finding:
    partner = stamp.tied_to if name == stamp.name else stamp.name
    return BrokenTie(stamp.name, stamp.tied_to).finding(
        name,
        ranks,
        f"{name} shared storage with {partner} before sharding, and no longer does on "
        f"{'all' if len(ranks) == num_both else f'{len(ranks):,} of the'} {num_both:,} ranks that have both",
    )


def check_writes(dump: Dump) -> Iterator[Finding]:
    """Yield every tensor that did not read back as it was filled."""
    lost = ((rank, pair) for rank, record in sorted(dump.files.ranks.items()) for pair in record.not_applied)
    for (name, reason), ranks in ranks_by(lost).items():
        yield LostWrite().finding(name, tuple(ranks), f"an in-place fill did not take: {reason}")


def check_unwritten(dump: Dump) -> Iterator[Finding]:
    """Yield a finding for each parameter that some ranks never wrote to."""
    ranks_of = ranks_by((rank, name) for rank, record in sorted(dump.files.ranks.items()) for name in record.unwritten)
    for name in filter(dump.first_captured.__contains__, ranks_of):
        claimed, ranks = dump.first_captured[name].claimed, ranks_of[name]
        yield NeverInitialized().finding(
            name,
            tuple(ranks),
            "nothing was written to it between to_empty and the model's first call: its values are what was in the "
            "memory before",
            claimed=write(claimed) if claimed else "",
            held="memory that was never written",
        )
