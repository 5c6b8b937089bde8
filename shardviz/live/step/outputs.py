"""Compare each tensor that a model returns with the unsharded model's, by its path.

Nothing says how ranks share a plain tensor of a tuple, so its values decide: it has the placements that give every rank
its values. A statistic of each rank's rows (a count, an auxiliary loss) is right if its sum, mean, max or min over the
batch's axes is the unsharded model's, or if the unsharded model returns it for that rank's rows. Any other tensor has
the layout that an output should have; if its shape contradicts that layout, it is not checked.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from shardviz.layout.layout import placements_of
from shardviz.layout.placements import Partial, Replicate
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.claims.local import Local
from shardviz.live.compat.worlds import one_process
from shardviz.live.step.batch import own_batch
from shardviz.live.step.observe import observed
from shardviz.live.step.output_parts import (
    REDUCTIONS,
    Offer,
    Outputs,
    Wanted,
    is_loss,
    is_near,
    num_runs,
    reduction_of,
    wanted_outputs,
)
from shardviz.live.step.return_values import are_parts_of, is_split, joined, named_calls, numbers_of
from shardviz.live.step.step import claimed_as, due_placements, loss_of
from shardviz.live.step.unsharded.step import precision_of
from shardviz.text import counted, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.layout.layout import Placements
    from shardviz.layout.region import Region
    from shardviz.live.probe import ProbeOnRank
    from shardviz.live.step.batch import Setting
    from shardviz.live.step.step import StepResult
    from shardviz.live.step.unsharded.step import UnshardedStep

MAX_LISTED = 8
MAX_EXCHANGED = 1 << 12
"""Numbers that are of each rank's rows have no more elements than this."""

UNREADABLE = "its values are not a plain array of numbers (sparse or nested), or not of one shape in every run"
OF_ROWS = (
    "the ranks' values are not the unsharded model's, and neither are their mean, sum, max or min over the batch's axes"
)
NARROW_INTEGERS = "its integers differ from the unsharded model's, and in narrow numbers rounding may choose others"
WHOLE_OUTPUT = (
    "the ranks' values are no parts of the unsharded model's, and whole_output() in the probe puts one tensor together"
)
NEVER_CALLED = "the sharded step never calls the model as a whole, and the unsharded step does"
OF_OTHER_STAGES = "the last stage returns no tensor there, and what other stages return is not compared"
UNREAD = "shardviz finds no tensors in an object of class"
TOO_MANY = "the first of them are compared"


def add_outputs(on: ProbeOnRank, step: StepResult, reference: UnshardedStep, setting: Setting) -> list[Local]:
    """Record other returned tensors, and return this rank's part. Every rank calls this."""
    precision = max(of_all_ranks(max(reference.precision, precision_of(step.observation.comms.narrowed_to))))
    outputs = Comparison(on, step, reference, setting, precision).outputs()
    on.capture.not_checked += [("", f"{name}: {why}") for name, why in outputs.not_checked.items()]
    for local in outputs.held:
        on.capture.add_values(local, "step")
    for local in outputs.expected if on.capture.rank == 0 else ():
        on.capture.add_values(local, "reference")
    return outputs.held


def outputs_again(held: Sequence[Local], step: StepResult, reference: UnshardedStep) -> Iterator[Local]:
    """Yield the same outputs of another step of the sharded model, for as many as it returns in the same shape."""
    calls = named_calls(step.returned, num_runs(reference))
    for local in held:
        values = [numbers_of(value) for value in calls.get(local.name, ())]
        if len(values) == 1 and values[0] is not None and values[0].shape == local.values.shape:
            yield replace(local, values=values[0])


