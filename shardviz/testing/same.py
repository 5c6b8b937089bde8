"""Values, gradients and outputs, whatever their layout, beside those of a reference.

Each rank compares its own part first; only tensors that are off somewhere, or wait for a sum, go round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed

from shardviz.check.finding import Finding
from shardviz.check.step.compared import SAFETY, Rounding, laid_out
from shardviz.check.step.gradients import check_gradient
from shardviz.check.step.scale import check_scale
from shardviz.layout import Layout
from shardviz.region import Region
from shardviz.testing.gathering import gather
from shardviz.testing.message import ShardAssertionError, raise_for
from shardviz.testing.reduced import assembled
from shardviz.testing.subjects import device_mesh_of, locals_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.check.step.compared import Compared
    from shardviz.dump.records import Role
    from shardviz.dump.tensors import Model, Tensor
    from shardviz.live.capture import Capture, Local
    from shardviz.testing.subjects import Subject

    Key = tuple[Role, str]

TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}
"""rtol and atol by dtype, those of `torch.testing.assert_close`; other dtypes must be equal."""


@dataclass(frozen=True)
class Wanted:
    """What the reference says of one tensor.

    Attributes:
        values: All of it.
        rtol: How far an element may be off, as a part of its own size.
        atol: How far it may be off in any case.
    """

    values: NDArray[np.float64]
    rtol: float
    atol: float

    def is_far(self, got: NDArray[np.float64], wanted: NDArray[np.float64]) -> bool:
        """Whether some element is off; NaN always is."""
        return not np.allclose(got, wanted, self.rtol, self.atol)

    @property
    def rounding(self) -> Rounding:
        """The same tolerance, as the rules for steps take it."""
        size = float(np.max(np.abs(self.values), initial=0.0)) or 1.0
        return Rounding((self.atol + self.rtol * size) / (SAFETY * size), 1, size)


def assert_same(
    actual: Subject,
    reference: Subject,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    of: Collection[Role] = ("param", "buffer", "grad"),
    mesh: DeviceMesh | None = None,
) -> None:
    """Assert that values are those of a reference that is laid out in another way, or not sharded at all.

    Sums that placements say are pending are made first. Every rank calls this, with the same reference.

    Args:
        actual: A module, a tensor, an optimizer, or tensors by name.
        reference: The same kind of thing with the same names.
        rtol: How far an element may be off, as a part of its own size; by default by the coarser dtype of the two.
        atol: How far it may be off in any case; by default by the dtype too.
        of: What is looked at in modules. A gradient that is None must be None in both.
        mesh: The mesh of the job; by default the test's, or that of the DTensors.

    Raises:
        ShardAssertionError: An element is off, or one of the two lacks a tensor that the other has.
    """
    __tracebackhide__ = True
    known = device_mesh_of(actual, mesh)
    own = {(local.role, local.name): local for local in locals_of(actual, known, of)}
    wanted = _wanted(own, {(local.role, local.name): local for local in locals_of(reference, known, of)}, known)
    for key, local in wanted.items():
        if rtol is not None or atol is not None:
            wanted[key] = Wanted(local.values, rtol or 0.0, atol or 0.0)
    _check_names(own, wanted)
    suspects = _agreed({key for key in own if _is_suspect(own[key], wanted[key])})
    if not suspects:
        return

    def add(seen: Capture) -> None:
        for key, local in own.items():
            if key in suspects:
                seen.add_values(local, "step")

    model = gather(add, known)
    findings = [found for tensor in model.tensors for found in _compare(model, tensor, wanted)]
    raise_for(model, findings)


def _wanted(own: Mapping[Key, Local], theirs: Mapping[Key, Local], mesh: DeviceMesh | None) -> dict[Key, Wanted]:
    """Return the reference's tensors whole, put together from all ranks where they are sharded."""
    whole = {key: _numbers(local.values) for key, local in theirs.items() if local.claim is None}
    sharded = {key: local for key, local in theirs.items() if local.claim is not None}
    if sharded:

        def add(seen: Capture) -> None:
            for local in sharded.values():
                seen.add_values(local, "step")

        model = gather(add, mesh)
        for tensor in model.tensors:
            for name in tensor.names:
                whole[tensor.role, name] = assembled(model, tensor, name).reshape(tensor.shape)
    dtypes = {key: (local.values.dtype, own[key].values.dtype if key in own else None) for key, local in theirs.items()}
    return {key: Wanted(values, *_tolerance(*dtypes[key])) for key, values in whole.items()}


