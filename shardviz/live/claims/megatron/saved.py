"""What Megatron's `sharded_state_dict()` says of a model: where in the global tensor each rank's part is saved.

It is what a checkpoint is made of, so that it goes before the attributes of a weight where they differ. A factory has
several parts of one weight: gate and up of a gated MLP, each split by itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardviz.live.compat import clean_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight is split.

    Attributes:
        dim: The dim that is split; -1 where none is.
        stride: The segments of that dim that are split each by itself.
        index: Which part this rank has.
        count: The number of parts.
    """

    dim: int
    stride: int
    index: int
    count: int


def cuts_of(model: nn.Module) -> dict[str, Cut | None]:
    """Return how each weight is saved, by its own name; None where that is not one dim, split evenly."""
    if "megatron.core.dist_checkpointing.mapping" not in sys.modules:
        return {}
    found: dict[str, Cut | None] = {}
    with torch.no_grad():
        for prefix, module in _outermost(model):
            found |= {clean_name(name): _cut(parts) for name, parts in _parts(module, prefix)}
    return found


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that say how they are saved."""
    done: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if hasattr(module, "sharded_state_dict") and not any(name.startswith(one) for one in done):
            done += (f"{name}." if name else "",)
            yield f"{name}." if name else "", module


def _parts(module: Any, prefix: str) -> Iterator[tuple[str, list[Any]]]:
    try:
        saved = module.sharded_state_dict(prefix=prefix)
    except Exception:  # a module of somebody else's, or one that needs what the job has not set up yet
        return
    for name, one in saved.items():
        parts = one.build() if hasattr(one, "build") else one
        listed = list(parts) if isinstance(parts, list | tuple) else [parts]
        if all(hasattr(part, "axis_fragmentations") for part in listed):
            yield name, listed


def _cut(parts: Sequence[Any]) -> Cut | None:
    """Return the one dim that parts split evenly, each behind the other; None where they are anything else."""
    first = parts[0]
    skip = first.prepend_axis_num
    fragments = [tuple(part.axis_fragmentations or ())[skip:] for part in parts]
    local = tuple(first.local_shape)
    split = [dim for dim, count in enumerate(fragments[0]) if count > 1]
    if not split and len(parts) == 1:
        return Cut(-1, 1, 0, 1)
    alike = all(
        tuple(part.local_shape) == local and one == fragments[0] for part, one in zip(parts, fragments, strict=True)
    )
    if len(split) != 1 or not alike or fragments[0][split[0]] % len(parts) or first.flattened_range is not None:
        return None
    dim = split[0]
    count = fragments[0][dim] // len(parts)
    places = [part.global_offset[skip + dim] // max(local[dim], 1) for part in parts]
    index = places[0]
    is_even = places == [number * count + index for number in range(len(parts))]
    return Cut(dim if count > 1 else -1, len(parts), index, count) if is_even else None
