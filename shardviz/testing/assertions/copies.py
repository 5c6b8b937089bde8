"""Check that copies along an axis are equal, those of gradients up to rounding, and that ties share storage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import msgspec
from numpy.linalg import norm

from shardviz.check.step.comparison import apart_text, laid_out, number, rounding_of
from shardviz.check.values.copies import check_copies, copies_of
from shardviz.check.values.storage import check_ties
from shardviz.dump.dump import Dump, dump_of, hint_at_name
from shardviz.dump.records.tensors import Stamp
from shardviz.dump.tensor import whole_values
from shardviz.errors import DumpError, ShardvizError
from shardviz.explain.finding import Finding
from shardviz.explain.placement.values import BrokenTie, RankDependentSeed
from shardviz.explain.step.sums import GradientNotReduced
from shardviz.explain.testing.assertions import CopiesDrifted, CopiesNotClaimed, OddGradients
from shardviz.layout.notation import write
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.claims.registry import local_tensors, unwrapped
from shardviz.live.claims.wrappers import reducing
from shardviz.live.step.step import gradients
from shardviz.relate.values import farthest
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.testing.assertions.subjects import device_mesh_of, gather_values
from shardviz.text import counted, named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.check.order.case import LaidOut
    from shardviz.check.step.comparison import Compared
    from shardviz.dump.dump import Tensor
    from shardviz.layout.mesh import Mesh


NEAR = 0.5
"""Copies that differ by less than this part of their size have values in common; those of two seeds by more than it."""


def check_axis(dump: Dump, axis: str) -> list[Finding]:
    """Return the tensors whose copies differ along an axis, or that are split or pending there.

    Raises:
        MeshError: The mesh has no such axis.
    """
    mesh = dump.files.mesh
    mesh.axis_index(axis)
    split = list(_not_copies(dump, axis))
    split_names = {finding.tensor for finding in split}
    return split + [finding for finding in _differing_copies(dump, mesh, axis) if finding.tensor not in split_names]


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


def _differing_copies(dump: Dump, mesh: Mesh, axis: str) -> list[Finding]:
    """Return one finding per tensor, with all ranks whose copies differ along the axis."""
    groups = [_restricted(dump, group) for group in mesh.groups(axis)]
    gradients = _of_all_groups(groups, are_gradients=True)
    values = [_reword(finding, mesh, axis) for finding in _of_all_groups(groups, are_gradients=False)]
    if any(_is_of_seeds(finding) and _are_near(finding) for finding in values):  # other seeds leave no copies near
        values = [finding.because(CopiesDrifted(axis)) if _is_of_seeds(finding) else finding for finding in values]
    return values + [_reword_gradient(_reword(finding, mesh, axis), axis) for finding in gradients]


def _of_all_groups(groups: Iterable[Dump], *, are_gradients: bool) -> Iterable[Finding]:
    """Return a finding for each value, or each gradient, whose copies differ in some group of ranks."""
    findings: dict[str, Finding] = {}
    for group in groups:
        tensors = [tensor for tensor in group.tensors if (tensor.role == "grad") == are_gradients]
        for outcome in check_copies(replace(group, tensors=tensors)):
            if isinstance(outcome, Finding):
                ranks = {*findings.get(outcome.tensor, outcome).ranks, *outcome.ranks}
                findings[outcome.tensor] = replace(findings.get(outcome.tensor, outcome), ranks=tuple(sorted(ranks)))
    return findings.values()


def _restricted(dump: Dump, ranks: tuple[int, ...]) -> Dump:
    files = dump.files
    group_ranks = {rank: files.ranks[rank] for rank in ranks if rank in files.ranks}
    return dump_of(replace(files, ranks=group_ranks, damaged={}))


def _reword(finding: Finding, mesh: Mesh, axis: str) -> Finding:
    """Reword a finding for all groups along the axis, without when copies began to differ."""
    sentence = f"copies differ along {axis}: {len(finding.ranks):,} of {mesh.size:,} ranks differ from the other copies"
    return replace(finding, sentence=sentence, intended=f"={axis}")


def _reword_gradient(finding: Finding, axis: str) -> Finding:
    """Reword a finding about a gradient, which no seed or file makes."""
    sentence = finding.sentence.replace("copies", "copies of the gradient", 1)
    return replace(finding, sentence=sentence, kind="unreduced-gradient").because(GradientNotReduced((axis,)))


def _is_of_seeds(finding: Finding) -> bool:
    return isinstance(finding.explanation, RankDependentSeed)


def _are_near(finding: Finding) -> bool:
    """Whether copies are known to differ by less than what they have in common; large ones have digests alone."""
    (pair,) = finding.pairs
    try:
        sides = [(pair.wanted_of(rank), pair.held_of(rank)) for rank in finding.ranks if rank in pair.ranks]
    except DumpError:
        return False
    return all(wanted is not None and norm(held - wanted) < NEAR * norm(wanted) for wanted, held in sides)


def check_tied(dump: Dump, first: str, others: Iterable[str]) -> list[Finding]:
    """Return findings for the names that do not share the first one's storage on some rank.

    Raises:
        ShardAssertionError: No rank has a tensor of one of the names, or no rank has both.
    """
    __tracebackhide__ = True
    shapes = {name: tensor.shape for tensor in dump.tensors for name in tensor.names}
    for name in (first, *others):
        if name not in shapes:
            raise ShardAssertionError(f"no rank has a tensor {name}\n  fix       {hint_at_name(name, [*shapes])}")
    stamps = (Stamp(first, 1, shapes[first]), *(Stamp(name, 1, shapes[name], tied_to=first) for name in others))
    run = msgspec.structs.replace(dump.files.run, stamps=stamps)
    dump_of_ties = Dump(replace(dump.files, run=run), dump.tensors)
    results = list(check_ties(dump_of_ties))
    for outcome in results:
        if not isinstance(outcome, Finding):
            raise ShardAssertionError(f"{outcome.tensor} and {first} cannot be tied: no rank has both")
    return [_reword_tie(result, first) for result in results if isinstance(result, Finding)]


def _reword_tie(finding: Finding, first: str) -> Finding:
    """Reword a broken tie without the state before sharding, which an assertion can't know."""
    sentence = f"it does not share storage with {first} on {counted(len(finding.ranks), 'rank')}"
    cause = BrokenTie(finding.tensor, first, was_tied=False)
    return replace(finding, sentence=sentence, members=()).because(cause)