def _tolerance(one: torch.dtype, other: torch.dtype | None) -> tuple[float, float]:
    found = [TOLERANCES.get(dtype, (0.0, 0.0)) for dtype in (one, other) if dtype is not None]
    return max(rtol for rtol, _ in found), max(atol for _, atol in found)


def _numbers(values: torch.Tensor) -> NDArray[np.float64]:
    return np.asarray(values.detach().to(torch.float64).cpu().numpy())


def _check_names(own: Mapping[Key, Local], wanted: Mapping[Key, Wanted]) -> None:
    """Fail on every rank if, on any, one side has a tensor that the other lacks."""
    __tracebackhide__ = True
    for what, lacking in (
        ("the reference has no", set(own) - set(wanted)),
        ("the reference alone has", set(wanted) - set(own)),
    ):
        for role, name in sorted(_agreed(lacking)):
            raise ShardAssertionError(
                f"{what} {role} {name}\n  fix       compare what both have: of=(...), or tensors by name"
            )


def _agreed(mine: set[Key]) -> set[Key]:
    of_all: list[set[Key]] = [set() for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(of_all, mine)
    return set().union(*of_all)


def _is_suspect(local: Local, wanted: Wanted) -> bool:
    if local.claim is None:
        part = Region.whole(wanted.values.shape)
    else:
        mesh, placements = local.claim
        shape = (local.flat[1],) if local.flat else local.shape
        layout = Layout.from_placements(mesh, shape, placements)
        if layout.partial or local.flat or local.shape != wanted.values.shape:
            return True
        part = layout.region(mesh.coord_of(distributed.get_rank()))
    got = _numbers(local.values)
    if part.shape != got.shape:
        return True
    return wanted.is_far(got, wanted.values.ravel()[part.flat_ids(wanted.values.shape)].reshape(got.shape))


def _compare(model: Model, tensor: Tensor, wanted: Mapping[Key, Wanted]) -> list[Finding]:
    found = []
    for name in tensor.names:
        reference = wanted[tensor.role, name]
        if tensor.shape != reference.values.shape:
            found.append(_misshapen(tensor, name, reference))
            continue
        one = laid_out(model, tensor, name, reference.values, reference.rounding)
        if any(values.shape != one.regions[rank].shape for rank, values in one.values.items()):
            found.append(_misshapen(tensor, name, reference))
        elif far := [rank for rank, got in one.reduced.items() if reference.is_far(got, one.wanted_of(rank))]:
            found.append(_explained(one, reference, far))
    return found


def _explained(one: Compared, reference: Wanted, far: list[int]) -> Finding:
    """Name what is known to give such a difference, or else the element that is farthest off."""
    alike = replace(one, role=one.role if one.role == "grad" else "scalar")
    finding = (check_gradient(alike) if one.role == "grad" else None) or check_scale(alike)
    if finding is not None:
        summary = finding.summary.replace("the unsharded model's", "the reference's")
        return replace(finding, ranks=tuple(far), summary=summary)
    rank = max(far, key=lambda rank: float(np.max(np.abs(one.reduced[rank] - one.wanted_of(rank)), initial=0.0)))
    got, wanted = one.reduced[rank].ravel(), one.wanted_of(rank).ravel()
    at = int(np.argmax(np.where(np.isnan(got), np.inf, np.abs(got - wanted))))
    number = int(one.regions[rank].flat_ids(one.wanted.shape).ravel()[at])
    index = [int(i) for i in np.unravel_index(number, reference.values.shape)] if reference.values.shape else []
    return Finding(
        "wrong-value",
        "error",
        one.name,
        tuple(far),
        f"{len(far)} of {len(one.reduced)} ranks hold other values than the reference: at {index} rank {rank} has "
        f"{got[at]:.6g}, the reference {wanted[at]:.6g} (rtol {reference.rtol:g}, atol {reference.atol:g})",
        claimed=_claimed(one.claimed),
        fix="start both from the same weights and the same batch; if they do, this tensor goes wrong on these ranks",
    )


def _misshapen(tensor: Tensor, name: str, reference: Wanted) -> Finding:
    return Finding(
        "wrong-shape",
        "error",
        name,
        tuple(tensor.shards),
        f"its shape is {list(tensor.shape)} ({list(tensor.first.body.local_shape)} on rank {tensor.first.rank}), the "
        f"reference's {list(reference.values.shape)}",
        claimed=_claimed(tensor.claimed),
        fix="give the placements to the local tensor, DTensor.from_local, so that its part is known",
    )


def _claimed(layout: Layout | None) -> str:
    from shardviz.notation import write

    return write(layout) if layout else ""