@dataclass(frozen=True)
class Comparison:
    """The outputs of one step and of the unsharded model's.

    Attributes:
        precision: The relative precision of the narrowest numbers in either step on any rank; 0 in float64.
    """

    on: ProbeOnRank
    step: StepResult
    reference: UnshardedStep
    setting: Setting
    precision: float

    @property
    def runs(self) -> int:
        """How often the unsharded model ran on the whole batch, or on each part of it."""
        return num_runs(self.reference)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return tuple(axis for axis in self.setting.axes if self.on.job.mesh.axis_size(axis) > 1)

    @property
    def _has_stages(self) -> bool:
        return hasattr(self.on.probe, "STAGE_AXES")

    def outputs(self) -> Outputs:
        """Lay out every tensor that either model returns. Every rank calls this."""
        outputs, wants = Outputs(), wanted_outputs(self.reference)
        unsharded = named_calls(self.reference.step.returned, self.runs)
        calls, why = self._mine() if self.step.returned else ({}, "")
        calls = self._of_stage(calls, wants) if self._has_stages else calls
        offers = {name: self._offer(values, wants.get(name)) for name, values in calls.items()}
        sent = enumerate(of_all_ranks((offers, why) if self.step.returned else None))
        of_all = {rank: own for rank, own in sent if own is not None}
        reasons = [own[1] for own in of_all.values() if own[1]] or ([] if of_all else [NEVER_CALLED])
        if reasons:
            # There is an output that cannot be compared, and nothing says so yet.
            if unsharded or (not of_all and self.reference.step.output is not None):
                outputs.not_checked["the output"] = reasons[0]
            return outputs
        unplaced = {}
        for name in dict.fromkeys([*unsharded, *(name for own, _ in of_all.values() for name in own)]):
            of_ranks = {rank: own[name] for rank, (own, _) in of_all.items() if name in own}
            present = {rank: offer for rank, offer in of_ranks.items() if offer is not None}
            if (
                of_ranks
                and name in wants
                and is_loss(wants[name].parts, self.reference.step.loss, wants[name].near(self.precision))
                and all(offer is not None and offer.is_loss for offer in of_ranks.values())
            ):
                continue  # it is compared as the loss
            if name not in unsharded:
                outputs.not_checked[name] = "the unsharded model returns nothing there"
            elif lacking := [rank for rank in of_all if rank not in of_ranks]:
                who = f"on {named_ranks(lacking, MAX_LISTED)}" if of_ranks else "on any rank"
                why = f"the sharded model returns no tensor there {who}"
                outputs.not_checked[name] = OF_OTHER_STAGES if self._has_stages and not of_ranks else why
            elif name not in wants or None in of_ranks.values():
                outputs.not_checked[name] = UNREADABLE
            elif why := self._place(outputs, name, wants[name], present, calls.get(name, ())):
                unplaced[name] = why
        outputs.not_checked |= self._not_of_rows(unplaced, calls)
        for returned in self.step.returned[:1]:
            outputs.not_checked |= {f"output{at}": f"{UNREAD} {kind}" for at, kind in returned.unread.items()}
            if returned.num_left_out:
                outputs.not_checked["the output"] = f"{counted(returned.num_left_out, 'more tensor')}: {TOO_MANY}"
        return outputs

    def _mine(self) -> tuple[dict[str, list[torch.Tensor]], str]:
        """Return this rank's tensors, each for every micro-batch, by name; or why they cannot be told apart."""
        calls, runs = self.step.returned, self.runs
        in_turn = len(calls) == runs or not runs
        if not in_turn and not self._has_stages and not self._is_in_parts():
            return {}, f"the model ran {len(calls)} times per step, but the unsharded model ran {runs} times"
        return named_calls(calls, runs or 1), ""

    def _of_stage(
        self, calls: dict[str, list[torch.Tensor]], wants: Mapping[str, Wanted]
    ) -> dict[str, list[torch.Tensor]]:
        """Name a stage's tensors by their values: its list may be a part of the list that the whole model returns."""
        names = {}
        for name, values in calls.items():
            parts = [numbers for value in values if (numbers := numbers_of(value)) is not None]
            numbers = joined(parts, 0) if len(parts) == len(values) else None
            equal = (
                other
                for other in dict.fromkeys([name, *wants])
                if numbers is not None
                and other in wants
                and numbers.shape == wants[other].whole.shape
                and is_near(numbers, wants[other].whole, wants[other].near(self.precision))
            )
            names[name] = next(equal, name)
        return (
            {names[name]: values for name, values in calls.items()} if len({*names.values()}) == len(names) else calls
        )

    def _is_in_parts(self) -> bool:
        """Whether the calls made up this rank's part of the batch, one after the other."""
        rows = self.step.sizes[0] if self.step.sizes else 0
        return self.runs == 1 and are_parts_of(self.step.returned, rows)

    def _offer(self, values: Sequence[torch.Tensor], wanted: Wanted | None) -> Offer | None:
        """Return what this rank tells the others of a tensor; None if its numbers cannot be read."""
        parts = [numbers for value in values if (numbers := numbers_of(value)) is not None]
        numbers = joined(parts, 0) if len(parts) == len(values) else None
        if numbers is None or wanted is None:
            return None
        loss = is_loss(parts, self.step.loss, wanted.near(self.precision))
        if len(values) == 1 and is_split(values[0]):
            shape = tuple(values[0].shape)
            is_labeled = shape != tuple(wanted.whole.shape) or not self._is_of_rows(values[0])
            return Offer(shape, is_labeled=is_labeled, is_loss=loss)
        are_alike = len({part.shape for part in (*parts, *wanted.parts)}) == 1
        may_be_of_rows = are_alike and parts[0].numel() <= MAX_EXCHANGED
        of_rows = tuple(part.cpu() for part in parts) if may_be_of_rows else ()
        is_one = len(parts) == 1 or numbers.ndim > 0 or all(torch.equal(part, numbers) for part in parts)
        fits = tuple(self._fitting(numbers, wanted)) if is_one else ()
        return Offer(tuple(numbers.shape), fits, of_rows, is_loss=loss)

    def _fitting(self, numbers: torch.Tensor, wanted: Wanted) -> Iterator[Placements]:
        """Yield the placements that give this rank the values that it has, fewest splits first."""
        shape, near = tuple(wanted.whole.shape), wanted.near(self.precision)
        for placements, region in placements_of(shape, tuple(numbers.shape), self.on.job.mesh, self.on.capture.rank):
            if is_near(numbers, _part_of(wanted.whole, region), near):
                yield placements

    def _is_of_rows(self, tensor: torch.Tensor) -> bool:
        """Whether a batch axis is outside a DTensor's mesh: ranks may then hold their own rows."""
        assert isinstance(tensor, DTensor)
        mesh_axes = plain_mesh(tensor.device_mesh).axes
        return any(axis not in mesh_axes for axis in self.batch_axes)

    def _place(
        self, outputs: Outputs, name: str, wanted: Wanted, of_ranks: Mapping[int, Offer], values: Sequence[torch.Tensor]
    ) -> str:
        """Add a tensor with its layout, the same on every rank; return why not if nothing shows one."""
        offers, mesh, shape = list(of_ranks.values()), self.on.job.mesh, tuple(wanted.whole.shape)
        if all(offer.is_labeled for offer in offers):
            outputs.add(name, [self._claimed(name, value, wanted) for value in values], wanted.whole)
            return ""
        numbers = joined([tensor for value in values if (tensor := numbers_of(value)) is not None], 0)
        if fits := [one for one in offers[0].fits if all(one in offer.fits for offer in offers)]:
            if bool(torch.isfinite(wanted.whole).all()):
                held = [] if numbers is None else [Local(name, "output", shape, numbers, (mesh, fits[0]))]
                outputs.add(name, held, wanted.whole)
            return ""
        if (op := reduction_of(wanted, of_ranks, mesh, self.batch_axes, self.precision)) is not None:
            by_axis = [Partial(op) if axis in self.batch_axes else Replicate() for axis in mesh.axes]
            reduced_values = [REDUCTIONS[op](torch.stack([*of_ranks[self.on.capture.rank].parts]))] if values else []
            locals_ = [Local(name, "output", tuple(one.shape), one, (mesh, tuple(by_axis))) for one in reduced_values]
            outputs.add(name, locals_, REDUCTIONS[op](torch.stack(wanted.parts)))
            return ""
        if why := self._doubt(wanted, offers):
            return why
        outputs.add(name, [] if numbers is None else [self._claimed(name, numbers, wanted)], wanted.whole)
        return ""

    def _doubt(self, wanted: Wanted, offers: Sequence[Offer]) -> str:
        """Return why values that are not the unsharded model's may still be right; empty if they are an output's."""
        shape = tuple(wanted.whole.shape)
        if hasattr(self.on.probe, "whole_output"):
            return WHOLE_OUTPUT
        is_shared_out = bool(self.batch_axes) or any(len(offer.parts) > 1 for offer in offers)
        if is_shared_out and any(offer.shape == shape or self._is_of_part(offer, wanted) for offer in offers):
            return OF_ROWS
        claimed_shapes = [self._claimed("", torch.empty(offer.shape, device="meta"), wanted).shape for offer in offers]
        if any(one != shape for one in claimed_shapes):
            return f"no placements give a rank {list(offers[0].shape)} of the unsharded model's {list(shape)}"
        is_narrow = self.precision and not wanted.whole.is_floating_point()
        return NARROW_INTEGERS if is_narrow else ""

    def _is_of_part(self, offer: Offer, wanted: Wanted) -> bool:
        """Whether a shape is that of each part of the batch, and has not the part's rows."""
        has_rows = offer.shape[:1] == self.step.sizes[:1]
        return len(wanted.parts) > 1 and offer.shape == tuple(wanted.parts[0].shape) and not has_rows

    def _claimed(self, name: str, tensor: torch.Tensor, wanted: Wanted) -> Local:
        """Return a tensor with the layout of an output."""
        axes, mesh = self.setting.axes, self.on.job.mesh
        placements = due_placements(tuple(tensor.shape), tuple(wanted.whole.shape), self.step.sizes, axes, mesh)
        return claimed_as(name, "output", tensor, mesh, placements)

    def _not_of_rows(self, unplaced: Mapping[str, str], calls: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, str]:
        """Return outputs that don't match the unsharded model's on own rows. Every rank calls this."""
        if not unplaced:
            return {}
        reference_calls = self._on_own_rows()
        equal = {name for name in unplaced if self._is_equal(calls.get(name, ()), reference_calls.get(name, ()))}
        of_all = [one for one in of_all_ranks(equal if self.step.returned else None) if one is not None]
        held = set.intersection(*of_all) if of_all else set()
        return {name: why for name, why in unplaced.items() if name not in held}

    def _is_equal(self, values: Sequence[torch.Tensor], reference_values: Sequence[torch.Tensor]) -> bool:
        if len(values) != 1 or len(reference_values) != 1 or is_split(values[0]):
            return False
        numbers, expected = numbers_of(values[0]), numbers_of(reference_values[0])
        if numbers is None or expected is None or numbers.shape != expected.shape:
            return False
        return is_near(numbers, expected, Wanted(expected, (expected,)).near(self.precision))

    def _on_own_rows(self) -> dict[str, list[torch.Tensor]]:
        """Run the unsharded model on this rank's part of the batch; empty if it cannot run on it."""
        local_batch = own_batch(self.setting.batch, self.setting.axes, self.on.device_mesh)
        model = self.reference.mode(self.setting.build())
        torch.manual_seed(2)
        with torch.no_grad(), one_process(), observed(model) as observation, suppress(Exception):
            loss_of(self.on.probe, model, local_batch)
        return named_calls(observation.returned, self.runs)


def _part_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a region of a tensor."""
    if all(len(spans) == 1 for spans in region.dims):
        return whole[tuple(slice(*spans[0]) for spans in region.dims)]
    return whole.flatten()[torch.from_numpy(region.flat_ids(tuple(whole.shape))).to(whole.device)]
