"""Where the wrong elements of received tensors come from: their values are looked up in what was sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import distributed

from shardviz.check.run import report_on
from shardviz.dump.records.tensors import Stamp
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import Known, add_by_reference
from shardviz.live.capture.meshes import plain_mesh, without_axes
from shardviz.live.capture.stamp import Stamped
from shardviz.testing.assertions.subjects import gather

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.live.claims.local import Local
    from shardviz.testing.trips.judging import TargetTensor

PLACED = "what was sent"
"""What ids stand for, in the words of findings."""


def places(
    locals_: Mapping[str, Local],
    targets: Mapping[str, TargetTensor],
    names: Sequence[str],
    mesh: DeviceMesh | None,
    reference: str = PLACED,
) -> list[Finding]:
    """Return findings that locate the wrong elements of some tensors. Every rank calls this.

    Args:
        targets: What it should have; the others' elements are looked for in these too.
    """
    reference_entries = _reference_of(
        {name: target for name, target in targets.items() if target.entry.dtype != "bool"}
    )
    dropped = _stage_axes(locals_, mesh)
    rank = distributed.get_rank()
    tensors = [
        replace(local, role="param", claim=local.claim and without_axes(local.claim, dropped, rank))
        for name in names
        if (local := locals_.get(name)) is not None and name in reference_entries.stamps  # of flags nothing can be said
    ]
    stamps = Stamped(tuple(reference_entries.stamps.values()))
    dump = gather(lambda seen: add_by_reference(seen, tensors, reference_entries), mesh, stamps, reference)
    report = report_on(dump)
    each = [placed for finding in report.findings for placed in finding.each]
    findings = [finding for finding in each if finding.tensor in names and finding.kind not in ("incomplete", "untied")]
    same = {
        (finding.tensor, finding.held or finding.kind): finding for finding in reversed(findings)
    }  # what is twice somewhere is missing too
    return [finding for finding in findings if same[finding.tensor, finding.held or finding.kind] is finding]


def _reference_of(targets: Mapping[str, TargetTensor]) -> Known:
    stamps: dict[str, Stamp] = {}
    first = 1
    for name, target in targets.items():
        stamps[name] = Stamp(name, first, tuple(target.entry.shape), "param")
        first += int(np.prod(target.entry.shape))
    return Known(stamps, {name: target.entry for name, target in targets.items()}, is_stamped=True)


def _stage_axes(locals_: Mapping[str, Local], mesh: DeviceMesh | None) -> list[str]:
    """Return the axes along which ranks have different tensors, as pipeline stages do."""
    if mesh is None:
        return []
    of_all = of_all_ranks(frozenset(locals_))
    plain: Mesh = plain_mesh(mesh)
    return [
        axis for axis in plain.axes if any(len({of_all[rank] for rank in group}) > 1 for group in plain.groups(axis))
    ]
