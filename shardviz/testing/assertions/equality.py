"""Compare values, gradients and outputs with a reference's in any layout.

Each rank compares its own part first; only tensors that differ somewhere, or have a pending sum, are exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed

from shardviz.check.order.case import Case
from shardviz.check.order.rules.places import check_places
from shardviz.check.step.comparison import laid_out
from shardviz.check.step.rules.factors import check_scale, check_unreduced
from shardviz.check.step.rules.terms import check_order
from shardviz.dump.tensor import whole_values
from shardviz.errors import ShardvizError
from shardviz.explain.finding import MOST_NAMES
from shardviz.explain.step.scales import ScaledInStep
from shardviz.explain.testing.assertions import (
    AllRanksDiffer,
    ExchangedCoordinate,
    FewElementsDiffer,
    OnlyZeros,
    PartComparedWithWhole,
    SomeRanksDiffer,
    UnexplainedDifference,
    UnrelatedShapes,
    WeightTimesNumber,
    WrongLocalShape,
)
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.layout.region import Region, box_of, index_of, region_of
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import dtype_name
from shardviz.reference.lookup import UNPLACED, bits_of, locate
from shardviz.relate.sides import Rounding
from shardviz.relate.tolerance import ASSERT_CLOSE, ROUNDINGS_OF_ROLE, SAFETY
from shardviz.relate.values import finite_magnitude, is_alike, magnitude
from shardviz.testing.assertions.message import ShardAssertionError, raise_for
from shardviz.testing.assertions.subjects import check_values, device_mesh_of, gather_values, locals_of
from shardviz.testing.assertions.weights import related_weight, with_optimizer, with_ties
from shardviz.text import counted, folded_names, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.check.step.comparison import Compared
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records.base import Role
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.live.claims.local import Local
    from shardviz.testing.assertions.subjects import Subject

    Key = tuple[Role, str]

WEIGHTS = ("param", "buffer", "optim")
Far = Mapping[int, "NDArray[np.bool_]"]
"""The ranks whose values are too far from the reference's, each with the elements that are."""


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor of the reference, with its tolerance.

    Attributes:
        rtol: How far an element may be off, as a part of its own size.
        atol: How far it may be off in any case.
    """

    values: NDArray[np.float64]
    rtol: float
    atol: float

    def is_far(self, got: NDArray[np.float64], wanted: NDArray[np.float64]) -> bool:
        """Whether some element is off; NaN always is."""
        return bool(self.far(got, wanted).any())

    def far(self, got: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which elements are off."""
        return ~np.isclose(got, wanted, self.rtol, self.atol)

    def __str__(self) -> str:
        return f"rtol {self.rtol:g}, atol {self.atol:g}"

    @property
    def rounding(self) -> Rounding:
        """The same tolerance, as the rules for steps take it."""
        size = magnitude(self.values) or 1.0
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
    """Assert that values equal a reference's, which may be sharded differently or not at all.

    Pending sums are computed first. Every rank calls this, with the same reference.

    Args:
        actual: A module, a tensor, an optimizer, or tensors by name.
        reference: The same kind of thing with the same names.
        rtol: How far an element may be off, relative to its own size; by default chosen by the coarser dtype of the
            two. Pass it for a model that computes in a coarser dtype than its parameters have.
        atol: How far an element may be off in any case; by default chosen by the dtype too, plus, for computed values,
            the rounding of sums as large as their largest element.
        of: The roles of the tensors to compare in modules. A gradient that is None must be None in both, which
            is looked at if all else is equal.
        mesh: The mesh of the job; by default the test's, or that of the DTensors.

    Raises:
        ShardAssertionError: An element is off, or one of the two lacks a tensor that the other has.

    Example:
        @spmd(mesh={"tp": 2})
        def test_tensor_parallel_computes_the_same(mesh):
            whole, model = build(), build()
            parallelize(model, mesh)
            x = torch.randn(8, 12)
            for module in (whole, model):
                module(x).square().mean().backward()
            assert_same(model, whole)

        If some elements are wrong on one rank, it fails with a line such as

            weight: 1 of 16 elements is not the reference's, on 1 of 2 ranks: at [3, 1] rank 1 has 0.5, the reference
            has 0 (rtol ...)
    """
    __tracebackhide__ = True
    device_mesh = device_mesh_of(actual, mesh)
    tensors = _by_key(locals_of(actual, device_mesh, of))
    expected = _wanted(tensors, _by_key(locals_of(reference, device_mesh, of)), device_mesh)
    for key, whole in expected.items():
        expected[key] = ExpectedTensor(
            whole.values, whole.rtol if rtol is None else rtol, whole.atol if atol is None else atol
        )
    lacking = _lacking(tensors, expected)
    alone = {key for _, keys in lacking for key in keys}
    if any(role != "grad" for role, _ in alone):
        _refuse_lacking(lacking)
    tensors = {key: local for key, local in tensors.items() if key not in alone}
    suspects = _agree_on_all_ranks({key for key in tensors if _is_suspect(tensors[key], expected[key])})
    if not suspects:
        _refuse_lacking(lacking)
        return
    _check_references(suspects, expected)
    dump = gather_values([local for key, local in tensors.items() if key in suspects], device_mesh)
    findings = [found for tensor in dump.tensors for found in _compare(dump, tensor, expected)]
    findings = _beside_equal(
        findings, [expected[key].values for key in tensors if key[0] == "param" and key not in suspects]
    )
    findings = with_optimizer(findings, [local for (role, _), local in tensors.items() if role == "param"])
    raise_for(dump, with_ties(findings, [local for (role, _), local in tensors.items() if role in ("param", "buffer")]))
    _refuse_lacking(lacking)


