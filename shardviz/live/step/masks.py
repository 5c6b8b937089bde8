"""Masks that a step drew, as dropout does, each with the first tensor that it masked.

Only plain tensors are looked at: DTensors have a random state of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.dump.records.step import MaskRecord
from shardviz.live.capture.describe import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAWN = frozenset({"bernoulli", "bernoulli_"})
KEPT = frozenset({"div", "div_", "mul", "mul_", "where", "masked_fill", "masked_fill_"})


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask that was drawn.

    Attributes:
        kept: Which elements it keeps.
        given: What it was laid on.
    """

    kept: torch.Tensor
    given: torch.Tensor


class Masks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the masks that are drawn inside this context, in order.

    Attributes:
        masks: The masks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[Mask] = []
        self._drawn: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            self._add(output[1], args[0])
        elif name in DRAWN and type(output) is torch.Tensor:
            self._drawn[id(output)] = output
        elif name in KEPT and self._drawn:
            self._follow(name, [arg for arg in args if type(arg) in (torch.Tensor, torch.nn.Parameter)], output)
        return output

    def _follow(self, name: str, tensors: Sequence[torch.Tensor], output: Any) -> None:
        masks = [one for one in tensors if id(one) in self._drawn]
        others = [one for one in tensors if one.numel() > 1 and id(one) not in self._drawn]
        if masks and others:
            self._add(self._drawn.pop(id(masks[0])), others[0])
        elif masks and name.startswith(("div", "mul")):
            self._drawn[id(output)] = output

    def _add(self, mask: torch.Tensor, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor or mask.shape != tensor.shape or not mask.numel():
            return
        self.masks.append(Mask((mask != 0).detach(), tensor.detach().clone()))


def mask_records(alike: Sequence[Mask], again: Sequence[Mask], whole: Sequence[Mask]) -> list[MaskRecord]:
    """Return what a dump keeps of this rank's masks.

    Args:
        alike: Those of a step in which all ranks were seeded alike.
        again: Those of one in which each rank was seeded differently.
        whole: Those of the unsharded model.
    """
    if not len(alike) == len(again) == len(whole):
        return []
    return [
        MaskRecord(
            digest(mask.kept),
            digest(repeated.kept),
            digest(mask.given),
            mask.kept.numel(),
            int(mask.kept.sum()),
            unsharded.kept.numel(),
        )
        for mask, repeated, unsharded in zip(alike, again, whole, strict=True)
    ]
