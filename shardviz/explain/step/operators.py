"""Causes in torch's own functions of DTensors."""

from __future__ import annotations

from shardviz.explain.cause import AtLine
from shardviz.explain.step.lines import WRONG


class WrongOperator(AtLine):
    """torch gives something else of DTensors than of the whole tensors.

    A function of DTensors runs on each rank's part, and a rule of torch's says what the parts' results are of the
    whole. Some rules are wrong, and nothing raises. In torch 2.13 the mean of `mse_loss`, `smooth_l1_loss`,
    `huber_loss`, `soft_margin_loss` and `binary_cross_entropy` has a backward that divides by the size of the rank's
    part, so that gradients are as many times too large as there are parts; `cumsum(-1)` and `logcumsumexp(-1)` run
    over each part alone. `shardviz audit` tries such functions on the installed torch.

    Attributes:
        labels: The placements of what it is given.
        is_backward: Whether its forward is right, and its backward is wrong.
    """

    labels: str
    is_backward: bool = False
    kinds = WRONG
    why = (
        "torch's rule for {is_backward:?the backward of }{function} with {labels} is wrong in this version: what it is "
        "given in {place} is right, and what it gives is not"
    )
    how = (
        "in {place}, {is_mean:?pass reduction='sum' and divide by the whole's number of elements; or }redistribute "
        "what {function} is given to Replicate() before. Report it to PyTorch"
    )

    @property
    def is_mean(self) -> bool:
        """Whether it is a loss whose backward divides by a number of elements."""
        return self.is_backward and ("loss" in self.function or "cross_entropy" in self.function)
