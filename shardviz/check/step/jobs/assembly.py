"""Two jobs' traces as one dump in memory, and what the rules for a probe's step find in it.

Where modules draw random numbers, as dropout does, two jobs draw others, and what follows cannot be compared. What the
ranks of one job draw can: they must keep the same elements of copies, and others of different parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from shardviz.check.report import NotChecked, findings_in
from shardviz.check.step.contradictions import check_no_gradient
from shardviz.check.step.evidence import Evidence
from shardviz.check.step.jobs.gradients import (
    Clips,
    broken_ties,
    by_another_norm,
    divided,
    of_loss,
    of_size_before,
    scaled_by_owners,
    with_others_reduced,
    with_round_norms,
)
from shardviz.check.step.jobs.line_values import add_lines
from shardviz.check.step.jobs.loss_weights import cause_in_router, of_unequal_losses, terms_of_micro_batches
from shardviz.check.step.jobs.starts import coarsest_of
from shardviz.check.step.rules.all_gradients import of_all_gradients
from shardviz.check.step.rules.summands import of_micro_batches, reduced_as_others
from shardviz.check.step.run import explained, seen_in
from shardviz.check.step.trace.calls import Call, is_within
from shardviz.check.step.trace.causes import with_start_of_order
from shardviz.check.step.trace.divergence import Divergence, blamed_by_weights, first_in_backward, first_in_forward
from shardviz.check.step.trace.naming import of_output, placed, with_cut
from shardviz.check.step.trace.traces import JobTrace, Point, Weight, largest_of
from shardviz.dump.dump import Dump, dump_of
from shardviz.dump.read import DumpFiles
from shardviz.dump.records.files import RankRecord
from shardviz.dump.records.step import NoiseRecord, of_micro_batch
from shardviz.dump.records.tensors import Body, FlatRecord, LayoutRecord, MeshRecord, TensorRecord
from shardviz.dump.records.trace import LinesRecord, Place
from shardviz.explain.finding import Finding
from shardviz.explain.step.forward import PositionsStartAgain, RepeatedParts
from shardviz.explain.step.modules import LayerOnTwoStages, UnexplainedInput, UnexplainedModuleBackward
from shardviz.explain.step.whole_step import DifferentMasks, IdenticalMasks, UnexplainedForward
from shardviz.groups import the_only
from shardviz.layout.placements import Replicate, Shard
from shardviz.relate.factors import pairs_along
from shardviz.relate.tolerance import EPSILON, NOISE, POINT_EPSILON, allowed_in_narrow
from shardviz.relate.values import farthest, magnitude

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.starts import Belonging, Weights
    from shardviz.check.step.trace.judging import Judging
    from shardviz.dump.records.base import Moment, Role
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region


@dataclass(frozen=True)
class InMemory(DumpFiles):
    """The files of a dump that nobody wrote.

    Attributes:
        arrays: Its dense values, by rank and name.
    """

    arrays: dict[tuple[int, str], NDArray[np.float64]] = field(default_factory=dict)

    def dense(self, rank: int, key: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Return one array."""
        return self.arrays[rank, key].reshape(shape)


@dataclass
class _Rank:
    """A rank's record in the making."""

    bodies: list[Body] = field(default_factory=list)
    tensors: list[TensorRecord] = field(default_factory=list)
    layouts: dict[LayoutRecord, int] = field(default_factory=dict)
    meshes: dict[MeshRecord, int] = field(default_factory=dict)