def _beside_equal(findings: Sequence[Finding], equal: Sequence[NDArray[np.float64]]) -> list[Finding]:
    """Return findings that say how many other weights are equal; those of one number are equal however they began."""
    num_equal = sum(bool(values.size and (values != values.flat[0]).any()) for values in equal)
    return [
        finding.because(AllRanksDiffer(num_equal)) if isinstance(finding.explanation, AllRanksDiffer) else finding
        for finding in findings
    ]


def _by_key(locals_: Collection[Local]) -> dict[Key, Local]:
    """Return tensors by role and name; complex ones as pairs of real numbers."""
    check_values(locals_)
    return {(local.role, local.name): _real(local) for local in locals_}


def _real(local: Local) -> Local:
    if not local.values.is_complex():
        return local
    return replace(local, values=torch.view_as_real(local.values.resolve_conj()), shape=(*local.shape, 2))


def _wanted(
    tensors: Mapping[Key, Local], reference_locals: Mapping[Key, Local], mesh: DeviceMesh | None
) -> dict[Key, ExpectedTensor]:
    """Return the reference's tensors whole, put together from all ranks if they are sharded."""
    whole = {key: _numbers(local.values) for key, local in reference_locals.items() if local.claim is None}
    sharded = {key: local for key, local in reference_locals.items() if local.claim is not None}
    if sharded:
        dump = gather_values(sharded.values(), mesh)
        for tensor in dump.tensors:
            for name in tensor.names:
                whole[tensor.role, name] = whole_values(dump, tensor, name).reshape(tensor.shape)
    largest = max((finite_magnitude(values) for (role, _), values in whole.items() if role == "grad"), default=0.0)
    expected = {}
    for key, values in whole.items():
        dtypes = {reference_locals[key].values.dtype, tensors.get(key, reference_locals[key]).values.dtype}
        size = max(finite_magnitude(values), largest if key[0] == "grad" else 0.0)
        expected[key] = ExpectedTensor(values, *_tolerance(dtypes, ROUNDINGS_OF_ROLE.get(key[0], 0.0) * size))
    return expected


