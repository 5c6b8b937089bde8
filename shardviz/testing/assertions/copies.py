"""Checks that copies along one axis are equal, in each group of ranks along it separately."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.values.copies import check_copies
from shardviz.dump.dump import Dump, dump_of
from shardviz.explain.assertions import CopiesNotClaimed
from shardviz.explain.finding import Finding
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.layout.mesh import Mesh


def check_axis(dump: Dump, axis: str) -> list[Finding]:
    """Return the tensors whose copies differ along an axis, or that are split or pending there.

    Raises:
        MeshError: The mesh has no such axis.
    """
    mesh = dump.files.mesh
    mesh.axis_index(axis)
    split = list(_not_copies(dump, axis))
    known = {finding.tensor for finding in split}
    return split + [finding for finding in _differing(dump, mesh, axis) if finding.tensor not in known]


def _not_copies(dump: Dump, axis: str) -> Iterator[Finding]:
    for tensor in dump.at("initial"):
        layout = tensor.claimed
        if layout is None or axis not in layout.mesh.axes or axis in layout.replicate_axes:
            continue
        what = "split" if axis in layout.split_axes else "a pending sum"
        for name in tensor.names:
            yield CopiesNotClaimed(axis).finding(
                name,
                tuple(tensor.shards),
                f"it is {what} over {axis}, but equal copies are intended",
                claimed=write(layout, tensor.dtype),
                intended=f"={axis}",
            )


def _differing(dump: Dump, mesh: Mesh, axis: str) -> list[Finding]:
    """Return one finding per tensor, with the ranks of all groups along the axis in which copies differ."""
    found: dict[str, Finding] = {}
    for group in mesh.groups(axis):
        for result in check_copies(_restricted(dump, group)):
            if isinstance(result, Finding):
                ranks = {*found.get(result.tensor, result).ranks, *result.ranks}
                found[result.tensor] = replace(found.get(result.tensor, result), ranks=tuple(sorted(ranks)))
    return [_reworded(finding, mesh, axis) for finding in found.values()]


def _restricted(dump: Dump, ranks: tuple[int, ...]) -> Dump:
    files = dump.files
    kept = {rank: files.ranks[rank] for rank in ranks if rank in files.ranks}
    return dump_of(replace(files, ranks=kept, damaged={}))


def _reworded(finding: Finding, mesh: Mesh, axis: str) -> Finding:
    """Count over all groups along the axis, and leave out when copies began to differ: an assertion cannot know."""
    sentence = f"copies differ along {axis}: {len(finding.ranks):,} of {mesh.size:,} ranks differ from the other copies"
    return replace(finding, sentence=sentence, intended=f"={axis}")
