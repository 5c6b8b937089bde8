"""What a step shows taken together: which of its results are right bounds where a wrong one went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.names import Fold

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.step.compared import Compared
    from shardviz.dump.tensors import Model


@dataclass(frozen=True)
class Evidence:
    """Every result of a step that the unsharded model's has too.

    Attributes:
        model: The dump.
        results: Gradients, outputs and logged values beside their references.
    """

    model: Model
    results: tuple[Compared, ...]

    @cached_property
    def outputs_are_right(self) -> bool:
        """Whether there are outputs, and all were compared and are the unsharded model's."""
        outputs = [one for one in self.results if one.role == "output"]
        return bool(outputs) and all(map(is_right, outputs))

    @cached_property
    def loss_is_right(self) -> bool:
        """Whether there is a loss, and it is the unsharded model's."""
        return any(one.role == "scalar" and one.name == "loss" and is_right(one) for one in self.results)

    @cached_property
    def gradients(self) -> Mapping[str, Compared]:
        """The gradients that can be compared, by name."""
        return {one.name: one for one in self.results if one.role == "grad" and not one.incomparable}

    @cached_property
    def without_gradient(self) -> tuple[str, ...]:
        """Parameters with a gradient in the unsharded model's step and none on any rank of the sharded one."""
        names = [name for tensor in self.model.stage("reference") if tensor.role == "grad" for name in tensor.names]
        return tuple(name for name in names if self.model.find("step", "grad", name) is None)

    def tied_to(self, name: str) -> tuple[str, ...]:
        """Return the other names under which a tensor stood in the unsharded model."""
        owner = {stamp.name: stamp.tied_to or stamp.name for stamp in self.model.dump.run.stamps}
        return tuple(other for other in owner if other != name and owner[other] == owner.get(name))

    @cached_property
    def first_odd_module(self) -> str:
        """The module that first put out what no placement explains, on the lowest rank that has one; else empty."""
        for record in self.model.dump.ranks.values():
            for tensor in record.tensors:
                body = record.bodies[tensor.body]
                if (body.role, body.stage, body.layout) == ("activation", "step", None):
                    return Fold(tensor.name, tensor.numbers, tensor.suffix).names()[0]
        return ""


def is_right(one: Compared) -> bool:
    """Whether a result was compared, and is the unsharded model's on every rank."""
    return not one.incomparable and not one.wrong