def _tolerance(dtypes: Collection[torch.dtype], rounded: float) -> tuple[float, float]:
    """Return rtol and atol; `rounded` is how much an element may be off by, in units of eps."""
    rtols, atols = zip(*(ASSERT_CLOSE.get(dtype_name(dtype), (0.0, 0.0)) for dtype in dtypes), strict=True)
    eps = max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0 for dtype in dtypes)
    return max(rtols), max(*atols, rounded * eps)


def _numbers(values: torch.Tensor) -> NDArray[np.float64]:
    return np.asarray(values.detach().to(torch.float64).cpu().numpy())


def _lacking(tensors: Mapping[Key, Local], expected: Mapping[Key, ExpectedTensor]) -> list[tuple[str, set[Key]]]:
    """Return what one side has on some rank and the other lacks. Every rank calls this."""
    sides = (
        ("the reference has no", set(tensors) - set(expected)),
        ("only the reference has", set(expected) - set(tensors)),
    )
    return [(what, keys) for what, side in sides if (keys := _agree_on_all_ranks(side))]


def _refuse_lacking(lacking: Sequence[tuple[str, set[Key]]]) -> None:
    """Fail if one side has a tensor that the other lacks."""
    __tracebackhide__ = True
    if lacking:
        raise ShardAssertionError(
            f"{'; '.join(f'{what} {_listed_keys(keys)}' for what, keys in lacking)}\n"
            "  fix       compare only what both have, with of=(...) or tensors by name"
        )


def _listed_keys(keys: Collection[Key]) -> str:
    """List names by role, identical layers as one: `param layers.[0-3].w, ... (7 in all)`."""
    roles = sorted({role for role, _ in keys})
    names = {of: sorted((name for role, name in keys if role == of), key=natural_key) for of in roles}
    listed = "; ".join(f"{role} {printable(folded_names(names[role], MOST_NAMES))}" for role in roles)
    return listed if len(keys) == 1 else f"{listed} ({len(keys):,} in all)"


def _check_references(suspects: set[Key], expected: Mapping[Key, ExpectedTensor]) -> None:
    """Fail on every rank if ranks have different references: the right one is unknown."""
    __tracebackhide__ = True
    first = [{key: expected[key].values for key in suspects & set(expected)}]
    distributed.broadcast_object_list(first)
    others = {
        key
        for key in first[0].keys() & expected.keys()
        if not np.array_equal(first[0][key], expected[key].values, equal_nan=True)
        and expected[key].is_far(first[0][key], expected[key].values)
    }
    for role, name in sorted(_agree_on_all_ranks(others)):
        raise ShardAssertionError(
            f"{role} {name}: the reference is not the same on every rank\n"
            "  fix       make it the same on all ranks: the same seed before its weights are drawn, and the same batch"
        )


def _agree_on_all_ranks(mine: set[Key]) -> set[Key]:
    return set().union(*of_all_ranks(mine))


def _is_suspect(local: Local, expected: ExpectedTensor) -> bool:
    if local.claim is None:
        region = Region.whole(expected.values.shape)
    else:
        mesh, placements = local.claim
        layout = Layout.from_placements(mesh, local.claimed_shape, placements)
        if layout.partial or local.flat or local.shape != expected.values.shape:
            return True
        region = layout.region_of_rank(distributed.get_rank())
    got = _numbers(local.values)
    if region.shape != got.shape:
        return True
    return expected.is_far(got, expected.values.ravel()[region.flat_ids(expected.values.shape)].reshape(got.shape))


def _compare(dump: Dump, tensor: Tensor, expected: Mapping[Key, ExpectedTensor]) -> list[Finding]:
    """Return the findings of a tensor; names of other pipeline stages are left to their ranks."""
    findings = []
    for name in tensor.names:
        if (tensor.role, name) not in expected:
            continue
        reference = expected[tensor.role, name]
        if tensor.shape != reference.values.shape:
            findings.append(shape_finding(tensor, name, reference.values.shape))
            continue
        comparison = laid_out(dump, tensor, name, reference.values, reference.rounding)
        if any(values.shape != comparison.regions[rank].shape for rank, values in comparison.values.items()):
            findings.append(shape_finding(tensor, name, reference.values.shape))
            continue
        far = {rank: reference.far(got, comparison.wanted_of(rank)) for rank, got in comparison.reduced.items()}
        if off := {rank: elements for rank, elements in far.items() if elements.any()}:
            references = {other: whole.values for (role, other), whole in expected.items() if role == tensor.role}
            findings += explain_difference(dump, tensor, comparison, off, str(reference), references)
    return findings


