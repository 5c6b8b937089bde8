"""A step's results taken together: the right ones bound where a wrong one went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import largest_of, rounding_of
from shardviz.check.step.forward.activations import Activations
from shardviz.check.step.rules.all_gradients import Parts
from shardviz.check.step.trace.divergence import (
    Calls,
    blamed_by_weights,
    first_in_backward,
    first_in_forward,
    first_unlike_others,
)
from shardviz.relate.measures import WrongResults, ratio_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.trace.divergence import Divergence
    from shardviz.dump.dump import Dump


@dataclass(frozen=True)
class Evidence:
    """Every result of a step that the unsharded model's has too.

    Attributes:
        dump: The dump.
        results: Gradients, outputs and logged values, each with its reference.
    """

    dump: Dump
    results: tuple[Compared, ...]

    @cached_property
    def outputs_are_right(self) -> bool:
        """Whether there are outputs, and all were compared and are the unsharded model's."""
        outputs = [result for result in self.results if result.role == "output"]
        return bool(outputs) and all(map(is_right, outputs))

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
    def runs_backward_itself(self) -> bool | None:
        """Whether the probe's own step runs backward, rather than shardviz, on the returned loss; None if not known."""
        return next((record.is_own_step for record in self.dump.files.ranks.values()), None)

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
        return max((largest_of(step) for step in steps), default=0.0)

    def tied_to(self, name: str) -> tuple[str, ...]:
        """Return the other names under which a tensor stood in the unsharded model."""
        return tuple(other for other in self._tied.get(name, ()) if other != name)

    @cached_property
    def _tied(self) -> Mapping[str, Sequence[str]]:
        """All names of each tensor, by each of them."""
        names: dict[str, list[str]] = {}
        stamps = {stamp.name: stamp.tied_to or stamp.name for stamp in self.dump.files.run.stamps}
        for name, owner in stamps.items():
            names.setdefault(owner, []).append(name)
        return {name: names[owner] for name, owner in stamps.items()}

    @cached_property
    def activations(self) -> Activations:
        """The outputs of modules, beside the unsharded model's."""
        return Activations(self.dump, rounding_of(self.dump))

    @cached_property
    def calls(self) -> Calls:
        """The calls of all modules of the step, beside the unsharded model's."""
        return Calls.of(self.dump)

    @cached_property
    def divergence(self) -> Divergence | None:
        """The first wrong module: in forward where an output is wrong, in backward where all of forward is right."""
        outputs = [result for result in self.results if result.role == "output"]
        if any(not is_right(result) for result in outputs):
            return first_in_forward(self.calls)
        if not self.loss_is_right:
            return first_in_forward(self.calls) if not outputs else None
        first = blamed_by_weights(first_in_backward(self.calls), self.calls, self.gradients)
        return first or (first_unlike_others(self.calls) if self.is_narrow else None)

    @cached_property
    def is_narrow(self) -> bool:
        """Whether the step is in narrow numbers, and what rounding does to it was measured."""
        return bool(self.dump.noises) and not any(result.rounding.is_double for result in self.results)


def is_right(result: Compared) -> bool:
    """Whether a result was compared, and is the unsharded model's on every rank."""
    return not result.incomparable and not result.wrong
