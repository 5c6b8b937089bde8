"""Checkpoints of other steps in the same folder, and which of them have a tensor's values."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.equality import is_same
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, Op
from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.errors import DumpError
from shardviz.relate.values import is_alike

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.maps.mapped_tensors import Node
    from shardviz.checkpoint.records import Checkpoint, Tensor

MAX_SIBLINGS = 8
"""Checkpoints of other steps that are looked at, the nearest ones first."""

LEVELS = 2
"""Folders above a checkpoint whose names may have its step: `checkpoint-100/model`."""

MAX_ENTRIES = 4096

_STEP = re.compile(
    r"((?:.*(?:step|checkpoint|ckpt|iter|iteration|epoch)[-_=.]?)?)([0-9]{1,18})([^0-9]*)", re.IGNORECASE
)
"""A name that counts steps: `checkpoint-100`, `iter_0001000`, `1000`; not `exp2`, which is another run."""


def siblings(path: Path) -> list[Path]:
    """Return the checkpoints of other steps: only the last number of a path's name differs.

    Example:
        >>> siblings(Path("runs/checkpoint-200"))  # doctest: +SKIP
        [PosixPath('runs/checkpoint-100'), PosixPath('runs/checkpoint-300')]
    """
    path = path.absolute()
    for folder in (path, *path.parents)[:LEVELS]:
        if (step := _STEP.fullmatch(folder.name)) is None:
            continue
        number, rest = int(step[2]), path.relative_to(folder)
        near = sorted(_other_steps(folder, step), key=lambda pair: abs(pair[0] - number))
        there = [other / rest for _, other in near if is_checkpoint(other / rest)]
        if there:
            return there[:MAX_SIBLINGS]
    return []


def _other_steps(folder: Path, step: re.Match[str]) -> Iterator[tuple[int, Path]]:
    try:
        names = [one.name for _, one in zip(range(MAX_ENTRIES), folder.parent.iterdir(), strict=False)]
    except OSError:
        return
    for name in names:
        other = _STEP.fullmatch(name)
        if other is not None and name != folder.name and (other[1], other[3]) == (step[1], step[3]):
            yield int(other[2]), folder.parent / name


def open_steps(paths: Iterable[Path], but: Iterable[Path]) -> list[Checkpoint]:
    """Open what can be opened of some checkpoints, but for those that are compared."""
    compared = {path.absolute() for path in but}
    checkpoints = []
    for path in paths:
        if path.absolute() not in compared:
            try:
                checkpoints.append(open_checkpoint(path))
            except (DumpError, OSError):  # of another step; nothing depends on it
                continue
    return checkpoints


def number_of(path: Path, reference: Path) -> int | None:
    """Return a checkpoint's step, the number that differs from a reference path, or None.

    Example:
        >>> from pathlib import Path
        >>> number_of(Path("runs/checkpoint-100/model"), reference=Path("runs/checkpoint-200/model"))
        100
    """
    path, reference = path.absolute(), reference.absolute()
    for folder, other in islice(zip((path, *path.parents), (reference, *reference.parents), strict=False), LEVELS):
        steps = [_STEP.fullmatch(one.name) for one in (folder, other)]
        if steps[0] is not None and steps[1] is not None:
            is_series = folder.parent == other.parent and path.relative_to(folder) == reference.relative_to(other)
            return int(steps[0][2]) if is_series and steps[0].group(1, 3) == steps[1].group(1, 3) else None
    return None


def steps_with(
    pair: Pair, of_first: Iterable[Checkpoint], of_second: Iterable[Checkpoint]
) -> tuple[int, tuple[Checkpoint, ...]] | None:
    """Return which side of a pair (0 or 1) has other steps' values, and those checkpoints.

    Args:
        of_first: Checkpoints of other steps with the first one's names.
        of_second: And with the second one's.
    """
    first, second = pair.both
    if is_alike(first.bits) or is_alike(second.bits):
        return None
    for which, own, held, steps in ((1, first, second, of_first), (0, second, first, of_second)):
        found = tuple(step for step in steps if has_values_of(step, own, held))
        if found:
            return which, found
    return None


def has_values_of(step: Checkpoint, tensor: Tensor, held: Tensor) -> bool:
    """Whether another step has some values under the name of a tensor."""
    there = tensor_in(step, tensor)
    return there is not None and is_same(there, held)


def tensor_in(step: Checkpoint, tensor: Tensor) -> Tensor | None:
    """Return the same tensor of another step; None if that lacks it or has another shape."""
    if not isinstance(tensor, MappedTensor):
        found = step.tensors.get(tensor.name)
        return found if found is not None and found.shape == tensor.shape else None
    node = _node_in(step, tensor.node)
    return replace(tensor, node=node) if isinstance(node, Op) else None


def _node_in(step: Checkpoint, node: Node) -> Node | None:
    if not isinstance(node, Op):
        return tensor_in(step, node)
    parts = [_node_in(step, part) for part in node.parts]
    return (
        None
        if any(part is None for part in parts)
        else replace(node, parts=tuple(part for part in parts if part is not None))
    )