def explain_difference(
    dump: Dump,
    tensor: Tensor,
    comparison: Compared,
    far: Far,
    tolerance: str,
    references: Mapping[str, NDArray[np.float64]],
) -> list[Finding]:
    """Return findings with a difference's known cause, or else its worst element.

    Args:
        far: The ranks whose values are too far from it, and which of them.
        references: The reference's tensors of the same role, by name.
    """
    if placed := place_findings(dump, tensor, comparison):
        return placed
    if comparison.role in WEIGHTS and (related := related_weight(comparison, references)) is not None:
        return [related]
    is_grad = comparison.role == "grad"
    alike = replace(comparison, role="grad" if is_grad else "scalar", whose="the reference's")
    computed = alike if is_grad else replace(alike, role="output")
    explanation = None if comparison.role in WEIGHTS else check_unreduced(None, computed) or check_order(computed)
    explanation = explanation or check_scale(alike)
    if (
        explanation is not None
        and comparison.role in ("param", "buffer")
        and isinstance(explanation.explanation, ScaledInStep)
    ):
        explanation = explanation.because(WeightTimesNumber())
    return [_value(comparison, far, tolerance) if explanation is None else replace(explanation, ranks=tuple(far))]


def shape_finding(tensor: Tensor, name: str, shape: Sequence[int]) -> Finding:
    """Return the finding for a tensor whose shape isn't its reference's, with the likely cause."""
    return _of_shapes(tensor, tuple(shape)).finding(
        name,
        tuple(tensor.shards),
        f"its shape is {list(tensor.shape)} ({list(tensor.first.body.local_shape)} on rank {tensor.first.rank}), but "
        f"the reference's is {list(shape)}",
        claimed=write(tensor.claimed) if tensor.claimed else "",
    )


def _of_shapes(tensor: Tensor, shape: tuple[int, ...]) -> Cause:
    """Return the cause of a shape: one side is the other's part, or has local shapes."""
    actual = tensor.shape
    if actual == shape:
        return WrongLocalShape()
    odd = [dim for dim, (one, other) in enumerate(zip(actual, shape, strict=False)) if one != other]
    if len(actual) != len(shape) or len(odd) != 1 or not min(actual[odd[0]], shape[odd[0]]):
        return UnrelatedShapes()
    return PartComparedWithWhole(odd[0], actual[odd[0]], shape[odd[0]], is_plain=tensor.claimed is None)


def place_findings(dump: Dump, tensor: Tensor, comparison: Compared) -> list[Finding]:
    """Return findings if ranks hold the reference's values at places that they don't claim.

    Nearly unique values are as good as ids; repeated ones are distinguished by their neighbors.
    """
    if (
        comparison.claimed is None
        or comparison.claimed.flat
        or not set(comparison.reduced) <= set(comparison.mesh.ranks)
    ):
        return []
    whole = bits_of(comparison.wanted + 0.0)  # minus zero is zero
    if is_alike(whole):
        return []
    regions, ids = {}, {}
    for rank, got in comparison.reduced.items():
        elements = locate(bits_of(got + 0.0), whole, comparison.claimed.region(comparison.mesh.coord_of(rank)))
        if (elements == UNPLACED).any():
            return []
        region, coord = region_of(elements, comparison.wanted.shape), comparison.mesh.coord_of(rank)
        if region is not None:
            regions[coord] = region
        else:
            ids[coord] = elements
    shards = {comparison.mesh.coord_of(rank): tensor.shards[rank] for rank in comparison.reduced}
    try:
        findings = list(
            check_places(Case(dump, tensor, comparison.name, comparison.mesh, comparison.claimed, shards, regions, ids))
        )
    except ShardvizError:
        return []
    return [
        replace(finding, sentence=f"the values are the reference's, but {finding.sentence}") for finding in findings
    ]