@dataclass
class Assembling:
    """A dump in the making.

    Attributes:
        arrays: Values, by rank and name.
        narrowed_to: The coarsest dtype that either job computes in, if it is narrow.
        noise: How far rounding to it may take each gradient.
        runs: How many micro-batches the job runs for each of the other job's; 0 if it has no more than that.
        lines: The calls of lines that each rank recorded; the first rank also has those of the other job.
    """

    job: JobTrace
    mesh: Mesh
    ranks: dict[int, _Rank] = field(default_factory=dict)
    arrays: dict[tuple[int, str], NDArray[np.float64]] = field(default_factory=dict)
    narrowed_to: tuple[str, ...] = ()
    noise: tuple[NoiseRecord, ...] = ()
    runs: int = 0
    lines: dict[int, tuple[LinesRecord, ...]] = field(default_factory=dict)

    def add(
        self,
        rank: int,
        name: str,
        place: tuple[Moment, Role],
        shape: tuple[int, ...],
        values: NDArray[np.float64],
        dtype: str,
        layout: Layout | None = None,
    ) -> None:
        """Add a tensor."""
        moment, role = place
        tables = self.ranks.setdefault(rank, _Rank())
        index = None if layout is None else _layout(tables, layout)
        body = Body(role, moment, shape, values.shape, dtype, layout=index, dense=True, grad=None)
        tables.tensors.append(TensorRecord(name, len(tables.bodies)))
        tables.bodies.append(body)
        self.arrays[rank, f"{moment}/{role}/{name}"] = values

    def add_region(self, rank: int, name: str, shape: tuple[int, ...], region: Region, weight: Weight) -> None:
        """Add which elements of a weight a rank has."""
        tables = self.ranks.setdefault(rank, _Rank())
        dtype = weight.values.dtype if weight.values is not None else "float32"
        tables.tensors.append(TensorRecord(name, len(tables.bodies)))
        tables.bodies.append(Body("param", "stamped", shape, region.shape, dtype, held=region.dims))

    def dump(self, judging: Judging | None = None) -> Dump:
        """Return the dump, with every rank's values at every place if these were judged."""
        records = {}
        for rank, record in self.job.records.items():
            tables = self.ranks.get(rank, _Rank())
            records[rank] = RankRecord(
                record.schema,
                rank,
                record.num_ranks,
                record.hostname,
                meshes=tuple(tables.meshes),
                layouts=tuple(tables.layouts),
                bodies=tuple(tables.bodies),
                tensors=tuple(tables.tensors),
                trace=tuple(judging.records(rank)) if judging is not None else (),
                narrowed_to=self.narrowed_to,
                noise=self.noise,
                runs=self.runs,
                wrappers=record.wrappers,
                tied=record.tied,
                held_back=record.held_back,
                lines=self.lines.get(rank, ()),
            )
        mesh = MeshRecord(self.mesh.axes, self.mesh.shape, self.mesh.ranks)
        run = structs.replace(self.job.dump.files.run, mesh=mesh)
        return dump_of(InMemory(self.job.dump.files.path, run, records, arrays=self.arrays))


def _layout(tables: _Rank, layout: Layout) -> int:
    """Return the index of a layout among a rank's."""
    placements = layout.placements()
    assert placements is not None, "it comes from placements"
    mesh = MeshRecord(layout.mesh.axes, layout.mesh.shape, layout.mesh.ranks)
    number = tables.meshes.setdefault(mesh, len(tables.meshes))
    flat = FlatRecord(layout.flat.shape, layout.flat.offset) if layout.flat else None
    record = LayoutRecord(number, tuple(map(str, placements)), layout.shape, flat, layout.own_axes)
    return tables.layouts.setdefault(record, len(tables.layouts))


@dataclass(frozen=True)
class JobEvidence(Evidence):
    """What two jobs' steps show: nobody wrote down a loss, and outputs are those of modules.

    Attributes:
        clips: How both clipped their gradients, if each did once.
        micro_batches: How often a rank of the compared job calls the model.
        is_beside_one: Whether the other job is one process.
        holding: The ranks that hold each weight.
    """

    clips: Clips | None = None
    micro_batches: int = 1
    is_beside_one: bool = True
    holding: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def weight_ranks(self, name: str) -> frozenset[int]:
        """Return the ranks that hold a weight."""
        return self.holding.get(name, frozenset())

    @cached_property
    def outputs_are_right(self) -> bool:
        """Whether forward was compared, and nothing goes wrong in it."""
        return bool(self.calls.by_module) and first_in_forward(self.calls) is None

    @cached_property
    def loss_is_right(self) -> bool:
        """Whether the loss is computed of what is right; nobody wrote it down."""
        return self.outputs_are_right

    @cached_property
    def divergence(self) -> Divergence | None:
        """The first wrong module: in forward; in backward if all of forward is right."""
        backward = first_in_backward(self.calls)
        forward = with_start_of_order(self, first_in_forward(self.calls))
        return forward or blamed_by_weights(backward, self.calls, self.gradients)


