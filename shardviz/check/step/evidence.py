"""A step's results taken together: the right ones bound where a wrong one went wrong.

Module outputs are in the order of execution, each related to the unsharded model's. The judge of steps
(`trace.judging`) said so while the step ran (`calls`). Of what is not right, and in older dumps of all without
placements, it is asked once more, with the values that the dump has: they tell where slices stand. It knows no weights:
a module that returns the features whose rows its plain weight has is right, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared, rounding_of, whole_of
from shardviz.check.step.rules.all_gradients import Parts
from shardviz.check.step.rules.own_scales import scales_along
from shardviz.check.step.trace.calls import Calls
from shardviz.check.step.trace.causes import with_start_of_order
from shardviz.check.step.trace.divergence import (
    Divergence,
    blamed_by_weights,
    first_in_backward,
    first_in_forward,
    first_unlike_others,
)
from shardviz.check.step.trace.judging import judged_output
from shardviz.dump.records.trace import State, is_point
from shardviz.groups import in_groups
from shardviz.layout.layout import Layout
from shardviz.layout.region import indices
from shardviz.relate.measures import WrongResults, ratio_of
from shardviz.relate.orders import Slices
from shardviz.relate.values import finite_magnitude
from shardviz.text import Fold

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump
    from shardviz.relate.sides import Rounding


@dataclass(frozen=True)
class Activation:
    """The output of one module on every rank that ran it.

    Attributes:
        name: The module.
        state: What it is of the unsharded model's.
        layout: How it is split, as it claims or by its values; None if no placements fit these.
        slices: Where ranks' slices stand in the whole, if no placements fit and that can be told.
        is_compared: Whether the unsharded model has such an output, too.
    """

    name: str
    state: State
    layout: Layout | None = None
    slices: Slices | None = None
    is_compared: bool = True

    @property
    def is_odd(self) -> bool:
        """Whether it is not the unsharded model's, or ranks have some of its slices several times and others never."""
        return self.state in ("odd", "repeated")