def _value(comparison: Compared, far: Far, tolerance: str) -> Finding:
    off, apart = _wrong_elements(comparison, far), {rank: _errors(comparison, rank) for rank in far}
    rank = max(far, key=lambda rank: float(np.max(apart[rank], initial=0.0)))
    at = int(np.argmax(apart[rank]))
    got, expected = comparison.reduced[rank].ravel()[at], comparison.wanted_of(rank).ravel()[at]
    place = index_of(
        int(comparison.regions[rank].flat_ids(comparison.wanted.shape).ravel()[at]), comparison.wanted.shape
    )
    box, is_part = box_of(off), all(2 * elements.sum() < elements.size for elements in far.values())
    cause = _of_part(comparison, far) if is_part else _of_values(comparison, far)
    return cause.finding(
        comparison.name,
        tuple(far),
        f"{off.sum():,} of {counted(off.size, 'element')} {'is' if off.sum() == 1 else 'are'} not the reference's"
        f"{f', all of {box}' if box else ''}, on {len(far):,} of {counted(len(comparison.reduced), 'rank')}: at "
        f"{place} rank {rank} has {got:.6g}, the reference has {expected:.6g} ({tolerance})",
        claimed=write(comparison.claimed) if comparison.claimed else "",
    )


def _wrong_elements(comparison: Compared, far: Far) -> NDArray[np.bool_]:
    """Return which elements of the whole tensor are off on some rank."""
    off = np.zeros(comparison.wanted.shape, np.bool_)
    for rank, elements in far.items():
        off.ravel()[comparison.regions[rank].flat_ids(comparison.wanted.shape)[elements]] = True
    return off


def _of_part(comparison: Compared, far: Far) -> Cause:
    """Return the likely cause of a difference in few elements; it isn't seed, file or batch."""
    if comparison.role not in WEIGHTS:
        return FewElementsDiffer("result")
    are_zero = all(not comparison.reduced[rank][elements].any() for rank, elements in far.items())
    return FewElementsDiffer("zeros" if are_zero else "weight")


def _of_values(comparison: Compared, far: Far) -> Cause:
    """Return the likely cause of a difference that no rule explains."""
    of_all = len(far) == len(comparison.reduced)
    if comparison.role not in WEIGHTS:
        return UnexplainedDifference(of_all)
    if all(not comparison.reduced[rank].any() for rank in far):
        return OnlyZeros(of_all)
    return AllRanksDiffer() if of_all else _exchanged_coordinate(comparison, far) or SomeRanksDiffer()


def _exchanged_coordinate(comparison: Compared, far: Far) -> Cause | None:
    """Return the cause if exactly the ranks whose coordinates differ along two axes are wrong."""
    mesh, claimed = comparison.mesh, comparison.claimed
    for axis, instead in product(claimed.split_axes if claimed else (), mesh.axes):
        if axis != instead and mesh.axis_size(axis) == mesh.axis_size(instead) > 1:
            first, second = mesh.axis_index(axis), mesh.axis_index(instead)
            odd = {rank for rank in comparison.reduced if mesh.coord_of(rank)[first] != mesh.coord_of(rank)[second]}
            if odd == set(far):
                return ExchangedCoordinate(axis, instead)
    return None


def _errors(comparison: Compared, rank: int) -> NDArray[np.float64]:
    """Return how far each element of a rank is off; NaN is farthest."""
    got, expected = comparison.reduced[rank].ravel(), comparison.wanted_of(rank).ravel()
    with np.errstate(invalid="ignore"):
        apart = np.abs(got - expected)
    return np.where(got == expected, 0.0, np.where(np.isnan(apart), np.inf, apart))