def assembled(job: JobTrace, judging: Judging, weights: Weights, reference: JobTrace) -> tuple[Dump, tuple[str, ...]]:
    """Return a dump that compares two jobs, and the gradients that are incomplete."""
    assembling = Assembling(job, judging.mesh)
    assembling.runs = _micro_batches(job, reference)
    sampled = add_gradients(assembling, weights)
    for name, terms in terms_of_micro_batches(job, judging, weights.grads):
        _add_terms(assembling, name, terms)
    _add_vectors(assembling, weights.params)
    for place in judging.wrong:
        _add_place(assembling, judging, place)
    _allow_for_rounding(assembling, (job, reference), judging.drift)
    if reference.is_of_one and weights.order is not None:
        add_lines(assembling, reference, job, weights.order)
    return assembling.dump(judging), sampled


def _micro_batches(job: JobTrace, reference: JobTrace) -> int:
    """Return how often a job's ranks call the model for each of another job's calls; 0 if it is once, or uneven."""
    counts, counts_there = ({own.counts.get("", 0) for own in each.ranks.values()} for each in (job, reference))
    if len(counts) > 1 or len(counts_there) > 1 or 0 in counts | counts_there:
        return 0
    runs, rest = divmod(counts.pop(), counts_there.pop())
    return runs if runs > 1 and not rest else 0


def add_gradients(assembling: Assembling, weights: Weights) -> tuple[str, ...]:
    """Add the gradients of weights that are there whole; return the names of the others."""
    parts = assembling.job.weights("grad")
    sampled = []
    for name, whole in weights.grads.items():
        by_rank = parts.get(name, {})
        if not are_whole(whole, *by_rank.values()):
            sampled.append(name)
            continue
        add_weight(assembling, min(assembling.job.ranks), name, ("reference", "grad"), whole)
        belonging = weights.belongings.get(name)
        for rank, weight in by_rank.items():
            before = divided(weight, weights.kept.get(rank, 1.0))
            add_weight(assembling, rank, name, ("step", "grad"), before, belonging)
            if weight.layout is None and belonging is not None and belonging.layout is None:
                assembling.add_region(rank, name, whole.shape, belonging.regions[rank], weight)
    return tuple(sampled)


def _add_terms(assembling: Assembling, name: str, terms: Sequence[NDArray[np.float64]]) -> None:
    """Add what each micro-batch adds to a gradient, as the unsharded model's gradient of it."""
    for at, term in enumerate(terms):
        values, place = len(terms) * term, of_micro_batch(name, at)
        assembling.add(min(assembling.job.ranks), place, ("reference", "activation"), term.shape, values, "float32")


def are_whole(*weights: Weight) -> bool:
    """Whether all elements of some weights are there."""
    return all(weight.values is not None and weight.values.is_whole for weight in weights)


WANTED = "reference/grad/"
"""What the keys of arrays with the other job's gradients begin with."""


def _allow_for_rounding(assembling: Assembling, jobs: Iterable[JobTrace], drift: float) -> None:
    """Note the coarsest dtype that either job computes in, and how far it may take gradients, if it is narrow."""
    coarsest = coarsest_of(jobs)
    epsilon = EPSILON[coarsest]
    if epsilon <= EPSILON["float32"]:
        return
    wanted = {name: magnitude(values) for (_, name), values in assembling.arrays.items() if name.startswith(WANTED)}
    of_all = max(wanted.values(), default=0.0)
    allowed = {name: allowed_in_narrow(epsilon, own, of_all, drift) for name, own in wanted.items()}
    assembling.narrowed_to = (coarsest,)
    assembling.noise = tuple(
        NoiseRecord("grad", name.removeprefix(WANTED), far / NOISE, 0.0) for name, far in allowed.items()
    )


def _add_vectors(assembling: Assembling, params: Mapping[str, Weight]) -> None:
    """Add the weights that may be added to what a module returns: biases."""
    for name, whole in params.items():
        if whole.values is not None and whole.values.is_whole and len(whole.shape) == 1:
            values = whole.values
            assembling.add(
                min(assembling.job.ranks), name, ("reference", "param"), whole.shape, values.values, values.dtype
            )


def add_weight(
    assembling: Assembling,
    rank: int,
    name: str,
    place: tuple[Moment, Role],
    weight: Weight,
    belonging: Belonging | None = None,
) -> None:
    """Add a rank's part of a weight, or of what belongs to it; if it claims nothing, where it was found to belong."""
    assert weight.values is not None
    layout = weight.layout or (belonging.layout if belonging is not None else None)
    shape = weight.shape if layout is None or layout.flat else layout.shape
    assembling.add(rank, name, place, shape, weight.values.values, weight.values.dtype, layout)