@dataclass(frozen=True)
class Activations:
    """Every module's output.

    Attributes:
        calls: What ranks wrote of every call while the step ran; none in older dumps.
    """

    dump: Dump
    rounding: Rounding
    calls: Calls

    @cached_property
    def order(self) -> Mapping[int, list[str]]:
        """The modules that each rank ran, in order."""
        return {
            rank: [
                name
                for tensor in record.tensors
                if (record.bodies[tensor.body].role, record.bodies[tensor.body].moment) == ("activation", "step")
                for name in Fold(tensor.name, tensor.numbers, tensor.suffix).names()
                if not is_point(name)
            ]
            for rank, record in self.dump.files.ranks.items()
        }

    @cached_property
    def by_name(self) -> Mapping[str, Activation]:
        """Every module's output, by name."""
        return {name: self._of(name) for name in dict.fromkeys(name for names in self.order.values() for name in names)}

    @cached_property
    def first_odd(self) -> tuple[list[Activation], Activation | None]:
        """The first module, on the lowest rank that has one, whose output is not right; with those before it there.

        What the unsharded model lacks may be right: it counts if nothing else is wrong.
        """
        for is_compared in (True, False):
            for names in self.order.values():
                for index, name in enumerate(names):
                    if self.by_name[name].is_odd and self.by_name[name].is_compared is is_compared:
                        return [self.by_name[before] for before in names[:index]], self.by_name[name]
        return [], None

    @cached_property
    def num_micro_batches(self) -> int:
        """How many micro-batches the stages of a pipeline ran; 1 if there are no stages."""
        return 1 + max((run.microbatch for one in self.dump.files.ranks.values() for run in one.schedule), default=0)

    def is_split(self, name: str, axis: str) -> bool:
        """Whether ranks along an axis have different parts of a module's output, as far as is known."""
        layout = self.by_name[name].layout
        return layout is None or any(axis in chain for chain in layout.chains)

    def _of(self, name: str) -> Activation:
        tensor = self.dump.by_name("step", "activation")[name]
        call = next(iter(self.calls.by_module.get(name, ())), None)
        state = call.state("output") if call is not None else None
        if state in ("right", "pending"):
            return Activation(name, state, tensor.claimed)
        if tensor.claimed is not None and all(shard.layout is not None for shard in tensor.shards.values()):
            return Activation(name, "pending" if tensor.claimed.partial else "right", tensor.claimed)
        if (whole := whole_of(self.dump, "activation", name)) is None:
            return Activation(name, "odd", is_compared=False)
        parts = {rank: self.dump.values(shard, name) for rank, shard in tensor.shards.items()}
        near = self.rounding.tolerance(whole, gradient=False)
        cut = {rank: self._features(name, rank, whole) for rank in parts}
        features = Slices.of(parts, cut, near) if all(part is not whole for part in cut.values()) else None
        if features is not None and features.state == "moved":
            return Activation(name, "right")
        mesh = self.dump.files.mesh
        judgment = judged_output(name, whole, parts, mesh, near)
        layout = None if judgment.layout is None else Layout.from_placements(mesh, whole.shape, judgment.layout)
        return Activation(name, next(iter(judgment.state.values())), layout, judgment.slices)

    def _features(self, name: str, rank: int, whole: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the whole with the features alone whose rows the module's plain weight has on a rank."""
        weight = self.dump.stamped.get(f"{name}.weight")
        held = weight.shards[rank].held if weight is not None and rank in weight.shards else None
        if weight is None or held is None or weight.shape[:1] != whole.shape[-1:] or not whole.ndim:
            return whole
        columns = indices(held.dims[0])
        return whole[..., columns] if len(columns) < whole.shape[-1] else whole


@dataclass(frozen=True)
class Evidence:
    """Every result of a step that the unsharded model's has too.

    Attributes:
        results: Gradients, outputs and logged values, each with its reference.
    """

    dump: Dump
    results: tuple[Compared, ...]

    @cached_property
    def outputs(self) -> Sequence[Compared]:
        """The model's outputs."""
        return [result for result in self.results if result.role == "output"]

    @cached_property
    def outputs_are_right(self) -> bool:
        """Whether there are outputs, and all were compared and are the unsharded model's."""
        return bool(self.outputs) and all(map(is_right, self.outputs))

    @cached_property
    def loss_is_right(self) -> bool:
        """Whether there is a loss, and it is the unsharded model's."""
        return self.loss is not None and not self.loss.wrong

    @cached_property
    def loss(self) -> Compared | None:
        """The loss, if it can be compared."""
        losses = (result for result in self.results if (result.role, result.name) == ("scalar", "loss"))
        return next((result for result in losses if not result.incomparable), None)

    @cached_property
    def batch(self) -> Mapping[str, bool] | None:
        """For each axis of the run whether it splits the batch, over which the loss is an average.

        None if the dump has no loss, or one without a claim.
        """
        loss = self.dump.find("step", "scalar", "loss")
        claimed = loss.claimed if loss is not None else None
        if claimed is None:
            return None
        pending = {axis for axis, _ in claimed.partial}
        return {axis: axis in pending for axis in self.dump.files.mesh.axes}

    @cached_property
    def gradients(self) -> Mapping[str, Compared]:
        """The gradients that can be compared, by name."""
        return {result.name: result for result in self.results if result.role == "grad" and not result.incomparable}

    @cached_property
    def ratios(self) -> Mapping[str, Fraction | None]:
        """Each gradient's ratio to the unsharded model's; None if it isn't one of small numbers."""
        of_wrong = {name: ratio_of(result) for name, result in self.gradients.items() if result.wrong}
        return {name: of_wrong.get(name, Fraction(1)) for name in self.gradients}

    @cached_property
    def wrong_gradients(self) -> WrongResults:
        """The wrong gradients, by what ranks hold."""
        return WrongResults(tuple(self.gradients.values()))

    @cached_property
    def own_scales(self) -> Mapping[str, Mapping[int, float]]:
        """By axis, what each rank multiplied its gradients by before any reduction over it, if that is shown."""
        axes, mesh = self.batch or {}, self.dump.files.mesh
        gradients = self.gradients.values()
        return {axis: scales_along(axis, gradients, mesh, is_mean=is_mean) for axis, is_mean in axes.items()}

    @cached_property
    def parts(self) -> Parts:
        """The gradients by their ratios."""
        return Parts(tuple(self.gradients.values()), self.ratios)

    @cached_property
    def without_gradient(self) -> tuple[str, ...]:
        """Parameters with a gradient in the unsharded model's step and none on any rank of the sharded one."""
        held = self.dump.by_name("step", "grad")
        return tuple(name for name in self.dump.by_name("reference", "grad") if name not in held)

    @cached_property
    def num_runs(self) -> int:
        """How often the step ran the model, which is the number of its micro-batches; 0 if that is not known."""
        return max((record.runs for record in self.dump.files.ranks.values()), default=0)

    @cached_property
    def held_back(self) -> frozenset[str]:
        """The parameters of whose gradient FSDP keeps a part to itself after the step, on any rank."""
        return frozenset(name for record in self.dump.files.ranks.values() for name in record.held_back)

    @cached_property
    def largest_step(self) -> float:
        """How far the unsharded model's optimizer moved the element of a weight that it moved farthest."""
        before = self.dump.by_name("reference", "param")
        steps = (
            np.abs(self.dump.values(after.first, name) - self.dump.values(before[name].first, name))
            for name, after in self.dump.by_name("updated", "param").items()
            if name in before
        )
        return max((finite_magnitude(step) for step in steps), default=0.0)

    def weight_ranks(self, name: str) -> frozenset[int]:
        """Return the ranks that hold a weight, as far as that is known."""
        weight = self.dump.find("initial", "param", name) or self.dump.find("stamped", "param", name)
        return frozenset(() if weight is None else weight.shards)

    def parted_along(self, name: str) -> tuple[str, ...]:
        """Return the axes of the batch along which only one rank has a weight, such as an expert's."""
        mesh, ranks = self.dump.files.mesh, self.weight_ranks(name)
        axes = [axis for axis in mesh.long_axes if ranks and (self.batch or {}).get(axis)]
        return tuple(axis for axis in axes if all(len(ranks & {*group}) == 1 for group in mesh.groups(axis)))

    def tied_to(self, name: str) -> tuple[str, ...]:
        """Return the other names under which a tensor stood in the unsharded model."""
        return tuple(other for other in self._tied.get(name, ()) if other != name)

    @cached_property
    def _tied(self) -> Mapping[str, Sequence[str]]:
        """All names of each tensor, by each of them."""
        stamps = {stamp.name: stamp.tied_to or stamp.name for stamp in self.dump.files.run.stamps}
        names = in_groups((owner, name) for name, owner in stamps.items())
        return {name: names[owner] for name, owner in stamps.items()}

    @cached_property
    def activations(self) -> Activations:
        """The outputs of modules, beside the unsharded model's."""
        return Activations(self.dump, rounding_of(self.dump), self.calls)

    @cached_property
    def calls(self) -> Calls:
        """The calls of all modules of the step, beside the unsharded model's."""
        return Calls.of(self.dump)

    @cached_property
    def divergence(self) -> Divergence | None:
        """The first wrong module: in forward if an output is wrong, in backward if all of forward is right."""
        is_forward_right = self.outputs_are_right if self.outputs else self.loss_is_right
        if not is_forward_right:
            return with_start_of_order(self, first_in_forward(self.calls))
        first = blamed_by_weights(first_in_backward(self.calls), self.calls, self.gradients)
        return first or (first_unlike_others(self.calls) if self.is_narrow else None)

    @cached_property
    def is_narrow(self) -> bool:
        """Whether the step is in narrow numbers, and what rounding does to it was measured."""
        return bool(self.dump.noises) and not any(result.rounding.is_double for result in self.results)


def is_right(result: Compared) -> bool:
    """Whether a result was compared, and is the unsharded model's on every rank."""
    return not result.incomparable and not result.wrong
