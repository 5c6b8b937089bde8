"""Slices that stand twice, and slices computed from a rank's own part of the sequence alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import spans
from shardviz.check.step.forward.reason import Reason
from shardviz.check.step.trace.divergence import is_within
from shardviz.explain.step.forward import PositionsStartAgain, UngatheredKeys
from shardviz.explain.step.gradients import RepeatedMicroBatch
from shardviz.relate.orders import places_of
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.forward.activations import Activation
    from shardviz.layout.mesh import Mesh

MAX_LISTED = 4
EXCHANGES = ("all_gather", "all_to_all", "gather", "send", "recv", "broadcast")
"""Collectives by which a rank gets keys and values of others."""


def check_repeated(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if all slices of the output are the unsharded model's, and some stand there several times."""
    rank = comparison.wrong[0]
    location = places_of(comparison.reduced[rank], comparison.wanted, comparison.tolerance)
    if location is None or np.any(location[1] < 0):
        return None
    dim, places = location
    distinct = len(set(places.tolist()))
    times, remainder = divmod(len(places), distinct)
    if times < 2 or remainder or not np.array_equal(places, np.tile(places[:distinct], times)):
        return None
    parts = evidence.activations.num_micro_batches
    return Reason(
        RepeatedMicroBatch(times=times if parts == times else 0),
        f"on rank {rank} slices {spans(places[:distinct])} of dim {dim} appear {times} times, and others never",
    )


def check_started_again(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if the first odd module returns the same slices on ranks that should have different ones."""
    _, odd = evidence.activations.first_odd
    if odd is None or odd.state != "repeated" or odd.places is None:
        return None
    first = next(iter(odd.places.values()))
    reference = evidence.dump.find("reference", "activation", odd.name)
    parts = reference.shape[odd.dim] / len(first) if reference is not None else 0
    axes = [axis for axis in comparison.mesh.axes if comparison.mesh.axis_size(axis) == parts > 1]
    fitting = [axis for axis in axes if all(_are_alike(odd.places, group) for group in comparison.mesh.groups(axis))]
    if not fitting:
        return None
    axis = " or ".join(fitting)
    return Reason(
        PositionsStartAgain(odd.name, axis),
        f"every rank along {axis} has slices {spans(first)} of dim {odd.dim} of the output of {odd.name} in the "
        "unsharded model, and no rank has the others",
    )


def _are_alike(places: Mapping[int, NDArray[np.int64]], group: tuple[int, ...]) -> bool:
    return all(rank in places and np.array_equal(places[group[0]], places[rank]) for rank in group)


def check_ungathered(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return the reason if ranks have right slices of a dim of their own up to a module whose output is not."""
    before, odd = evidence.activations.first_odd
    axis, dim = _split_before(evidence, comparison, before)
    first = evidence.divergence
    if odd is None or not axis or (first is not None and odd.name not in (first.module, first.before)):
        return None
    if not _is_split_alike(evidence, before[-1], odd, dim):
        return None
    return Reason(
        UngatheredKeys(before[-1].name, odd.name, axis, _exchange_over(evidence, odd.name, axis)),
        f"up to {before[-1].name} each rank along {axis} has the right slices of dim {dim}; {odd.name} "
        f"is the first wrong module{_right_slices(odd)}",
    )


def _exchange_over(evidence: Evidence, module: str, axis: str) -> str:
    """Return the first collective by which ranks along an axis exchange numbers in the module around another one."""
    outer = module.rpartition(".")[0]
    calls = (call for record in evidence.dump.files.ranks.values() for call in record.collectives)
    inside = (call for call in calls if axis in call.axes and call.when == "forward" and call.module != module)
    return next((call.op for call in inside if call.op in EXCHANGES and _is_in(call.module, outer)), "")


def _is_in(module: str, outer: str) -> bool:
    return module == outer or is_within(module, outer)


def _is_split_alike(evidence: Evidence, last: Activation, odd: Activation, dim: int) -> bool:
    """Whether every rank has as many slices of a dim after the odd module as after the last right one."""
    of = evidence.dump.by_name("step", "activation")
    before, after = of[last.name].shards, of[odd.name].shards
    shapes = [(before[rank].body.local_shape, after[rank].body.local_shape) for rank in before.keys() & after.keys()]
    return all(len(one) == len(other) and one[dim] == other[dim] for one, other in shapes)


def _split_before(evidence: Evidence, comparison: Compared, before: list[Activation]) -> tuple[str, int]:
    """Return an axis that does not split the output, and the dim of the last right activation that it splits."""
    if not before or before[-1].state not in ("right", "reordered"):
        return "", 0
    last = before[-1]
    tensor = evidence.dump.by_name("step", "activation")[last.name]
    of_batch = comparison.claimed.split_axes if comparison.claimed is not None else ()
    for axis in (axis for axis in comparison.mesh.axes if axis not in of_batch):
        if last.places is not None and last.dim < len(tensor.shape) - 1 and _differ(last.places, comparison.mesh, axis):
            return axis, last.dim
        if last.places is None and tensor.claimed is not None:
            for dim, chain in enumerate(tensor.claimed.chains[:-1]):
                if axis in chain:
                    return axis, dim
    return "", 0


def _differ(places: Mapping[int, NDArray[np.int64]], mesh: Mesh, axis: str) -> bool:
    return any(
        not set(places[group[0]].tolist()) & set(places[rank].tolist())
        for group in mesh.groups(axis)
        if all(rank in places for rank in group)
        for rank in group[1:]
    )


def _right_slices(odd: Activation) -> str:
    counts = {rank: int(np.count_nonzero(own >= 0)) for rank, own in (odd.places or {}).items()}
    if not any(counts.values()) or odd.places is None:
        return ""
    shown = listed((f"{count} of {len(odd.places[rank])} on rank {rank}" for rank, count in counts.items()), MAX_LISTED)
    return f" ({shown} are right)"
