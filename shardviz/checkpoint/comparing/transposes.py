"""Matrices that the second checkpoint has under another name and transposed."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.orders import name_change
from shardviz.checkpoint.comparing.undo import cause_of_order
from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.relate.values import is_alike
from shardviz.text import folded_names

if TYPE_CHECKING:
    from shardviz.checkpoint.comparing.common import Outcomes
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Tensor


MATRIX = 2
"""Dims of a matrix."""

MAX_NAMED = 3
"""Names that a note has at most."""

LAYER = re.compile(r".*\.[0-9]+\.")
"""What stands before the name of a tensor in its layer."""


def with_transposes(outcomes: Outcomes) -> Outcomes:
    """Pair each matrix that only the first has with one that only the second has, if that is it transposed."""
    added: dict[object, list[Pair]] = defaultdict(list)
    for outcome, pair in outcomes:
        if outcome.verdict == "added" and (key := _key(pair.second)) is not None:
            added[key].append(pair)
    joined: dict[int, tuple[Outcome, Pair]] = {}
    taken: set[int] = set()
    for outcome, pair in outcomes:
        key = _key(pair.first, turned=True) if outcome.verdict == "missing" and added else None
        matching = [one for one in added.get(key, ()) if id(one) not in taken and _is_turned(pair, one)]
        if len(matching) == 1:
            taken.add(id(matching[0]))
            joined[id(pair)] = _turned(outcome, replace(pair, second=matching[0].second))
    kept = ((outcome, pair) for outcome, pair in outcomes if id(pair) not in taken)
    return [joined.get(id(pair), (outcome, pair)) for outcome, pair in kept]


def untransposed_notes(outcomes: Outcomes) -> list[str]:
    """Name the square matrices that keep their dims, while all other matrices of their layer are transposed."""
    layers: dict[str, list[tuple[str, bool, bool]]] = defaultdict(list)
    for outcome, pair in outcomes:
        layer = LAYER.match(pair.name)
        if layer is None or pair.first is None or pair.second is None or len(pair.first.shape) != MATRIX:
            continue
        shapes = tuple(pair.first.shape), tuple(pair.second.shape)
        is_square = shapes[0][0] == shapes[0][1]
        is_turned = outcome.verdict == "permuted" if is_square else shapes[0] == shapes[1][::-1]
        layers[layer[0]].append((pair.name, is_square, is_turned))
    kept = [
        name
        for matrices in layers.values()
        if sum(not is_square for _, is_square, _ in matrices) > 1
        and all(is_turned for _, is_square, is_turned in matrices if not is_square)
        for name, is_square, is_turned in matrices
        if is_square and not is_turned
    ]
    are = "it is square" if len(kept) == 1 else "they are square"
    also = f"not transposed, although all other matrices of the layer are: {are}, so that no shape shows it"
    return [f"{folded_names(kept, MAX_NAMED)}: {also}"] if kept else []


def _key(tensor: Tensor | None, *, turned: bool = False) -> object:
    """Return what a matrix has in common with its equals: shape, element type, first row; None if it is one number."""
    if not isinstance(tensor, StoredTensor) or len(tensor.shape) != MATRIX:
        return None
    try:
        bits = tensor.bits.T if turned else tensor.bits
    except (DumpError, OSError):
        return None
    return None if is_alike(bits) else (bits.shape, tensor.dtype, bits[:1].tobytes())


def _is_turned(pair: Pair, other: Pair) -> bool:
    """Whether a matrix of the second is one of the first with its key, transposed."""
    first, second = pair.first, other.second
    assert first is not None
    assert second is not None
    return bool(np.array_equal(first.bits.T, second.bits))


def _turned(outcome: Outcome, pair: Pair) -> tuple[Outcome, Pair]:
    first, second = pair.both
    order, cause = name_change(first.bits, second.bits, ()), cause_of_order(first.bits, second.bits)
    return outcome.became("permuted", order, cause, other=second.name), pair
