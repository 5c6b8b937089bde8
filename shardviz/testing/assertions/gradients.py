"""Check that copies of a gradient are equal: by digests, then by values, up to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardviz.check.step.comparison import apart_text, laid_out, number, rounding_of
from shardviz.check.values.copies import copies_of
from shardviz.dump.tensor import whole_values
from shardviz.explain.step.sums import GradientNotReduced
from shardviz.explain.testing.assertions import OddGradients
from shardviz.layout.notation import write
from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.claims.wrappers import reducing
from shardviz.live.step.step import gradients
from shardviz.relate.values import farthest
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.testing.assertions.subjects import device_mesh_of, gather
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.check.step.comparison import Compared
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.live.capture.capture import Capture


def check_reduced(model: nn.Module, axis: str | None, mesh: DeviceMesh | None) -> tuple[Dump, list[Finding]]:
    """Return all ranks' gradients, and findings for copies that differ. Every rank calls this.

    Args:
        model: A module, after its backward.
        axis: The mesh axis along which to compare; None for all of them.
        mesh: The mesh of the job.

    Raises:
        MeshError: The mesh has no such axis.
        ShardAssertionError: No rank has any gradient.
    """
    __tracebackhide__ = True
    device_mesh = device_mesh_of(model, mesh)
    gradient_locals = gradients(
        list(local_tensors(unwrapped(model), plain_mesh(device_mesh) if device_mesh is not None else None))
    )

    def add_digests(seen: Capture) -> None:
        for local in gradient_locals:
            seen.add_values(local, "initial")

    digests = gather(add_digests, device_mesh)
    if axis is not None:
        digests.files.mesh.axis_index(axis)
    if not digests.tensors:
        raise ShardAssertionError(
            "no parameter has a gradient on any rank\n"
            "  fix       call backward() first; if FSDP2 accumulates (set_requires_gradient_sync(False), "
            "set_requires_all_reduce(False)), gradients appear after the last micro-batch"
        )
    suspects = {tensor.names[at] for tensor in digests.tensors for at in _differing_names(tensor)}
    if not suspects:
        return digests, []

    def add_dense(capture: Capture) -> None:
        for local in gradient_locals:
            if local.name in suspects:
                capture.add_values(local, "step")

    values = gather(add_dense, device_mesh)
    wrapped = {name for record in reducing(model) for name in record.names}
    return values, [finding for tensor in values.tensors for finding in _findings(values, tensor, axis, wrapped)]


def _differing_names(tensor: Tensor) -> list[int]:
    """Return the positions of the fold's names whose copies differ in any bit."""
    groups = copies_of(tensor, None)
    return [
        at for at in range(len(tensor.names)) if any(len({shard.digest(at) for shard in group}) > 1 for group in groups)
    ]


def _findings(dump: Dump, tensor: Tensor, axis: str | None, wrapped: Collection[str]) -> list[Finding]:
    rounding = rounding_of(dump)
    findings = []
    for name in tensor.names:
        comparison = laid_out(dump, tensor, name, whole_values(dump, tensor, name), rounding)
        if axes := tuple(along for along in comparison.copies_differ_along if axis in (None, along)):
            findings.append(_finding(comparison, axes, is_wrapped=name in wrapped))
    return findings


def _finding(comparison: Compared, differing: tuple[str, ...], *, is_wrapped: bool) -> Finding:
    """Return the finding for copies that differ; whether sum or mean is right isn't known."""
    axes = " and ".join(differing)
    claimed = write(comparison.claimed, equal=True) if comparison.claimed else ""
    intended = " ".join(f"={axis}" for axis in differing)
    if len(differing) == 1 and (odd := _odd_ranks(comparison, differing[0])):
        words = named_ranks(tuple(odd))
        apart = max(farthest(comparison.reduced[rank], comparison.reduced[most]) for rank, most in odd.items())
        return OddGradients(words).finding(
            comparison.name,
            tuple(odd),
            f"the gradient differs along {axes}: {words} by up to {number(apart)}, and all other copies agree",
            claimed=claimed,
            held=f"other values on {words}",
            intended=intended,
        )
    neighbors = comparison.neighbors_apart([group for axis in differing for group in comparison.mesh.groups(axis)])
    low, high, worst = max(neighbors, key=lambda pair: pair[2])
    ranks = {
        rank for first, second, apart in neighbors if not apart <= comparison.tolerance for rank in (first, second)
    }
    others = next((axis for axis in comparison.mesh.axes if axis not in differing), "")
    is_labeled = bool(comparison.claimed)
    wrapper: Literal["", "own_code"] = "" if is_wrapped or is_labeled else "own_code"
    return GradientNotReduced(differing, other_axis="" if is_labeled else others, wrapper=wrapper).finding(
        comparison.name,
        tuple(sorted(ranks)),
        f"the gradient differs along {axes}: {apart_text(low, high, worst)}",
        claimed=claimed,
        held=f"each rank's own part (+{', +'.join(differing)})",
        intended=intended,
    )


def _odd_ranks(comparison: Compared, axis: str) -> dict[int, int]:
    """Return the ranks whose copies differ from most others along an axis, each with a rank of the most.

    There are none if some copies differ and no half of them agrees. Zeros that agree show nothing: those ranks had no
    input for this weight.
    """
    odd: dict[int, int] = {}
    for group in comparison.mesh.groups(axis):
        alike: list[list[int]] = []
        for rank in (rank for rank in group if rank in comparison.reduced):
            held = comparison.reduced[rank]
            equal = next((ranks for ranks in alike if comparison.are_equal(comparison.reduced[ranks[0]], held)), None)
            if equal is None:
                alike.append([rank])
            else:
                equal.append(rank)
        most = max(alike, key=len, default=[])
        if len(alike) > 1 and not (2 * len(most) > sum(map(len, alike)) and comparison.reduced[most[0]].any()):
            return {}
        odd |= {rank: most[0] for ranks in alike if ranks is not most for rank in ranks}
    return dict(sorted(odd.items()))