def _add_place(assembling: Assembling, judging: Judging, place: Place) -> None:
    whole = judging.whole[place].values
    parts = judging.held(place)
    if whole is None or not whole.is_whole or not all(part.is_whole for part in parts.values()):
        return
    name = place.values_name
    assembling.add(min(judging.ranks), name, ("reference", "activation"), whole.shape, whole.values, whole.dtype)
    for rank, rank_part in parts.items():
        values = rank_part.values / judging.scale(place, rank)
        assembling.add(rank, name, ("step", "activation"), whole.shape, values, rank_part.dtype)


def findings_on(evidence: JobEvidence, judging: Judging, reference_name: str) -> Iterator[Finding | NotChecked]:
    """Yield what is wrong, causes before consequences."""
    first = evidence.divergence
    if first is not None and first.direction == "forward":
        yield _in_forward(evidence, judging, first, reference_name)
        return
    results = [
        (result, seen_in(result, finding)) for result in evidence.results for finding in explained(evidence, result)
    ]
    yield from (finding for _, finding in results if isinstance(finding, NotChecked))
    pairs = reduced_as_others([(result, finding) for result, finding in results if isinstance(finding, Finding)])
    pairs, of_all = of_all_gradients(evidence, pairs)
    clipped = of_size_before(evidence, evidence.clips) or by_another_norm(evidence, evidence.clips)
    clipped = clipped or (scaled_by_owners(evidence) if pairs and first is None else None)
    if clipped is not None:
        pairs, of_all = [(result, finding) for result, finding in pairs if result.role != "grad"], [clipped]
    of_all = [
        with_round_norms(evidence, finding, evidence.clips) if isinstance(finding, Finding) else finding
        for finding in of_all
    ]
    if first is None and (of_scale := of_loss(evidence, the_only({*judging.scales.values()}), findings_in(of_all))):
        of_all = [of_scale]
    ties = list(broken_ties(evidence.gradients))
    yield from ties
    of_ties = {name for finding in ties for name in finding.tensors}
    pairs = [(result, finding) for result, finding in pairs if result.name not in of_ties]
    pairs = with_others_reduced(evidence, pairs)
    is_open = not of_all and all(finding.generic for _, finding in pairs)
    unequal = of_unequal_losses(evidence, judging, is_open=is_open) if first is None and (pairs or of_all) else None
    if unequal is not None:
        yield unequal
        return
    pairs, of_parts = of_micro_batches(evidence, pairs)
    yield from of_parts
    yield from of_all
    absent, pairs = with_cut(evidence, list(check_no_gradient(evidence)), placed(evidence, pairs))
    yield from findings_in(absent)
    yield from (_with_router(judging, finding) for _, finding in pairs)


def _with_router(judging: Judging, finding: Finding) -> Finding:
    """Return a finding whose module sends back a wrong gradient, with the cause that its router's shows."""
    is_open = isinstance(finding.explanation, UnexplainedModuleBackward) and bool(finding.module)
    cause = cause_in_router(judging, finding.module) if is_open else None
    return finding if cause is None else replace(finding, kind=cause.kinds[0]).because(cause)


def _in_forward(
    evidence: JobEvidence, judging: Judging, first: Divergence, reference_name: str
) -> Finding | NotChecked:
    call, name = first.call, first.module or "the model itself"
    if draws(judging, call.module, call.number):
        why = (
            f"what follows {name}: it draws random numbers, and the jobs draw different ones; make both run without "
            "(p=0 or eval()), or load the same masks, to compare the rest"
        )
        return check_masks(judging, call.module, call.number) or NotChecked(call.module, why, "step")
    base = UnexplainedForward().finding(
        name, tuple(sorted(call.points)), f"its step differs from that of {reference_name}", generic=True
    )
    finding = of_output(evidence, first, base)
    repeated = finding.explanation
    if isinstance(repeated, RepeatedParts) and repeated.is_batch and first.module:  # the batch was compared
        is_of_positions = judging.whole[Place(call.module, call.number, "output", 0)].type == "Embedding"
        positions = PositionsStartAgain(name, repeated.axes, are_tokens_right=True)
        return finding.because(positions if is_of_positions else replace(repeated, is_batch=False))
    stages = _stages_of(judging, call) if isinstance(finding.explanation, UnexplainedInput) else None
    return finding if stages is None else finding.because(LayerOnTwoStages(name, *stages))


