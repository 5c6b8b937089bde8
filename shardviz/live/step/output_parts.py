"""What ranks know of outputs: the layouts that values fit, and the dims of the batch.

Where an output has the dims that the batch is split along is worked out from shapes: not every model keeps them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shardviz.live.claims.local import Local
from shardviz.live.step.return_values import joined, named_calls, numbers_of
from shardviz.relate.tolerance import ELEMENT, EXACT, ROUNDINGS_OF_ONE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shardviz.layout.layout import Placements
    from shardviz.layout.mesh import Mesh
    from shardviz.live.step.unsharded.step import UnshardedStep


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg": lambda stacked: stacked.double().mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the unsharded model returns under one name.

    Attributes:
        parts: The same for each part of the batch that it ran on; one for a whole batch.
    """

    whole: torch.Tensor
    parts: tuple[torch.Tensor, ...]

    def near(self, precision: float) -> float:
        """Return how far an element may be from what a layout gives."""
        finite = self.whole[torch.isfinite(self.whole)].abs().double()
        largest = float(finite.max()) if finite.numel() else 0.0
        return (max(ELEMENT["float32"], ROUNDINGS_OF_ONE * precision) if precision else EXACT) * max(largest, EXACT)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank tells the others of one of its tensors.

    Attributes:
        fits: The placements that give the rank these values.
        parts: The values of every micro-batch, if they may be a number for the rank's rows.
        is_labeled: Whether it is a DTensor, whose placements say how ranks share it.
        is_loss: Whether it is the number that the step returned as its loss.
    """

    shape: tuple[int, ...]
    fits: tuple[Placements, ...] = ()
    parts: tuple[torch.Tensor, ...] = ()
    is_labeled: bool = False
    is_loss: bool = False


@dataclass
class Outputs:
    """What is compared of a model's outputs, the same tensors on every rank.

    Attributes:
        held: This rank's values, with their layouts.
        not_checked: Why others are not compared, by name.
    """

    held: list[Local] = field(default_factory=list)
    expected: list[Local] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, held: Sequence[Local], reference: torch.Tensor) -> None:
        """Add a tensor that is compared; `held` is empty on a rank that does not have the output."""
        self.held += held
        self.expected.append(Local(name, "output", tuple(reference.shape), reference))


def is_near(left: torch.Tensor, right: torch.Tensor, near: float) -> bool:
    """Whether two tensors of one shape are equal up to a number; NaN and infinity are near to themselves."""
    return bool(torch.allclose(left.double(), right.double(), rtol=0.0, atol=near, equal_nan=True))


def is_loss(parts: Sequence[torch.Tensor], loss: torch.Tensor, near: float) -> bool:
    """Whether the numbers of some parts of a batch make up a loss: their mean, or their sum."""
    whole = numbers_of(loss)
    if whole is None or whole.numel() != 1 or any(part.numel() != 1 for part in parts):
        return False
    stacked = torch.stack([part.reshape(()).double().cpu() for part in parts])
    whole = whole.reshape(()).double().cpu()
    return is_near(stacked.mean(), whole, near) or is_near(stacked.sum(), whole, near)


def num_runs(reference: UnshardedStep) -> int:
    """Return how often the unsharded model ran on the whole batch, or on each part of it."""
    return len(reference.step.returned) // reference.parts // reference.turns


def wanted_outputs(reference: UnshardedStep) -> dict[str, Wanted]:
    """Return what the unsharded model returned, by name."""
    outputs = {}
    for name, values in named_calls(reference.step.returned, num_runs(reference)).items():
        parts = [numbers for value in values if (numbers := numbers_of(value)) is not None]
        whole = joined(parts, reference.dim) if len(parts) == len(values) else None
        if whole is not None:
            outputs[name] = Wanted(whole, tuple(parts))
    return outputs


def reduction_of(
    reference: Wanted, of_ranks: Mapping[int, Offer], mesh: Mesh, batch_axes: Collection[str], precision: float
) -> str | None:
    """Return the reduction over the batch's axes that gives every rank the unsharded model's value.

    Args:
        of_ranks: What every rank has that returns an output.
        precision: The relative precision of the narrowest numbers in the step.
    """
    is_shared_out = bool(batch_axes) or any(len(offer.parts) > 1 for offer in of_ranks.values())
    if not is_shared_out or not all(offer.parts and rank in mesh for rank, offer in of_ranks.items()):
        return None
    shapes = {part.shape for offer in of_ranks.values() for part in offer.parts} | {
        part.shape for part in reference.parts
    }
    if len(shapes) > 1:
        return None
    groups: dict[tuple[int, ...], list[tuple[torch.Tensor, ...]]] = {}
    for rank, offer in of_ranks.items():
        coords = zip(mesh.axes, mesh.coord_of(rank), strict=True)
        groups.setdefault(tuple(at for axis, at in coords if axis not in batch_axes), []).append(offer.parts)
    near = reference.near(precision)
    for op, reduced in REDUCTIONS.items():
        expected = reduced(torch.stack(reference.parts).cpu().double())
        for group in groups.values():
            actual = reduced(torch.stack([reduced(torch.stack(parts).double()) for parts in group]))
            if actual.shape != expected.shape or not is_near(actual, expected, near):
                break
        else:
            return op
    return None


Shape = tuple[int, ...]


def output_dims(shape: Shape, whole: Shape | None, batch: Shape, counts: Mapping[int, int]) -> dict[int, int | None]:
    """Return the dim of an output for every dim that the batch is split along; None if it has none.

    It is where the parts together have the unsharded model's size. An output that has that size already was gathered,
    or, as a mean over a sequence does, has lost the dim.

    Args:
        batch: The shape of this rank's part of the batch, which tells dims apart that have as many parts.
        counts: The number of parts of each dim of the batch.
    """
    if shape == whole:
        return dict.fromkeys(counts)
    dims: dict[int, int | None] = {dim: None for dim, parts in counts.items() if parts == 1}
    counts = {dim: parts for dim, parts in counts.items() if parts > 1}
    for dim, parts in sorted(counts.items()):
        if whole is None:
            dims[dim] = dim if len(shape) > dim else None
            continue
        smaller = [at for at, (one, all_of_it) in enumerate(zip(shape, whole, strict=False)) if one != all_of_it]
        fitting = [at for at in smaller if at not in dims.values() and shape[at] * parts == whole[at]]
        if fitting:
            size = batch[dim] if dim < len(batch) else None
            dims[dim] = min(fitting, key=lambda at: (shape[at] != size, at != dim, at))
        else:
            dims[dim] = next(iter(smaller), 0) if len(counts) == 1 else None  # sizes that do not fit are a finding
    return dims


def merged_dims(shape: Shape, whole: Shape, batch: Shape, counts: Mapping[int, int]) -> str:
    """Say that an output has two split dims of the batch in one, as flattened tokens are; empty if it has not."""
    counts = {dim: parts for dim, parts in counts.items() if parts > 1}
    is_all = math.prod(shape) * math.prod(counts.values()) == math.prod(whole)
    if not is_all or len(counts) < 2 or None not in output_dims(shape, whole, batch, counts).values():
        return ""
    dims = " and ".join(str(dim) for dim in sorted(counts))
    return f"the output: the batch is split along dims {dims}, which {list(shape)} has merged into one"
