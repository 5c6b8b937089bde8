"""The map by which tensors are paired if most names differ: one that knows the names, or one that fits the contents."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.by_content.families import REPRESENTATIVES, lines_of, rules_from
from shardviz.checkpoint.by_content.inferring import pair_by_content, with_groups_of_heads
from shardviz.checkpoint.comparing.equality import agree
from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.comparing.pairs import pair_tensors
from shardviz.checkpoint.maps.families import family_of, find_map, numbers_beside
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, Op
from shardviz.checkpoint.maps.matching import NUMBER
from shardviz.checkpoint.maps.numbering import starred
from shardviz.checkpoint.optimizer import state_of
from shardviz.errors import DumpError
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardviz.checkpoint.by_content.families import FamilyMatch
    from shardviz.checkpoint.comparing.pairs import Pair, Pairs
    from shardviz.checkpoint.records import Checkpoint, Tensor

FEWEST_LAYERS = 3
"""Layers that show a map if most names are equal: with fewer, no layer is the odd one."""

STACKED = 3
"""Dims of a tensor that has all experts of a layer."""


def with_map(pairs: Pairs, before: Checkpoint, after: Checkpoint) -> Pairs:
    """Pair the tensors to compare: by names, by a map that knows these, or by contents."""
    sides = [pair.first for pair in pairs.lonely], [pair.second for pair in pairs.lonely]
    first, second = ([one for one in side if one is not None] for side in sides)
    num_named = sum(state_of(pair.name) is None for pair in pairs.both)
    if min(sum(state_of(one.name) is None for one in side) for side in (first, second)) <= num_named:
        return _with_map_of_layers(pairs, before, after)  # most have one name: another name is a difference
    if family := family_of(before.tensors, after.tensors):
        again = _with_turned_experts(pair_tensors(before, after, find_map(family)))
        return replace(again, notes=(f"names: --map {family} knows them, and is used", *again.notes), is_mapped=True)
    choices, ambiguous = pair_by_content(first, second)
    again = _with_choices(pairs, choices, before, after)
    undecided, outcomes = [], []
    for pair in again.lonely:
        if why := ambiguous.get(pair.name):
            outcomes.append(Outcome(pair.name, "", "not-compared", why))
        else:
            undecided.append(pair)
    return replace(again, lonely=tuple(undecided), open=tuple(outcomes))


def _with_choices(pairs: Pairs, choices: Sequence[FamilyMatch], before: Checkpoint, after: Checkpoint) -> Pairs:
    """Pair the tensors by the map that choices by content are; the same pairs if there are none."""
    choices = with_groups_of_heads(choices, numbers_beside((before.folder, after.folder)))
    lines = lines_of(choices, (before.tensors, after.tensors))
    if not lines:
        return pairs
    functions = tuple(dict.fromkeys(name for choice in choices for name in choice.functions))
    again = pair_tensors(before, after, rules_from(lines))
    return replace(again, lines=tuple(map(str, lines)), is_mapped=True, guessed=functions)


def _with_map_of_layers(pairs: Pairs, before: Checkpoint, after: Checkpoint) -> Pairs:
    """Pair leftover names by content if each layer's tensor is joined, split or transformed.

    A new name alone is a difference, and so are new numbers of layers.
    """
    first, second = ([tensor for pair in pairs.lonely if (tensor := pair.sides[at]) is not None] for at in (0, 1))
    if min(len(first), len(second)) < FEWEST_LAYERS:
        return pairs
    paired_patterns = {NUMBER.sub("*", pair.name) for pair in pairs.both}
    choices = [one for one in pair_by_content(first, second)[0] if _is_of_layers(one, paired_patterns)]
    return _with_choices(pairs, choices, before, after)


def _is_of_layers(choice: FamilyMatch, paired_patterns: Collection[str]) -> bool:
    """Whether a choice transforms every layer's tensor of a name, with equal layer numbers."""
    every = [choice.whole, *(link.family for link in choice.recipe.links)]
    layers = {numbers[0] for numbers in choice.whole.members if numbers}
    is_whole = len(layers) >= FEWEST_LAYERS and not any(family.pattern in paired_patterns for family in every)
    return is_whole and "(" in choice.recipe.text() and all(link.is_direct for link in choice.recipe.links)


def _with_turned_experts(pairs: Pairs) -> Pairs:
    """Transpose the stacked experts that a map makes if those of most layers are transposed.

    Formats store them as (in, out) or (out, in). A matrix is as the map says: one that all layers have transposed is a
    difference.
    """
    layers: dict[str, list[Pair]] = {}
    for pair in pairs.both:
        if len(pair.both[0].shape) == STACKED and any(isinstance(side, MappedTensor) for side in pair.sides):
            layers.setdefault(starred(pair.name), []).append(pair)
    turned: dict[str, Pair] = {}
    notes: list[str] = []
    for name, some in layers.items():
        looked_at = some[:: max(1, len(some) // REPRESENTATIVES)]
        if len(some) >= FEWEST_LAYERS and 2 * sum(map(_is_turned, looked_at)) > len(looked_at):
            turned |= {pair.name: _with_transposed(pair) for pair in some}
            line = f"{printable(name)} = {printable(turned[some[0].name].other_name)}"
            notes.append(f"names: most layers have experts transposed, which is taken as meant: {line}")
    pairs_turned = tuple(turned.get(pair.name, pair) for pair in pairs.both)
    return replace(pairs, both=pairs_turned, notes=(*notes, *pairs.notes))


def _is_turned(pair: Pair) -> bool:
    """Whether the first expert of a pair is equal only if what the map makes is transposed."""
    try:
        straight, turned = (tuple(map(_first_of, one.both)) for one in (pair, _with_transposed(pair)))
        return not agree(*straight) and agree(*turned)
    except DumpError:
        return False


def _first_of(tensor: Tensor) -> MappedTensor:
    node = Op("take", (tensor.node if isinstance(tensor, MappedTensor) else tensor,), (0, 0))
    return MappedTensor(node, node.shape, tensor.name)


def _with_transposed(pair: Pair) -> Pair:
    first, second = (_transposed(side) if isinstance(side, MappedTensor) else side for side in pair.both)
    return replace(pair, first=first, second=second)


def _transposed(made: MappedTensor) -> MappedTensor:
    node = Op("transpose", (made.node,))
    return replace(made, node=node, shape=node.shape, text=f"transpose({made.text})")