def _stages_of(judging: Judging, call: Call) -> tuple[int, int] | None:
    """Return a rank of each of two stages that run a module with all that is in it, the first on the right input."""
    given = Place(call.module, call.number, "input", 0)
    modules = {rank: {place.module for place in points} for rank, points in judging.ranks.items()}
    if given._replace(call=1) in judging.whole:  # layers may share a module, which is called for each
        return None
    for first, second in permutations(judging.ranks, 2):
        inside = [{name for name in modules[rank] if is_within(name, call.module)} for rank in (first, second)]
        is_of_two = bool(call.module and inside[0]) and inside[0] == inside[1] and modules[first] != modules[second]
        inputs = [judging.ranks[rank].get(given) for rank in (first, second)]
        if is_of_two and _is_alike(judging.whole.get(given), inputs[0]) and not _is_alike(*inputs):
            return first, second
    return None


def _is_alike(first: Point | None, second: Point | None) -> bool:
    values, others = (point.values if point is not None else None for point in (first, second))
    if values is None or others is None or values.shape != others.shape:
        return False
    return farthest(values.values, others.values) <= max(values.tolerance, others.tolerance) * largest_of(values)


LEAST_ELEMENTS = 64
"""Masks of fewer elements may be equal by chance."""


def draws(judging: Judging, module: str, call: int) -> bool:
    """Whether a call drew random numbers in either job."""
    return any(
        point.draws
        for points in (judging.whole, *judging.ranks.values())
        for place, point in points.items()
        if (place.module, place.call) == (module, call)
    )


def check_masks(judging: Judging, module: str, call: int) -> Finding | None:
    """Return the finding if ranks drop different elements of the same values, or the same of different ones."""
    input_place, returned = Place(module, call, "input", 0), Place(module, call, "output", 0)
    layout = judging.judgments[input_place].layout if input_place in judging.judgments else None
    masks = {rank: mask for rank in judging.ranks if (mask := _mask(judging, rank, input_place, returned)) is not None}
    if layout is None or len(masks) < len(judging.ranks):
        return None
    for axis, placement in zip(judging.mesh.axes, layout, strict=True):
        pairs = list(pairs_along(axis, {rank: rank for rank in masks}, judging.mesh))
        equal = [np.array_equal(masks[one], masks[other]) for one, other in pairs]
        if pairs and isinstance(placement, Replicate) and not all(equal):
            return _finding(module, axis, pairs[equal.index(False)], is_same=True)
        if pairs and isinstance(placement, Shard) and any(equal) and masks[pairs[0][0]].size >= LEAST_ELEMENTS:
            return _finding(module, axis, pairs[equal.index(True)], is_same=False)
    return None


def _mask(judging: Judging, rank: int, input_place: Place, returned: Place) -> NDArray[np.bool_] | None:
    """Return the elements that a rank keeps; None if the output isn't the input with zeros."""
    points: Mapping[Place, object] = judging.ranks[rank]
    if input_place not in points or returned not in points:
        return None
    before, after = judging.ranks[rank][input_place].values, judging.ranks[rank][returned].values
    if before is None or after is None or before.values.shape != after.values.shape:
        return None
    is_kept = after.values != 0
    factors = after.values[is_kept & (before.values != 0)] / before.values[is_kept & (before.values != 0)]
    if not np.any(~is_kept) or not factors.size:
        return None
    allowed = 2 * POINT_EPSILON * float(np.abs(factors).max())  # what is given and what is returned are rounded
    return is_kept if float(np.ptp(factors)) <= allowed else None


def _finding(module: str, axis: str, pair: tuple[int, int], *, is_same: bool) -> Finding:
    low, high = pair
    if is_same:
        sentence = f"ranks {low} and {high} along {axis} are given the same and drop different elements of it"
        return DifferentMasks(axis).finding(module, pair, sentence, kind="wrong-value", module=module)
    sentence = f"ranks {low} and {high} along {axis} have different parts and drop the same elements of each"
    return IdenticalMasks(axis).finding(module, pair, sentence, module=module)