def with_held(laid_out: LaidOut, findings: Iterable[Finding]) -> list[Finding]:
    """Fill in the layout that ranks hold, read from the ids of a stamped model."""
    return [finding if finding.held else replace(finding, held=_held_layout(laid_out, finding)) for finding in findings]


def _held_layout(laid_out: LaidOut, finding: Finding) -> str:
    """Return the layout in which a tensor is held; empty if its values aren't ids."""
    try:
        cases = laid_out.cases(laid_out.dump.stamped[finding.tensor], finding.tensor)
        case = next(case for case in cases if {*finding.ranks} & {*case.mesh.ranks})
    except (KeyError, StopIteration, ShardvizError):
        return ""
    if case.held:
        return write(case.held, case.tensor.dtype)
    are_ids = bool(case.regions or case.ids) and all((ids > 0).all() for ids in case.ids.values())
    return "a layout that the notation cannot express" if are_ids else ""


def check_reduced(model: nn.Module, axis: str | None, mesh: DeviceMesh | None) -> tuple[Dump, list[Finding]]:
    """Return all ranks' gradients, and findings for copies that differ. Every rank calls this.

    Args:
        axis: The mesh axis along which to compare; None for all of them.

    Raises:
        MeshError: The mesh has no such axis.
        ShardAssertionError: No rank has any gradient.
    """
    __tracebackhide__ = True
    device_mesh = device_mesh_of(model, mesh)
    gradient_locals = gradients(
        list(local_tensors(unwrapped(model), plain_mesh(device_mesh) if device_mesh is not None else None))
    )
    digests = gather_values(gradient_locals, device_mesh, "initial")  # of large ones, digests only
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
    values = gather_values([local for local in gradient_locals if local.name in suspects], device_mesh)
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
