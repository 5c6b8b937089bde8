"""A step that a library makes of several steps of torch's optimizers, with copies in the place of parameters.

DeepSpeed and Megatron-core reduce, unscale and clip gradients in a step of their own, let an inner optimizer step parts
of flat buffers, one buffer at a time, and write the weights afterwards. What a parameter has in `.grad` before is not
what its optimizer gets. Hooks on gradients may step each parameter in backward by an optimizer of its own, and free the
gradient: all of a backward pass are one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.claims import registry
from shardviz.live.run.step_files import Step, gradients_of, sampled
from shardviz.live.step.steppers import names_of_stand_ins, stepped_by, steps

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from shardviz.live.claims.local import Local
    from shardviz.live.step.steppers import Options


@dataclass
class LibraryStep:
    """A library's step while it is made.

    Attributes:
        stepper: The library's engine or optimizer whose step it is; None if hooks step parameters in backward.
        optimizers: The optimizers that have stepped in it, in order.
        gradients: Copies of this rank's part of the gradients that they stepped with.
        options: The numbers with which they step the model's parameters.
        unknown: Why a parameter's gradient is not understood, by name.
    """

    stepper: object
    optimizers: list[Optimizer] = field(default_factory=list)
    gradients: dict[str, Local] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def add(self, optimizer: Optimizer, step: Step | None) -> None:
        """Add an inner optimizer's step, before it is made.

        Args:
            optimizer: The optimizer.
            step: The step that is followed, if there is one.
        """
        self.optimizers.append(optimizer)
        if step is None or not steps(optimizer, step.root):
            return
        model = unwrapped(step.root)
        locals_ = {local.name: local for local in local_tensors(model)}
        weights: dict[torch.Tensor, Local] = {
            param: locals_[name] for name, param in registry.named_parameters(model) if name in locals_
        }
        stepped = stepped_by(optimizer)
        if self.stepper is None:
            # The gradients of others may not be there yet, or be those of an earlier micro-batch.
            others = {local.name for param, local in weights.items() if id(param) not in stepped}
            self.gradients |= {local.name: local for local in gradients_of(step, others)}
            return
        for local in registry.gradients(weights, self.stepper, stepped):
            if local.unknown:
                self.unknown[local.name] = local.unknown
            else:
                self.gradients[local.name] = replace(local, values=sampled(local.values.detach(), step.most))
        for local in gradients_of(step, names_of_stand_ins(model)):
            self.gradients.setdefault(local.name, local)

    def options_of(self, root: nn.Module) -> Options:
        """Return the options that were seen; they are those of the model."""
        return self.options
